"""A pytest plugin: `-p tests.support.outcome --outcome FILE` writes what became of the tests, for .ci/suites.py.

`{"passed": [node id, …], "faults": [{"test": node id, "when": …, "text": …}, …]}`; `when` is the phase that failed
(setup, call, teardown), "collect" for a file that could not be read, or "crash" where the test took its process along.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PHASES = ("setup", "call", "teardown")


class Outcome:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: list[str] = []
        self.faults: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)
        if report.failed:  # xdist reports the test that a process died with in a phase of its own
            self._fault(report, report.when if report.when in PHASES else "crash")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fault(report, "collect")

    def _fault(self, report: pytest.TestReport | pytest.CollectReport, when: str) -> None:
        self.faults.append({"test": report.nodeid, "when": when, "text": report.longreprtext})

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"passed": self.passed, "faults": self.faults}))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, help="write what became of the tests into this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcome")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's processes report to the one that writes
        config.pluginmanager.register(Outcome(path.absolute()), "outcome")
