"""Cells of the matrix (tests/support/matrix.py) in which every allowed pair of values of two axes occurs: one half of
them, by the commit."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from core.plan.compatibility import AXES, RULES, check
from core.spec.load import parse_job
from tests.support.matrix import FAMILIES, Cell, allowed, cells, chosen, refusals, try_cell
from tests.support.selection import one_a_commit


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


HALVES = chosen()[::2], chosen()[1::2]


@pytest.mark.parametrize(
    "cell", [cell for half in one_a_commit(*HALVES) for cell in half], ids=lambda cell: "-".join(cell.values)
)
def test_a_cell_trains_resumes_and_hands_back(tiny_dir: Path, tmp_path: Path, cache: Path, cell: Cell) -> None:
    try_cell(cell, tiny_dir, tmp_path, cache)


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
        assert [fault.code for fault in check(job)] == codes
        assert all(words[code] for code in codes)
    assert seen


def test_every_optimizer_is_in_a_family() -> None:
    assert sorted(name for members in FAMILIES.values() for name in members) == sorted(AXES["optimizer"])
