"""`python -m core.train.session.ranks RUN_DIR [FD]`: one rank of a session, started by core/train/ranks/launch.py. Rank
0 has FD."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from core.train.__main__ import importing
from core.train.entry.fencing import leave
from core.train.ranks.begin import begin_rank


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.train.session.ranks", description="One rank of a session.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json (core/spec/run)")
    parser.add_argument("fd", type=int, nargs="?", metavar="FD", help="number of an inherited socket, of rank 0")
    given = parser.parse_args(arguments)
    if (begun := begin_rank("python -m core.train.session RUN_DIR FD")) is None:
        return 2
    rank_env, stop = begun
    with importing():
        from core.train.session.serve import serve  # slow: torch and transformers

    stream = None if given.fd is None else socket.socket(fileno=given.fd)
    return serve(given.run_dir, stream, stop, rank_env)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
