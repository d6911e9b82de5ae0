"""A pytest plugin: `-p tests.rehearsal.environment` starts pytest again where torch is its CUDA build over a runtime of ours.

Loaded before pytest reads its conftest files. Where the environment cannot be made the tests of this folder are skipped,
with the reason (conftest.py).
"""

from __future__ import annotations

import os
import sys

from tests.rehearsal.install import ROOT, SITE, Unavailable, prepare

INSIDE = "EFT_REHEARSAL"
"""Set in a process that is in the environment, or to the reason why there is none."""


def variables(**settings: object) -> dict[str, str]:
    """The environment of a process that sees GPUs which are not there; `settings` are those of runtime/ in lower case."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        INSIDE: "yes",
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_POISON": "1",
    }
    return found | {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}


def _enter() -> None:
    try:
        prepare()
    except Unavailable as why:
        os.environ[INSIDE] = f"no rehearsal: {why}"
        print(os.environ[INSIDE], file=sys.stderr, flush=True)
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables(devices=2))


if INSIDE not in os.environ:
    _enter()
