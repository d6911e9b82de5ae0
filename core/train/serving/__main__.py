"""`python -m core.train.serving RUN_DIR FD`: the serving child. FD is its end of a socket pair that its worker made;
requests come and pieces of answers go over it (core/spec/run/frames.py)."""

from __future__ import annotations

import sys

from core.spec.run.orders import ServingOrder
from core.train.__main__ import importing
from core.train.entry.fencing import leave
from core.train.session.over_socket import begin


def main(arguments: list[str]) -> int:
    run_dir, stream, stop = begin(arguments, "core.train.serving", "The serving child.", ServingOrder).armed()
    with importing():
        from core.train.serving.serve import serve  # slow: torch and transformers

    return serve(run_dir, stream, stop)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
