"""`python -m eft.manual`: print docs/cli.md."""

from __future__ import annotations

import sys

from eft.cli import tree
from eft.manual.formats import markdown
from eft.manual.source import pages

if __name__ == "__main__":
    sys.stdout.write(markdown(list(pages(tree()))))
