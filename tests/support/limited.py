"""Three runs of one job from one process, forked: resident, resident under a limit on memory, and streamed from disk
under that limit: `python -m tests.support.limited FOLDER LIMIT_BYTES`, with run folders `free`, `tight` and `disk`, and
`warm`, a small job that is run first, so that all code is loaded before the limit counts.

The limit is the kernel's, on private memory that may be written (RLIMIT_DATA, setrlimit(2)), above what the process has
before it loads a model. Prints one JSON object: the exit codes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def main(folder: Path, limit: int) -> dict[str, int]:
    from core.train.recipe import run

    codes = {"warm": run(folder / "warm")}
    for name in ("free", "tight", "disk"):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                if name != "free":
                    most = data_bytes() + limit
                    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
                code = run(folder / name)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        codes[name] = os.waitstatus_to_exitcode(status)
    return codes


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
