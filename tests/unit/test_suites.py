"""What .ci/suites.py makes of a run: which failed tests are run again, and what that may not hide."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PLUGIN = ("-p", "tests.support.outcome")


@pytest.fixture(scope="module")
def suites() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suites", ROOT / ".ci" / "suites.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suites"] = module  # where dataclasses look their names up
    spec.loader.exec_module(module)
    return module


def service_test(number: int) -> str:
    return f"tests/service/test_up.py::test_{number}"


@pytest.mark.parametrize(
    ("code", "faults", "again"),
    [
        (0, [], 0),
        (1, [(service_test(1), "call")], 1),
        (1, [("tests/chaos/test_crash.py::test_x", "setup"), ("tests/e2e/test_gang.py::test_y[a b]", "teardown")], 2),
        (1, [(service_test(n), "call") for n in range(3)], 3),
        (1, [(service_test(1), "call"), (service_test(1), "teardown")], 1),
        (1, [(service_test(n), "call") for n in range(4)], 0),
        (1, [(service_test(1), "call"), ("tests/unit/test_units.py::test_x", "call")], 0),
        (1, [("tests/kernels/test_nf4.py::test_x", "call")], 0),
        (1, [("tests/db/test_claims.py::test_x", "call")], 0),
        (1, [("tests/train/test_lifeline.py::test_x", "call")], 1),
        (1, [("tests/resume/test_resume.py::test_x", "call")], 0),
        (1, [(service_test(1), "crash")], 0),
        (1, [("tests/service/test_up.py", "collect")], 0),
        (1, [], 0),
        (2, [(service_test(1), "call")], 0),
        (3, [(service_test(1), "call")], 0),
        (-11, [], 0),
    ],
)
def test_which_tests_are_run_again(suites: ModuleType, code: int, faults: list[tuple[str, str]], again: int) -> None:
    outcome = suites.Outcome(code, [], [suites.Fault(test, when, "why") for test, when in faults])
    assert suites.to_run_again(outcome) == list(dict(faults))[:again]


def test_a_broken_invariant_is_no_matter_of_luck(suites: ModuleType) -> None:
    test = "tests/chaos/test_seeded.py::test_no_invariant_breaks"
    told = "AssertionError: an invariant was broken (.ci/suites.py knows these words):\nwriters: two of one folder"
    assert suites.to_run_again(suites.Outcome(1, [], [suites.Fault(test, "call", told)])) == []
    assert suites.BROKEN in (ROOT / "tests" / "chaos" / "test_seeded.py").read_text()


def test_only_a_test_that_has_run_and_passed_is_unsteady(suites: ModuleType) -> None:
    test = service_test(1)
    assert suites.is_steady_alone(test, suites.Outcome(0, [test]))
    assert not suites.is_steady_alone(test, suites.Outcome(0, []))  # skipped, or gone
    assert not suites.is_steady_alone(test, suites.Outcome(1, [test], [suites.Fault(test, "teardown", "why")]))
    assert not suites.is_steady_alone(test, suites.Outcome(-6, [test]))
    assert not suites.is_steady_alone(test, suites.Outcome(5))


def test_every_test_is_in_a_suite(suites: ModuleType) -> None:
    """But those for machines with a GPU."""
    run = {path for _, folders, _ in suites.SUITES.values() for path in suites.files(folders)}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_*.py")}
    assert {path for path in there - run if not path.startswith("tests/gpu/")} == set()


def test_no_process_that_starts_services_has_torch(suites: ModuleType) -> None:
    """Each process of a suite reads all of its files: what a file imports on its first level costs all of them, and a
    process with torch starts its children slowly."""
    heavy = {"torch", "transformers", "peft", "trl", "bitsandbytes", "datasets"}
    found = []
    for name in suites.files([*suites.SUITES["service"][1], *suites.SUITES["rest"][1]]):
        for node in ast.parse((ROOT / name).read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name}:{node.lineno}" for one in names if one.partition(".")[0] in heavy]
    assert not found, "import it in the test"


TESTS = """
import os, pytest, subprocess, sys
def test_good(): pass
BUSY = "import time\\nwhile time.process_time() < 0.4: pass"
def test_busy(): subprocess.run([sys.executable, "-c", BUSY])
def test_bad(): assert 1 == 2, "as it should"
def test_left_out(): pytest.skip("not here")
@pytest.fixture
def broken():
    yield
    raise RuntimeError("afterwards")
def test_untidy(broken): pass
"""


@pytest.fixture
def there(suites: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the suites' pytest runs: a folder with tests of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    light = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}  # loading all takes seconds
    monkeypatch.setattr(suites, "ENVIRONMENT", clean | light | {"PYTHONPATH": str(ROOT)})
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    return tmp_path


def test_what_pytest_tells(suites: ModuleType, there: Path) -> None:
    """By the plugin, from two processes."""
    (there / "test_these.py").write_text(TESTS)
    found, printed = suites.pytest("-n", "2", "test_these.py", quietly=True)
    names = {test.rpartition("::")[2] for test in found.passed}
    assert (found.code, names) == (1, {"test_good", "test_busy", "test_untidy"}), printed
    told = {fault.test.rpartition("::")[2]: fault for fault in found.faults}
    assert {name: fault.when for name, fault in told.items()} == {"test_bad": "call", "test_untidy": "teardown"}
    assert "as it should" in told["test_bad"].text and "afterwards" in told["test_untidy"].text
    seconds, cpu = found.took["test_these.py::test_busy"]
    assert seconds >= 0.3 and cpu >= 0.3, "a child's CPU seconds count with the test that waited for it"
    lines = suites.slowest(found.took, 2)
    assert [line.split()[-1] for line in lines[1:3]] == ["test_these.py", "test_these.py::test_busy"]
    assert len(lines) == 1 + 1 + 2


def test_a_crash_is_told_from_a_failure(suites: ModuleType, there: Path) -> None:
    (there / "test_deadly.py").write_text("import os\ndef test_last(): os.kill(os.getpid(), 9)\n")
    found, printed = suites.pytest("-n", "1", "--max-worker-restart", "0", "test_deadly.py", quietly=True)
    assert found.code != 0 and [fault.when for fault in found.faults] == ["crash"], printed
    alone, printed = suites.pytest("test_deadly.py", quietly=True)
    assert (alone.code, alone.passed, alone.faults) == (-9, [], []), printed
    (there / "test_unread.py").write_text("import nothing_of_that_name\n")
    unread, printed = suites.pytest("-n", "1", "test_unread.py", quietly=True)
    assert unread.code != 0 and {fault.when for fault in unread.faults} <= {"collect"}, printed
    assert suites.to_run_again(unread) == suites.to_run_again(found) == []


@pytest.mark.parametrize(("until", "steady"), [(1, True), (2, False)])
def test_who_fails_once_is_unsteady_and_who_fails_twice_has_failed(
    suites: ModuleType, there: Path, monkeypatch: pytest.MonkeyPatch, until: int, steady: bool
) -> None:
    (there / "test_x.py").write_text(
        f"from pathlib import Path\nseen = Path('seen')\ndef test_x():\n"
        f"    with seen.open('a') as file: file.write('x')\n    assert len(seen.read_text()) > {until}\n"
    )
    first, printed = suites.pytest("test_x.py", quietly=True)
    assert first.code == 1, printed
    monkeypatch.setattr(suites, "AGAIN", ("test_x.py",))
    found = suites.run_again(first)
    assert (found is not None) == steady
    if found is not None:
        assert "assert 1 > 1" in found[0].first and "1 passed" in found[0].again


@pytest.mark.parametrize(("later", "code", "verdict"), [(1e9, 0, "passed"), (2.0, 1, "over its row")])
def test_a_suite_is_over_its_row_only_where_the_machine_is_no_slower_than_at_first(
    suites: ModuleType, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    later: float, code: int, verdict: str,
) -> None:  # fmt: skip
    (there / "tests" / "unit").mkdir(parents=True)
    (there / "tests" / "unit" / "test_good.py").write_text("def test_good(): pass\n")
    factors = iter((1.0, later))
    monkeypatch.setattr(suites, "slowness", lambda: next(factors))
    monkeypatch.setattr(suites, "SUITES", {"some": (1e-6, ["unit"], [])})
    monkeypatch.setattr(sys, "argv", ["suites.py"])
    monkeypatch.setenv("CI", "true")
    assert suites.main() == code
    (row,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("some ")]
    assert row.endswith(f"   {verdict}")


def test_the_end_of_a_run_names_what_failed(
    suites: ModuleType, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (there / "tests" / "unit").mkdir(parents=True)
    (there / "tests" / "unit" / "test_bad.py").write_text('def test_bad(): assert 1 == 2, "as it should"\n')
    monkeypatch.setattr(suites, "slowness", lambda: 1.0)
    monkeypatch.setattr(suites, "SUITES", {"some": (10, ["unit"], [])})
    monkeypatch.setattr(sys, "argv", ["suites.py"])
    assert suites.main() == 1
    last = capfd.readouterr().out.partition("FAILED in ")[2]
    assert last.startswith("call: tests/unit/test_bad.py::test_bad\n") and "as it should" in last
    assert len(last.splitlines()) <= 1 + suites.LAST_LINES
