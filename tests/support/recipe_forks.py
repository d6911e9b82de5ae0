"""Recipes of Tinker's cookbook as forks of one process that has imported what they need, in the cookbook's environment
(tests/support/cookbook.py): `recipe_forks.py DESCRIPTOR MODULE…`. A line of JSON on stdin is a recipe to run, `[module,
arguments, file of its output, seconds that it may take]`; its exit status is a line on the descriptor.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys


def main() -> None:
    answers, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    for name in modules:
        del sys.modules[name]  # each runs as `python -m` would run it
    with os.fdopen(int(answers), "w", buffering=1) as told:
        while line := sys.stdin.readline():
            pid = os.fork()
            if pid == 0:
                become(*json.loads(line))
                return
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=told)


def become(module: str, arguments: list[str], output: str, seconds: int) -> None:
    signal.alarm(seconds)
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(number, 1)
    os.dup2(number, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.argv[1:] = arguments
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
