"""Some hundred requests made of the OpenAPI document: no 5xx, no status that it lacks. The commit decides on which
database. More of them: bench/fuzz.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fuzz import fuzz
from tests.support.selection import one_a_commit


@pytest.mark.parametrize("kind", one_a_commit("sqlite", "postgresql"))
def test_nothing_that_the_document_offers_breaks_it(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path / 'eft.db'}"
    if kind == "postgresql":
        url = request.getfixturevalue("postgres_databases")()
    found = fuzz(
        tmp_path, url, requests=100, seed=20261122, examples=2, seconds=15, rounds=20
    )  # two, where it is not slow
    assert found.server_errors == [], found.output[-6000:]
    assert found.failures == [], found.output[-6000:]
    assert found.requests >= 100 and found.statuses[422] and found.statuses[200], found.statuses
