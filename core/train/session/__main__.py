"""`python -m core.train.session RUN_DIR FD`: the child of a session. FD is its end of a socket pair that its worker
made; operations come and answers go over it (core/spec/run/frames.py)."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import SessionOrder
from core.train.__main__ import importing
from core.train.entry.fencing import arm, leave


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.train.session", description="The child of a session.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json (core/spec/run)")
    parser.add_argument("fd", type=int, metavar="FD", help="number of an inherited socket")
    given = parser.parse_args(arguments)
    run_dir = given.run_dir.absolute()
    order = SessionOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    stop = arm(order.fence_seconds, held_at=order.held_at)
    stream = socket.socket(fileno=given.fd)
    with importing():
        from core.train.session.serve import serve  # slow: torch and transformers

    return serve(run_dir, stream, stop)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
