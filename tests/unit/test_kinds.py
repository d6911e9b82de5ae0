"""The tables of children, slots and stop reasons: complete, and true of what they name."""

from __future__ import annotations

import importlib.util
from typing import get_args

import pytest

from core.db.tables import Attempt, Job
from core.jobs.base.stop_reasons import StopReason
from core.jobs.kinds import CHILDREN, SLOTS, Kind, SlotKind


def test_each_kind_has_a_row_with_a_module_that_runs() -> None:
    assert set(CHILDREN) == set(Kind) and set(SLOTS) == set(get_args(SlotKind))
    for kind in CHILDREN.values():
        assert importlib.util.find_spec(kind.module) is not None
    served = {SLOTS[slot].serves for slot in SLOTS}
    assert {CHILDREN[kind].takes or kind for kind in Kind} == served, "a kind that no slot serves would wait for ever"
    assert all((SLOTS[slot].billing > 0) == CHILDREN[SLOTS[slot].serves].billed for slot in SLOTS)
    assert all(len(kind) <= Attempt.kind.type.length for kind in Kind)


@pytest.mark.parametrize("reason", StopReason)
def test_each_stop_reason_says_a_message_of_its_own(reason: StopReason) -> None:
    assert len(reason) <= Job.stop_requested.type.length
    message = reason.message("box", ["cpu-0"])
    assert message and "StopReason" not in message
    assert [one for one in StopReason if one.message("box", ["cpu-0"]) == message] == [reason]


def test_a_hold_on_one_of_several_slots_names_them_all() -> None:
    assert StopReason.HOLD.message("box", ["a"]) == "slot a of box is held"
    assert StopReason.HOLD.message("box", ["a", "b"]) == "one of the slots a, b of box is held"
