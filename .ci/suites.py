"""Run the test suites one after another and hold each to its row of minutes.

`python .ci/suites.py [SUITE …]` runs them; with CI=true a suite that outgrows its row fails the run, elsewhere it is
only told. A suite is a set of folders under tests/; its row is its budget on 2 cores of a machine that imports a
trainer in IMPORT_SECONDS. The run begins by measuring what this machine takes, and a slower one has longer rows; a
suite that is over its row has that measured again. Each suite ends with a list of its slowest files and tests.

A failed test of whole services, or of processes that are stopped and killed (AGAIN), is run once more, alone. Such a
test races with real processes, and among hundreds of them there is always one more race than anybody has found; to
refuse a change for it, and whatever else was to land with it, costs more than it finds. So where the test passes
alone the run goes on, and its end names the test as UNSTEADY with both outputs: that list is the work list, and an
entry is mended as a failure would be. What is left strict: tests that compute (all others), more than MOST tests of a
suite at once, a test that fails twice, a storm that broke an invariant of the service (BROKEN), and whatever is no
failed test but the end of pytest or of one of its processes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    "OMP_NUM_THREADS": "1",
}
"""One thread per process: two processes that each want both cores mostly wait for one another. And modules are
compiled once, not by each of the hundreds of processes that a run starts."""
LONGEST_FIRST = ["--dist", "loadfile", "--no-loadscope-reorder"]
"""A file goes to one process. The files that take longest are named first: begun last, one would keep all waiting."""

# Services mostly wait for one another, and storms and boxes for leases, so that four processes fit two cores.
LONGEST = (
    *("chaos/test_crash", "chaos/test_seeded", "contract/tinker/test_cookbook", "e2e/test_docs", "e2e/test_demo"),
    *("service/test_serving", "service/test_dashboard_browser", "e2e/test_gang", "service/test_boxes"),
    *("service/test_up", "service/test_life", "service/test_last_net", "service/test_worker_celery", "e2e/test_smoke"),
    *("service/test_worker_agent", "e2e/test_failures", "service/test_fuzz", "service/test_worker_spare"),
)

SUITES: dict[str, tuple[float, list[str], list[str]]] = {
    # name: (minutes, folders and the files of them that go first, pytest options)
    "service": (
        25,
        [*(f"{name}.py" for name in LONGEST), "contract", "e2e", "chaos", "service"],
        ["-n", "4", *LONGEST_FIRST],
    ),
    "train": (
        15,
        [
            *("resume", "train/test_streaming.py", "train/test_tokens.py", "train/test_hostile_models.py", "oracle"),
            *("train", "kernels", "render"),
        ],
        ["-n", "3", *LONGEST_FIRST],
    ),
    # Tests of trackers wait a minute for real ones: begun last, their file would leave the processors idle.
    "rest": (4.5, ["unit/test_tracking.py", "db", "unit"], ["-n", "3", *LONGEST_FIRST]),
    # Its plugin starts pytest again over torch's CUDA build. Tests of a group share what is computed on the CPU.
    "rehearsal": (4, ["rehearsal"], ["-p", "tests.rehearsal.environment", "-n", "2", "--dist", "loadgroup"]),
}

IMPORT_SECONDS = 5.0
"""CPU seconds that a trainer's imports take on the machine whose minutes the rows are, with both cores at it. They are
most of what the suites do."""
IMPORTS = "from core.train import __main__ as trainer\nwith trainer.importing():\n    import core.train.recipe, peft"

AGAIN = (
    *("tests/service/", "tests/chaos/", "tests/contract/", "tests/e2e/"),
    *("tests/train/test_lifeline.py", "tests/train/test_ranks_launcher.py", "tests/train/test_train_cli.py"),
    *("tests/train/test_selftest.py", "tests/db/test_backup.py"),
)
"""Folders and files whose failed tests are run again, at most MOST of a suite."""
MOST = 3
SLOWEST = 10
"""Tests and files of a suite that its end names."""
LAST_LINES = 12
"""Of each failed test, in the last words of the run: who reads a log from its end finds what to mend."""
BROKEN = "an invariant was broken"
"""In what a storm of tests/chaos says: seen once is enough."""


@dataclass(frozen=True)
class Fault:
    test: str
    """pytest's node id."""
    when: str
    """setup, call, teardown, collect or crash (tests/support/outcome.py)."""
    text: str


@dataclass
class Outcome:
    """What one run of pytest came to."""

    code: int
    passed: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    took: dict[str, list[float]] = field(default_factory=dict)
    """Seconds and CPU seconds by node id."""


@dataclass(frozen=True)
class Unsteady:
    """A test that failed and then passed alone."""

    test: str
    first: str
    again: str


def to_run_again(outcome: Outcome) -> list[str]:
    """The tests that failed, where running them again may say that they are unsteady; none where the run has failed."""
    tests = list(dict.fromkeys(fault.test for fault in outcome.faults))
    mere_failures = all(
        fault.when in ("setup", "call", "teardown") and BROKEN not in fault.text for fault in outcome.faults
    )
    if outcome.code == 1 and mere_failures and len(tests) <= MOST and all(test.startswith(AGAIN) for test in tests):
        return tests
    return []


def is_steady_alone(test: str, outcome: Outcome) -> bool:
    """It has run, it has passed, and so has pytest."""
    return outcome.code == 0 and not outcome.faults and test in outcome.passed


def files(names: list[str]) -> list[str]:
    """In this order, each once. Named one by one: of a file beside its folder pytest makes the folder."""
    found: dict[str, None] = {}
    for name in names:
        path = ROOT / "tests" / name
        for one in [path] if path.suffix == ".py" else sorted(path.glob("**/test_*.py")):
            found[str(one.relative_to(ROOT))] = None
    return list(found)


def pytest(*arguments: str, quietly: bool = False) -> tuple[Outcome, str]:
    """One run of it, and what it printed, if it was to keep that to itself."""
    with tempfile.TemporaryDirectory(prefix="eft-suites-") as folder:
        path = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.outcome", "--outcome", str(path), *arguments]
        to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quietly else {}
        ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False, text=True, errors="replace", **to)
        if not path.exists():  # it did not come to its end
            return Outcome(ended.returncode), ended.stdout or ""
        told = json.loads(path.read_text())
        faults = [Fault(**one) for one in told["faults"]]
        return Outcome(ended.returncode, told["passed"], faults, told["took"]), ended.stdout or ""


def slowest(took: dict[str, list[float]], count: int = SLOWEST) -> list[str]:
    """Lines that name the slowest tests and files with their seconds and CPU seconds."""
    of_files: dict[str, list[float]] = {}
    for test, (seconds, cpu) in took.items():
        both = of_files.setdefault(test.partition("::")[0], [0.0, 0.0])
        both[0], both[1] = both[0] + seconds, both[1] + cpu
    whole = sum(cpu for _, cpu in took.values())
    lines = [f"{'seconds':>9}{'CPU':>8}   the slowest files and tests, {whole:.0f} s of CPU in all"]
    for found in (of_files, took):
        dearest = sorted(found.items(), key=lambda one: -one[1][0])[:count]
        lines += [f"{seconds:>9.1f}{cpu:>8.1f}   {name}" for name, (seconds, cpu) in dearest]
    return lines


def run_again(outcome: Outcome) -> list[Unsteady] | None:
    """The tests that failed are all unsteady; None where one of them, or the run, has failed."""
    found = []
    for test in to_run_again(outcome):
        print(f"\n=== once more, alone: {test}", flush=True)
        second, printed = pytest(test, quietly=True)
        print(printed, flush=True)
        if not is_steady_alone(test, second):
            return None
        first = "\n".join(fault.text for fault in outcome.faults if fault.test == test)
        found.append(Unsteady(test, first, printed))
    return found or None


def ticks() -> tuple[int, int]:
    """(busy, all) of this machine's processors since it was started (proc_stat(5)); (0, 0) where nobody counts."""
    try:
        fields = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(fields) - fields[3] - fields[4], sum(fields)


def slowness() -> float:
    """How many times IMPORT_SECONDS this machine takes; 1 for a faster one, whose rows stay."""
    for _ in range(2):  # the first time it reads and compiles what it imports
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        both = [subprocess.Popen([sys.executable, "-c", IMPORTS], cwd=ROOT, env=ENVIRONMENT) for _ in range(2)]
        if any(process.wait() != 0 for process in both):
            sys.exit("a trainer's modules cannot be imported")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(both)
    print(f"imports of a trainer: {seconds:.1f} s of CPU, {IMPORT_SECONDS} where the rows were measured", flush=True)
    return max(1.0, seconds / IMPORT_SECONDS)


def main() -> int:
    chosen = sys.argv[1:] or list(SUITES)
    unknown = sorted(set(chosen) - set(SUITES))
    if unknown:
        sys.exit(f"unknown suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    known = {Path(name).parts[0] for _, names, _ in SUITES.values() for name in names} | {"gpu"}
    strays = [
        path for path in (ROOT / "tests").glob("**/test_*.py") if path.relative_to(ROOT / "tests").parts[0] not in known
    ]
    if strays:
        sys.exit(f"in no suite, so never run: {strays}")

    factor = slowness()
    rows, failed, unsteady, faults = [], False, list[Unsteady](), list[Fault]()
    for name in chosen:
        minutes, names, options = SUITES[name]
        present = files(names)
        if not present:
            continue
        print(f"\n=== {name}: {len(present)} files", flush=True)
        began, busy_before, all_before = time.monotonic(), *ticks()
        outcome, _ = pytest(*options, *present)
        print("\n".join(slowest(outcome.took)), flush=True)
        took = (time.monotonic() - began) / 60
        busy, all_of_it = (now - before for now, before in zip(ticks(), (busy_before, all_before), strict=True))
        if took > minutes * factor:  # the machine may have become slower since the run began
            factor = max(factor, slowness())
        minutes *= factor
        verdict = "over its row" if took > minutes else "passed" if outcome.passed else "SKIPPED"
        if outcome.code != 0:
            found = run_again(outcome)
            verdict = "failed" if found is None else f"{verdict}, {len(found)} UNSTEADY"
            faults += outcome.faults if found is None else []
            unsteady += found or []
        failed |= verdict == "failed" or ("over" in verdict and os.environ.get("CI") == "true")
        rows.append((name, minutes, took, 100 * busy / max(all_of_it, 1), verdict))

    for one in unsteady:
        print(f"\n{'=' * 30} UNSTEADY: {one.test}\nfailed among the others:\n{one.first}\npassed alone:\n{one.again}")
    print(f"\n{'suite':<10}{'row':>8}{'took':>8}{'busy %':>8}   minutes")
    for name, minutes, took, busy_percent, verdict in rows:
        print(f"{name:<10}{minutes:>8.1f}{took:>8.1f}{busy_percent:>8.0f}   {verdict}")
    print(f"{'total':<10}{sum(row[1] for row in rows):>8.1f}{sum(row[2] for row in rows):>8.1f}")
    for one in unsteady:
        print(f"UNSTEADY, to be mended: {one.test}")
    for fault in faults:
        print("\n".join((f"FAILED in {fault.when}: {fault.test}", *fault.text.splitlines()[-LAST_LINES:])))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
