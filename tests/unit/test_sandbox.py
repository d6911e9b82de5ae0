"""The sandbox for code of users: what runs in it, where it stands, and that it refuses where it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.sandbox.sandbox import ROOT, ProgramLimits, ProgramSandbox, why_not

ASK = "from core.sandbox.sandbox import why_not; print(why_not())"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    with ProgramSandbox() as sandbox:
        yield sandbox


def test_a_function_takes_what_it_has_parameters_for(sandbox: ProgramSandbox) -> None:
    given = {"completions": ["a", "bb"], "answer": ["a", "b"], "unused": 1}
    named = "def reward(completions, answer):\n    return [c == a for c, a in zip(completions, answer)]"
    assert sandbox.run_function(named, "reward", given).value == [True, False]
    anything = "def reward(completions, **columns):\n    return sorted(columns)"
    assert sandbox.run_function(anything, "reward", given).value == ["answer", "unused"]


def test_numbers_of_numpy_come_back(sandbox: ProgramSandbox) -> None:
    source = "import numpy\ndef f(x): return numpy.asarray(x) * numpy.float32(2)"
    assert sandbox.run_function(source, "f", {"x": [1, 2]}).value == [2, 4]
    assert "cannot be sent" in str(sandbox.run_function("def f(): return object()", "f", {}).error)


def test_packages_are_found_by_way_of_a_link_to_the_environment(tmp_path: Path) -> None:
    """An installation is often one folder of several, and a link says which one."""
    (tmp_path / "current").symlink_to(sys.prefix)
    source = (
        "from core.sandbox.sandbox import ProgramSandbox\nwith ProgramSandbox() as sandbox:\n"
        "    print(sandbox.run_script('import numpy; print(1)').stdout)"
    )
    command = [str(tmp_path / "current/bin/python"), "-c", source]
    assert subprocess.check_output(command, cwd=ROOT, text=True).strip() == "1"


def test_an_error_names_the_line(sandbox: ProgramSandbox) -> None:
    error = str(sandbox.run_function("def f(x):\n    return 1 / x", "f", {"x": 0}).error)
    assert error.startswith("ZeroDivisionError: division by zero") and "line 2, in f" in error and "1 / x" in error
    assert "defines no function `g`" in str(sandbox.run_function("x = 1", "g", {}).error)


def test_a_script_has_input_and_output(sandbox: ProgramSandbox) -> None:
    outcome = sandbox.run_script("a, b = map(int, input().split()); print(a + b)", stdin="3 4\n")
    assert outcome.value is True and outcome.stdout == "7\n"
    assert sandbox.run_script("import sys; print(1); sys.exit()").value is False


def test_draws_are_the_same_each_time(sandbox: ProgramSandbox) -> None:
    source = "import random\nprint(random.random(), hash('x'), {'a', 'b', 'c'})"
    first = sandbox.run_script(source).stdout
    assert first == sandbox.run_script(source).stdout
    with ProgramSandbox() as another:
        assert first == another.run_script(source).stdout


def test_it_starts_again_when_it_was_killed(sandbox: ProgramSandbox) -> None:
    with ProgramSandbox(ProgramLimits(memory_bytes=256 << 20)) as one:
        assert one._process is not None
        os.kill(one._process.pid, signal.SIGKILL)
        one._process.wait()
        assert one.run_script("1").value and one.starts == 2


def test_it_ends_with_its_user(tmp_path: Path) -> None:
    source = (
        "import os, sys\nfrom core.sandbox.sandbox import ProgramSandbox\nsandbox = ProgramSandbox()\n"
        "print(sandbox._process.pid, flush=True)\nsandbox.run_script('while True: pass', seconds=500)"
    )
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        pid = int(user.stdout.readline())
        user.kill()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


# --- where it stands ---------------------------------------------------------------------------------


def test_it_stands_here() -> None:
    assert why_not() is None


def _said(*before: str, source: str = ASK) -> str:
    """What a process says that was changed by some Python first."""
    program = "\n".join((*before, source))
    found = subprocess.run(
        [_python(), "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin"}
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def _python() -> str:
    """An interpreter that an ordinary user may start."""
    if os.geteuid() != 0 or Path("/root") not in Path(sys.executable).resolve().parents:
        return sys.executable
    return "/usr/bin/python3"


ORDINARY = "import os; os.setgroups([]); os.setresgid(*[54321] * 3); os.setresuid(*[54321] * 3)"


def test_it_stands_as_an_ordinary_user() -> None:
    before = [ORDINARY] if os.geteuid() == 0 else []
    assert _said(*before) == "None"


NO_NAMESPACES = """
import os
from pathlib import Path
from core.sandbox import kernel
who = os.getuid(), os.getgid()
kernel.unshare(kernel.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{who[0]} {who[0]} 1")
Path("/proc/self/gid_map").write_text(f"{who[1]} {who[1]} 1")
for name in ("user", "mnt", "pid", "net"):
    Path(f"/proc/sys/user/max_{name}_namespaces").write_text("0")
"""


def test_without_namespaces_it_refuses_and_says_why() -> None:
    said = _said(NO_NAMESPACES)
    assert "cannot be run safely" in said and "may not make namespaces" in said and "max_user_namespaces" in said


def test_without_capabilities_root_refuses_and_says_why() -> None:
    before = "import os\nfrom core.sandbox import kernel\nkernel.drop_capabilities()"
    said = _said(before)
    assert said == "None" if os.geteuid() != 0 else "SYS_ADMIN" in said


def test_it_stands_under_the_umask_of_a_service() -> None:
    """A worker makes nothing that others can read (core/private.py); what the sandbox is furnished with they must."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True, umask=0o077
    )
    assert asked.stdout == "None\n", asked.stdout + asked.stderr
