"""`python -m eft.manual [PAGE]`: print a page of docs/ (cli.md unless another is named)."""

from __future__ import annotations

import sys

from eft.cli import tree
from eft.manual.docs_pages import PAGES
from eft.manual.source import pages

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1] if len(sys.argv) > 1 else "cli.md"](list(pages(tree()))))
