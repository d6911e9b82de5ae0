"""The transition table as a graph: everything reachable, everything ends, nothing leaves an end."""

import itertools

import pytest

from core.jobs.base.states import FINAL, LEASED, TRANSITIONS, Status, check


def reachable(start: Status) -> set[Status]:
    seen, todo = {start}, [start]
    while todo:
        for following in TRANSITIONS[todo.pop()] - seen:
            seen.add(following)
            todo.append(following)
    return seen


def test_every_state_is_in_the_table_and_reachable_from_birth() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert reachable(Status.QUEUED) == set(Status)


@pytest.mark.parametrize("status", sorted(set(Status) - FINAL))
def test_every_open_state_can_end_as_cancelled(status: Status) -> None:
    assert Status.CANCELLED in reachable(status)


def test_final_states_are_the_three_ends() -> None:
    assert {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED} == FINAL
    assert not FINAL & LEASED


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_check_refuses_by_name_what_the_table_lacks(before: Status, after: Status) -> None:
    if after in TRANSITIONS[before]:
        check(before, after)
    else:
        with pytest.raises(ValueError, match=f"no transition from {before} to {after}"):
            check(before, after)
