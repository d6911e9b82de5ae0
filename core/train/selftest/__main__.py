"""`python -m core.train.selftest JOURNAL [--without A,B] [--device cpu]`: the child that touches the device.

It writes one JSON line before each part and one after it, at once. A page fault, an abort or a hang takes down this
process alone, and the last name in the journal says in which part; the parent starts it again without that part
(worker/gpus/selftest.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from core.train.__main__ import importing
from core.train.entry.fencing import await_order, leave


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.train.selftest")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--without", default="", help="parts that are not tried, with commas")
    parser.add_argument("--only", default="", help="the only parts that are tried, with commas")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    given = parser.parse_args(arguments)
    await_order()
    logging.disable(logging.WARNING)  # the last line of the log is for the driver, should it have something to say
    tell = _journal(given.journal)
    tell(begin="import")
    with importing():
        import torch  # slow, and what may crash

        from core.train.selftest import run

    tell(begin="device")
    if given.device == "gpu" and not torch.cuda.is_available():
        tell(fault=f"torch {torch.__version__} ({_built(torch.version)}) sees no GPU here")
        return 0
    device = torch.device("cuda", 0) if given.device == "gpu" else torch.device("cpu")
    tell(device=run.about(device))
    tell(begin="parts")
    without, only = set(filter(None, given.without.split(","))), set(filter(None, given.only.split(",")))
    for check in run.checks(device):
        if check.name in without or (only and check.name not in only):
            continue
        tell(begin=check.name)
        started = time.monotonic()
        try:
            part = run.measure(check, device)
        except run.NoMemory as error:
            tell(fault=f"{check.name} found no room on it, which others use: {error}")
            return 0
        tell(end=check.name, part=part | {"seconds": round(time.monotonic() - started, 3)})
    tell(done=True)
    return 0


def _built(version: Any) -> str:
    if version.hip:
        return f"built for ROCm {version.hip}"
    return f"built for CUDA {version.cuda}" if version.cuda else "built for CPUs alone"


def _journal(path: Path) -> Any:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tell(**line: Any) -> None:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.fsync(descriptor)  # a card can take the whole machine down

    return tell


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
