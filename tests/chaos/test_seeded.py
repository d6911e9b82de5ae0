"""A short storm of a fixed seed: nothing lost, nothing twice. The commit decides on which database; `make chaos` and a
run with EFT_TEST_EVERYTHING=1 have both."""

from __future__ import annotations

import pytest

from tests.support.chaos.history import Result
from tests.support.chaos.run import Plan, Run, facts
from tests.support.chaos.script import FAULTS, Databases
from tests.support.selection import one_a_commit

SECONDS = 12.0
ENOUGH = 6
"""Kinds of faults that a storm has to have."""
MAY_MISS = {"cancels", "closed", "quotas"}
"""What a short storm may find nothing to look at for: nobody was cancelled, nothing claimed while a quota was set."""


@pytest.fixture(scope="module")
def undisturbed() -> list[Result]:
    """What the jobs give when nobody disturbs them: learned in the first storm's calm before, used by the others."""
    return []


@pytest.mark.timeout(900)  # a minute; on a machine that does ten other things as well it has taken five
@pytest.mark.parametrize(("database", "seed"), one_a_commit(("sqlite", 2), ("postgres", 5)))
def test_a_storm(database: Databases, seed: int, undisturbed: list[Result]) -> None:
    plan = Plan(
        seed=seed,
        seconds=SECONDS,
        database=database,
        fault_every=1.25,
        wish_every=3.0,
        share_every=1.5,
        burst=2,
        specs=2,
        lease=8.0,
        fence=3.0,
        drain_seconds=300.0,
        enough=ENOUGH,
        patience=60.0,
    )
    outcome = Run(plan, undisturbed=undisturbed).go()
    undisturbed[:] = outcome.history.references
    broken = ["an invariant was broken (.ci/suites.py knows these words):", *outcome.violations]
    assert not outcome.violations, "\n".join([*broken, f"kept: {outcome.folder}", *outcome.log])
    unseen = {name for name, check in outcome.checks.items() if not check.looked}
    assert unseen <= MAY_MISS, f"the storm was a breeze: {unseen} {facts(outcome)}"
    met = {kind for kind in FAULTS if outcome.counts.get(kind)}
    assert len(met) >= ENOUGH, f"the storm was a breeze: {facts(outcome)}"
    assert outcome.history.samples > 50
