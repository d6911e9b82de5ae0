"""`python -m worker [--gpus 0,1] [--slots 2]`: serve this box. Runs `celery -A worker.app worker` as its node."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys

from core import private
from core.base.collector import importing


def main() -> None:
    private.umask()  # holds for what it becomes, too
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--gpus", help="offer only these GPUs, e.g. 0,1 (default: every one the box has, else its CPU)")
    parser.add_argument("--slots", type=int, help="concurrent jobs on a box without GPUs (EFT_CPU_SLOTS; default 1)")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    arguments = parser.parse_args()
    if arguments.gpus is not None:
        os.environ["EFT_GPUS"] = arguments.gpus  # before the settings are read
    if arguments.slots is not None:
        os.environ["EFT_CPU_SLOTS"] = str(arguments.slots)

    from core.settings import settings

    flags = ["--hostname", f"eft@{settings().node}", "--loglevel", arguments.log_level]
    with importing():
        for name in ("celery.bin.celery", "celery.apps.worker", "worker.agent.agent"):  # most of what it imports
            importlib.import_module(name)
    sys.argv = ["celery", "--quiet", "-A", "worker.app", "worker", *flags]
    runpy.run_module("celery", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from core import command

    command.run("eft worker", main)
