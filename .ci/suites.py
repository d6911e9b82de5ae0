"""Run the test suites one after another and hold each to its row of minutes.

`python .ci/suites.py [SUITE …]` runs them; with CI=true a suite that outgrows its row fails the run, elsewhere
(a slower machine) it is only told. A suite is a set of folders under tests/; its row is its budget on 2 cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""A core a process: where each of two wants both cores, they mostly wait for one another."""
LONGEST_FIRST = ["--dist", "loadfile", "--no-loadscope-reorder"]
"""A file goes to one process. The files that take longest are named first: begun last, one would keep all waiting."""

SUITES: dict[str, tuple[float, list[str], list[str]]] = {
    # name: (minutes, folders and the files of them that go first, pytest options)
    # Services mostly wait for one another, so that three processes fit two cores.
    "service": (
        9.5,
        ["service/test_boxes.py", "service/test_up.py", "service/test_life.py", "service"],
        ["-n", "3", *LONGEST_FIRST],
    ),
    "train": (8.5, ["resume", "oracle", "train", "render"], ["-n", "2", *LONGEST_FIRST]),
    "chaos": (6, ["chaos/test_seeded.py", "chaos"], ["-n", "2", *LONGEST_FIRST]),
    "kernels": (2, ["kernels"], ["-n", "2"]),
    "rest": (8.5, ["e2e/test_docs.py", "e2e", "unit", "db"], ["-n", "3", *LONGEST_FIRST]),
}


def files(names: list[str]) -> list[str]:
    """In this order, each once. Named one by one: of a file beside its folder pytest makes the folder."""
    found: dict[str, None] = {}
    for name in names:
        path = ROOT / "tests" / name
        for one in [path] if path.suffix == ".py" else sorted(path.glob("**/test_*.py")):
            found[str(one.relative_to(ROOT))] = None
    return list(found)


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

    rows, failed = [], False
    for name in chosen:
        minutes, names, options = SUITES[name]
        present = files(names)
        if not present:
            continue
        print(f"\n=== {name}: {len(present)} files", flush=True)
        began = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *present], cwd=ROOT, env=ENVIRONMENT, check=False
        ).returncode
        took = (time.monotonic() - began) / 60
        verdict = "failed" if code else "over its row" if took > minutes else "passed"
        failed |= verdict == "failed" or (verdict == "over its row" and os.environ.get("CI") == "true")
        rows.append((name, minutes, took, verdict))

    print(f"\n{'suite':<10}{'row':>8}{'took':>8}   minutes")
    for name, minutes, took, verdict in rows:
        print(f"{name:<10}{minutes:>8.1f}{took:>8.1f}   {verdict}")
    print(f"{'total':<10}{sum(row[1] for row in rows):>8.1f}{sum(row[2] for row in rows):>8.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
