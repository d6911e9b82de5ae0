"""`python -m core.train.session RUN_DIR FD`: the child of a session. FD is its end of a socket pair that its worker
made; operations come and answers go over it (core/spec/run/frames.py). With several ranks it is their launcher."""

from __future__ import annotations

import sys

from core.spec.run.orders import SessionOrder
from core.train.__main__ import importing
from core.train.entry.fencing import leave
from core.train.session.over_socket import begin


def main(arguments: list[str]) -> int:
    begun = begin(arguments, "core.train.session", "The child of a session.", SessionOrder)
    if begun.order.world_size > 1:
        from core.train.ranks.launch import launch

        return launch(begun.run_dir, begun.order, "core.train.session.ranks", begun.fd)
    run_dir, stream, stop = begun.armed()
    with importing():
        from core.train.session.serve import serve  # slow: torch and transformers

    return serve(run_dir, stream, stop)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
