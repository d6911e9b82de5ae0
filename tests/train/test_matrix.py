"""Cells of the matrix (tests/support/matrix.py) in which every allowed pair of values of two axes occurs: a quarter of
them, by the commit."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from core.plan.compatibility import check
from core.plan.rules.axes import AXES
from core.plan.rules.table import RULES
from core.spec.load import parse_job
from tests.support.matrix import (
    FAMILIES,
    Cell,
    Journal,
    Outcome,
    allowed,
    cells,
    chosen,
    gangs,
    in_order,
    refusals,
    report,
    try_cell,
    try_gangs,
)
from tests.support.selection import one_a_commit, one_in


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


QUARTERS = [chosen()[place::4] for place in range(4)]


@pytest.mark.parametrize(
    "cell", [cell for quarter in one_a_commit(*QUARTERS) for cell in quarter], ids=lambda cell: "-".join(cell.values)
)
def test_a_cell_trains_resumes_and_hands_back(tiny_dir: Path, tmp_path: Path, cache: Path, cell: Cell) -> None:
    try_cell(cell, tiny_dir, tmp_path, cache)


def test_cells_of_two_ranks(tiny_dir: Path, tmp_path: Path, cache: Path) -> None:
    tried = one_in(5, gangs())
    assert try_gangs(tried, tiny_dir, tmp_path, cache) == dict.fromkeys(tried)


def test_a_run_goes_on_behind_the_cells_that_are_done(tmp_path: Path) -> None:
    first, second, *_ = cells_of_all = in_order()
    assert set(cells_of_all) == set(allowed()) and len(cells_of_all) == len(allowed())
    Journal(tmp_path / "done").add(first, Outcome(None, 1.5))
    (tmp_path / "done").open("a").write(
        json.dumps({"cell": second.values, "fault": None, "seconds": 1, "code": ""}) + "\n"
    )
    again = Journal(tmp_path / "done")
    assert again.outcomes == {first.values: Outcome(None, 1.5)}, "what other code has run counts for nothing"
    assert "run 1," in (text := report(again.outcomes)) and "wrong 0" in text
    assert "wrong 1" in report({first.values: Outcome("it began anew", 2.0)})


def test_every_allowed_pair_of_values_is_run() -> None:
    def pairs(rows: list[Cell]) -> set[object]:
        return {(at, one.values[at[0]], one.values[at[1]]) for one in rows for at in combinations(range(6), 2)}

    assert pairs(chosen()) == pairs(allowed())


def test_every_refused_cell_says_why_at_submit() -> None:
    words = {rule.code: rule.message for rule in RULES}
    seen = set()
    for cell in cells():
        codes = refusals(cell)
        if not codes or tuple(codes) in seen:
            continue
        seen.add(tuple(codes))
        job = parse_job(
            {
                "model": "a/b",
                "data": {"train": {"type": "path", "path": "/r.jsonl", "format": cell.rows}},
                **cell.axes(),
            }
        )
        found = [fault.code for fault in check(job)]
        assert set(found) == set(codes) if cell.base == "qat" else found == codes
        assert all(words[code] for code in codes if code not in ("qat_adapter", "qat_refused"))  # no rules of the table
    assert seen


def test_every_optimizer_is_in_a_family() -> None:
    assert sorted(name for members in FAMILIES.values() for name in members) == sorted(AXES["optimizer"])
