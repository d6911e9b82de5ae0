"""Which cases of a product a run takes (tests/support/selection.py)."""

from __future__ import annotations

import string
from itertools import combinations, product

import pytest

from tests.support import selection


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4, 2), (2, 2, 2, 2, 2), (5, 3, 3, 2), (4,), (3, 0)])
def test_every_pair_of_values_occurs_and_few_rows_do(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "EVERYTHING", False)
    axes = [[f"{letter}{n}" for n in range(size)] for letter, size in zip(string.ascii_letters, sizes, strict=False)]
    rows = selection.pairwise(*axes)
    assert rows == selection.pairwise(*axes) and set(rows) <= set(product(*axes))
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(axes[one], axes[other]))
    largest = sorted(sizes)[-2:]
    assert len(rows) <= 1.6 * largest[0] * largest[-1]
    monkeypatch.setattr(selection, "EVERYTHING", True)
    assert selection.pairwise(*axes) == list(product(*axes))


def test_the_commit_decides_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "EVERYTHING", False)
    (found,) = selection.one_a_commit("a", "b")
    assert found in ("a", "b") and selection.one_a_commit("a", "b") == [found]
    assert selection.one_in(3, list("abcdefg")) == list("adg")
    monkeypatch.setattr(selection, "EVERYTHING", True)
    assert selection.one_a_commit("a", "b") == ["a", "b"] and selection.one_in(3, list("abc")) == list("abc")
