"""A short storm over sessions, of a fixed seed. `python -m tests.support.chaos.sessions` is the long one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.chaos.script import Databases
from tests.support.chaos.sessions import Outcome, SessionRun, Storm
from tests.support.selection import one_a_commit


@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", one_a_commit("sqlite", "postgres"))
def test_recipes_end_by_themselves_with_the_undisturbed_bits(database: Databases) -> None:
    outcome = SessionRun(Storm(seed=1, database=database, recipes=3, steps=3)).go()
    assert not outcome.violations, "\n".join(outcome.violations)
    struck = [kind for kind in outcome.faults if "nobody" not in kind]
    assert len(struck) >= 4, outcome.faults
    assert outcome.joined, "no session has joined the process of another one"


def test_other_bits_and_missing_steps_are_violations() -> None:
    """The check itself."""
    step = {"losses": [1.0], "norm": 0.5, "drawn": [1], "scored": [-1.0]}
    calm = [step, step]
    assert not Outcome({"a": [step, dict(step)]}, calm, Counter(), []).violations
    for trace in ([step], [step, step | {"norm": 0.5000001}], [step, step | {"scored": [-1.0000001]}]):
        assert Outcome({"a": trace}, calm, Counter(), []).violations
    assert (
        Outcome({}, calm, Counter(), ["a child"]).violations
        and Outcome({}, calm, Counter(), [], ["it failed"]).violations
    )
