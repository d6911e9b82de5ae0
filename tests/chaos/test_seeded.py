"""A short storm of a fixed seed on each database (`make chaos` has longer ones): nothing lost, nothing twice."""

from __future__ import annotations

import pytest

from tests.support.chaos.history import Result
from tests.support.chaos.run import Plan, Run, facts
from tests.support.chaos.script import FAULTS, Databases

SECONDS = 12.0


@pytest.fixture(scope="module")
def undisturbed() -> list[Result]:
    """What the jobs give when nobody disturbs them: learned in the first storm's calm before, used by the others."""
    return []


@pytest.mark.parametrize(("database", "seed"), [("sqlite", 2), ("postgres", 5)])
def test_a_storm(database: Databases, seed: int, undisturbed: list[Result]) -> None:
    plan = Plan(
        seed=seed,
        seconds=SECONDS,
        database=database,
        fault_every=1.25,
        wish_every=2.0,
        burst=2,
        specs=2,
        lease=8.0,
        fence=3.0,
        drain_seconds=120.0,
    )
    outcome = Run(plan, undisturbed=undisturbed).go()
    undisturbed[:] = outcome.history.references
    assert not outcome.violations, "\n".join([*outcome.violations, f"kept: {outcome.folder}", *outcome.log])
    assert all(check.looked for name, check in outcome.checks.items() if name != "cancels")
    met = {kind for kind in FAULTS if outcome.counts.get(kind)}
    assert len(met) >= 6, f"the storm was a breeze: {facts(outcome)}"
    assert outcome.history.samples > 50
