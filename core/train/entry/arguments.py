"""The one argument of a child: its run folder (core/spec/run)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def run_folder(module: str, what: str, arguments: Sequence[str] | None = None) -> Path:
    """RUN_DIR of `python -m MODULE RUN_DIR`, absolute; `what` that module does is for --help. Ends the process, as
    argparse does, where there is none."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=what)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json (core/spec/run)")
    return Path(parser.parse_args(sys.argv[1:] if arguments is None else arguments).run_dir.absolute())
