"""Three runs of one job, forks of one process: resident, resident under a limit on memory, and streamed from disk under
that limit; their run folders are `free`, `tight` and `disk`. `warm` is a small job that is run first, so that all code
is loaded before the limit counts.

The limit is the kernel's, on private memory that may be written (RLIMIT_DATA, setrlimit(2)), above what the process has
before it loads a model.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.status import status_bytes


def largest_mappings(least: int = 2**22) -> list[str]:
    """Private memory that may be written, in mappings of at least so many bytes: MiB and what is mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *mapped = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if rights == "rw-p" and end - begin >= least:
            found.append(" ".join((str((end - begin) >> 20), *mapped)))
    return found


def limit_memory(more: int) -> list[Any]:
    """Let this process have so many bytes more. What was freed in its heap before (by other tests, where it is a fork
    of theirs) is filled, as long as the result is kept."""
    import torch

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData"), hard))
    filled = list[Any]()
    with suppress(MemoryError, RuntimeError):
        while True:
            filled.append(torch.empty(2**18, dtype=torch.uint8))
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + more, hard))
    return filled


def limited_runs(folder: Path, limit: int) -> dict[str, int]:
    """The exit codes."""
    from core.train.recipe import run

    codes = {"warm": run(folder / "warm")}
    for name in ("free", "tight", "disk"):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                filled = limit_memory(limit) if name != "free" else []
                began = status_bytes("VmData")
                code = run(folder / name)
                print(
                    f"{name}: {(status_bytes('VmData') - began) >> 20} MiB more than before;",
                    *largest_mappings(),
                    flush=True,
                )
                del filled
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        codes[name] = os.waitstatus_to_exitcode(status)
    return codes
