"""A pytest plugin: `-p tests.rehearsal.environment` starts pytest again over torch's CUDA build.

It is loaded before pytest reads its conftest files. Where the environment cannot be made the tests of this folder are
skipped, with the reason (conftest.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rehearsal import branches
from tests.rehearsal.install import BUILT, ROOT, SITE, Unavailable, prepare

INSIDE = "EFT_REHEARSAL"
"""Set in a process that is in the environment, or to the reason why there is none."""


def variables(**settings: object) -> dict[str, str]:
    """The environment of a process that sees GPUs which are not there; `settings`: those of runtime/, in lower case."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BUILT), str(SITE), str(ROOT)]),
        "LD_LIBRARY_PATH": str(BUILT),
        INSIDE: "yes",
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_POISON": "1",
        "REHEARSAL_BYTES": str(4 << 30),
    }
    return found | {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}


def _enter() -> None:
    try:
        prepare()
    except Unavailable as why:
        os.environ[INSIDE] = f"no rehearsal: {why}"
        print(os.environ[INSIDE], file=sys.stderr, flush=True)
        return
    folder = {branches.FOLDER: tempfile.mkdtemp(prefix="eft-rehearsal-")}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables(devices=2) | folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of the whole suite that has not taken every branch on the device's type as on a GPU."""
    folder = os.environ.get(branches.FOLDER)
    if not folder or hasattr(session.config, "workerinput"):
        return
    everything = {str(path) for path in Path(__file__).parent.glob("test_*.py")}
    asked = {str(Path(argument).absolute()) for argument in session.config.args}
    whole = everything <= asked or str(Path(__file__).parent) in asked
    if session.exitstatus == 0 and whole and not session.config.option.keyword:
        for fault in branches.faults(Path(folder)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\n{fault}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)


if INSIDE not in os.environ:
    _enter()
