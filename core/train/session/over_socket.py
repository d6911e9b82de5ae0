"""How a child begins whose work comes over a socket: a session's, and the serving one."""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import ServingOrder, SessionOrder
from core.train.base.stop import Stop
from core.train.entry.fencing import arm

OrderT = TypeVar("OrderT", SessionOrder, ServingOrder)


@dataclass(frozen=True, slots=True)
class Begun(Generic[OrderT]):
    """What the command line of `python -m MODULE RUN_DIR FD` names."""

    run_dir: Path
    fd: int
    """The child's end of the socket pair."""
    order: OrderT

    def armed(self) -> tuple[Path, socket.socket, Stop]:
        """Arm the fence. Returns the run's folder, the child's end of the socket pair, and what asks it to stop."""
        stop = arm(self.order.fence_seconds, held_at=self.order.held_at)
        return self.run_dir, socket.socket(fileno=self.fd), stop


def begin(arguments: list[str], module: str, description: str, kind: type[OrderT]) -> Begun[OrderT]:
    """Read the command line, and the order in RUN_DIR."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder with run.json (core/spec/run)")
    parser.add_argument("fd", type=int, metavar="FD", help="number of an inherited socket")
    given = parser.parse_args(arguments)
    run_dir = given.run_dir.absolute()
    return Begun(run_dir, given.fd, kind.model_validate_json((run_dir / ORDER_FILE).read_bytes()))
