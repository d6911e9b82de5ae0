"""A pytest plugin: `-p tests.support.outcome --outcome FILE` writes what became of the tests, for .ci/suites.py.

`{"passed": [node id, …], "faults": [{"test": node id, "when": …, "text": …}, …], "took": {node id: [seconds, CPU
seconds], …}}`; `when` is the phase that failed (setup, call, teardown), "collect" for a file that could not be read, or
"crash" where the test took its process along. The CPU seconds are of the process and of its children that have ended;
a fixture's are counted with the test that sets it up or tears it down.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

PHASES = ("setup", "call", "teardown")
CPU = "eft_cpu"
"""Attribute of a report that carries its CPU seconds from xdist's processes to the first one."""


class Outcome:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: list[str] = []
        self.faults: list[dict[str, str]] = []
        self.took: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)
        if report.failed:  # xdist reports the test that a process died with in a phase of its own
            self._fault(report, report.when if report.when in PHASES else "crash")
        took = self.took[report.nodeid]
        took[0] += report.duration
        took[1] += getattr(report, CPU, 0.0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fault(report, "collect")

    def _fault(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        self.faults.append({"test": report.nodeid, "when": when, "text": report.longreprtext})
        print(f"\n{report.nodeid}: {when} failed", file=sys.__stderr__, flush=True)  # a suite takes half an hour

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"passed": self.passed, "faults": self.faults, "took": self.took}))


class Clock:
    """Notes the CPU seconds of each phase of a test in its report."""

    def __init__(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        setattr(report, CPU, now - self.before)
        self.before = now
        return report


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, help="write what became of the tests into this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcome")
    if path is None:
        return
    config.pluginmanager.register(Clock(), "outcome-clock")
    if not hasattr(config, "workerinput"):  # xdist's processes report to the one that writes
        config.pluginmanager.register(Outcome(path.absolute()), "outcome")
