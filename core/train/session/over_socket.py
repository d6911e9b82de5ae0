"""How a child begins whose work comes over a socket: a session's, and the serving one."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import ServingOrder, SessionOrder
from core.train.base.stop import Stop
from core.train.entry.fencing import arm


def begin(
    arguments: list[str], module: str, description: str, kind: type[SessionOrder] | type[ServingOrder]
) -> tuple[Path, socket.socket, Stop]:
    """Read the command line of `python -m MODULE RUN_DIR FD` and the order in RUN_DIR, and arm the fence. Returns the
    run's folder, the child's end of the socket pair, and what asks it to stop."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json (core/spec/run)")
    parser.add_argument("fd", type=int, metavar="FD", help="number of an inherited socket")
    given = parser.parse_args(arguments)
    run_dir = given.run_dir.absolute()
    order = kind.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    stop = arm(order.fence_seconds, held_at=order.held_at)
    return run_dir, socket.socket(fileno=given.fd), stop
