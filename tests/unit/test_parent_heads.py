"""Which job may go on from which, by what their models end in."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import SpecError
from core.jobs.admission.parents import settle
from core.spec.axes.model import JobModel
from core.spec.job import JobSpec

ID = "job-01kar3v8x5m2h6n9qst4wyz0bc"
TRAIN = {"type": "file", "id": "file-" + "0" * 26}
NO_SESSION: Any = None


def after(parent: dict[str, Any], adapter: str | None = None, **child: Any) -> JobSpec:
    """The child as it is settled behind a parent that is not there yet."""
    first = JobSpec.model_validate({"model": "a/b", "data": {"train": TRAIN}, "method": "lora"} | parent)
    model = {"type": "job", "id": ID} | ({"adapter": adapter} if adapter else {})
    return settle(
        NO_SESSION, "proj", JobSpec.model_validate({"model": model, "data": {"train": TRAIN}} | child), {ID: first}
    )


def adapter_of(spec: JobSpec) -> str | None:
    assert isinstance(spec.model, JobModel)
    return spec.model.adapter


@pytest.mark.parametrize("stage", ["reward", "process_reward"])
def test_a_new_head_goes_over_a_language_model_and_a_head_over_its_own_kind(stage: str) -> None:
    for before in ("sft", "dpo", stage):
        assert adapter_of(after({"stage": before}, stage=stage)) == "continue"
    assert adapter_of(after({"stage": "sft"}, "merge", stage=stage)) == "merge"
    assert adapter_of(after({"stage": stage, "method": "full"}, stage=stage)) is None


@pytest.mark.parametrize(
    "before, stage", [("reward", "sft"), ("reward", "dpo"), ("process_reward", "reward"), ("reward", "process_reward")]
)
@pytest.mark.parametrize("method", ["full", "lora", "auto"])
def test_another_head_is_refused(before: str, stage: str, method: str) -> None:
    with pytest.raises(SpecError) as refused:
        after({"stage": before, "method": method}, stage=stage)
    assert (refused.value.code, refused.value.faults[0].field) == ("model_of_another_head", "model.id")
    assert f"`stage: {before}`" in str(refused.value)


@pytest.mark.parametrize("child", [{"adapter": "merge"}, {"method": "full"}])
def test_an_adapter_with_a_head_is_not_merged_away(child: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="continue the adapter") as refused:
        after({"stage": "reward"}, **child, stage="reward")
    assert (refused.value.code, refused.value.faults[0].field) == ("model_of_another_head", "model.adapter")
