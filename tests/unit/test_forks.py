"""How a process goes on as a Python module and ends (core/base/forks.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from core import HOME
from core.base import forks

BEGIN = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("the thread"))).start()
print(sys.argv[1:], __name__, end=" ")
"""
FORKED = f"""
import sys
sys.path.insert(0, {str(HOME)!r})
from core.base.forks import become_module
become_module(*eval(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(3)", "sys.exit('words')", "1 / 0", "raise KeyboardInterrupt", "sys.stdout.close()"]
)
def test_it_ends_as_python_would_end_the_module(end: str, tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(f"{BEGIN}{end}\n")
    ways = (["-m", "ending", "a", "b"], ["-c", FORKED, " " * 200, repr(("ending", ["a", "b"]))])
    cold, forked = (
        subprocess.run([sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, check=False)
        for way in ways
    )
    assert (forked.returncode, forked.stdout) == (cold.returncode, cold.stdout)
    assert forked.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]
    assert cold.stdout == "" or cold.stdout.split("\n")[0].startswith("['a', 'b'] __main__")


def test_variables_that_differ_are_those_of_either_side() -> None:
    assert forks.changed({"A": "1", "B": "1", "C": "1"}, {"A": "1", "B": "2", "D": "1"}) == {
        "B": "2",
        "C": None,
        "D": "1",
    }
    for name in ("LD_PRELOAD", "PYTHONHASHSEED", "OMP_NUM_THREADS", "LC_ALL", "TZ"):
        assert forks.READ_AT_START.fullmatch(name)
    assert not forks.READ_AT_START.fullmatch("EFT_DATA")
