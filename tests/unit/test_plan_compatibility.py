"""The compatibility table: every cell is either a job that passes or a refusal with a reason and a way out."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, get_args

import pytest

from core.docs import __main__
from core.docs.plans import _PAGES, render
from core.plan.compatibility import check
from core.plan.rules.axes import AXES, values_of
from core.plan.rules.table import RULES
from core.spec.axes.runtime import BestMetric
from core.spec.axes.stage import Stage
from core.spec.base import SpecModel
from core.spec.job import JobSpec

TRAIN, EVAL = "file-" + "0" * 26, "file-" + "1" * 26


OF_A_STAGE = {
    "pairs_are_not_split",
    "solutions_are_not_split",
    "reference_is_trained",
    "metric_of_another_stage",
    "no_text_to_sample",
    "no_answers_to_score",
    "no_gguf_of_a_reward_model",
    "vllm_refuses",
    "noise_of_another_stage",
    "no_whole_groups",
    "no_room_for_prompts",
    "rollouts_in_rows",
    "rollouts_of_a_stream",
    "no_reference_in_rollouts",
    "exact_sampler",
    "no_environment",
    "qat_adapter",
    "qat_export",
    "qat_refused",
}

REQUIRED: dict[str, dict[str, Any]] = {
    "grpo": {"reward": ["exact"]},
    "rloo": {"reward": ["exact"]},
    "ppo": {"reward": ["exact"]},
}
"""Fields that a stage cannot do without."""


def has_loss_on(values: dict[str, str]) -> bool:
    return "loss_on" in stage_arms()[values["stage"]].model_fields


def stage_arms() -> dict[str, type[SpecModel]]:
    return {arm.model_fields["type"].default: arm for arm in get_args(get_args(Stage)[0])}


@pytest.mark.parametrize("name", stage_arms())
def test_the_best_checkpoint_is_chosen_by_what_the_stage_measures(name: str) -> None:
    stage: Any = stage_arms()[name]
    for metric in get_args(BestMetric):
        job = {
            "model": "a/b",
            "data": {"train": {"type": "file", "id": TRAIN}, "eval": {"type": "file", "id": EVAL}},
            "stage": {"type": name, **REQUIRED.get(name, {})},
            "evaluation": {"type": "held_out", "metric_for_best_model": metric},
        }
        codes = {fault.code for fault in check(JobSpec.model_validate(job))}
        assert ("metric_of_another_stage" in codes) is (metric not in stage.metrics)


@pytest.mark.parametrize("name", stage_arms())
def test_only_a_model_that_writes_is_sampled(name: str) -> None:
    stage: Any = stage_arms()[name]
    job = {
        "model": "a/b",
        "data": {"train": {"type": "file", "id": TRAIN}, "eval": {"type": "file", "id": EVAL}},
        "stage": {"type": name, **REQUIRED.get(name, {})},
        "evaluation": {"type": "held_out", "samples": "greedy"},
    }
    codes = {fault.code for fault in check(JobSpec.model_validate(job))}
    assert ("no_text_to_sample" in codes) is (stage.head != "tokens")
    scored = {"type": "held_out", "generation": {"metrics": ["f1"]}, "metric_for_best_model": "eval_generated/f1"}
    codes = {fault.code for fault in check(JobSpec.model_validate(job | {"evaluation": scored}))}
    assert ("no_answers_to_score" in codes) is (name not in ("sft", "dpo", "simpo", "orpo"))
    assert "metric_of_another_stage" not in codes
    other = scored | {"metric_for_best_model": "eval_generated/chrf"}
    codes = {fault.code for fault in check(JobSpec.model_validate(job | {"evaluation": other}))}
    assert "metric_of_another_stage" in codes
    codes = {fault.code for fault in check(JobSpec.model_validate(job | {"export": ["gguf"]}))}
    assert ("no_gguf_of_a_reward_model" in codes) is (stage.head != "tokens")


@pytest.mark.parametrize(
    ("axes", "code"),
    [
        ({"method": "full", "export": ["torchao_int8"]}, None),
        ({"quantization": {"type": "qat", "weights": "int4"}, "export": ["torchao_int4"]}, None),
        ({"method": {"type": "lora", "modules_to_save": ["norm"], "new_tokens": ["<look>"]}}, None),
        ({"export": ["torchao_int4"]}, "qat_export"),
        ({"export": ["torchao_int8", "merged"]}, "qat_export"),
        ({"export": ["vllm"]}, "qat_export"),
        ({"export": [{"type": "lm_eval", "task": "gsm8k"}]}, "qat_export"),
        ({"method": {"type": "lora", "lora_dropout": 0.1}}, "qat_adapter"),
        ({"method": {"type": "lora", "use_dora": True}}, "qat_adapter"),
        ({"method": {"type": "lora", "init_lora_weights": "pissa"}}, "qat_adapter"),
        ({"method": "qlora"}, "qat_packed"),
        ({"method": "auto"}, "qat_settled_later"),
        ({"stage": "dpo"}, "qat_refused"),
        ({"memory": {"stream": "host"}}, "qat_refused"),
        ({"memory": {"offload_optimizer": "host"}}, "qat_refused"),
        ({"training": {"compile": True}}, "qat_refused"),
        ({"memory": {"gradient_checkpointing": "selective"}}, "qat_refused"),
    ],
)
def test_what_rounding_does_not_go_with_is_refused(axes: dict[str, Any], code: str | None) -> None:
    job = {"model": "a/b", "data": TRAIN, "method": "lora", "quantization": "qat"} | axes
    assert [fault.code for fault in check(JobSpec.model_validate(job))] == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ({"type": "lora"}, False),
        ({"type": "qlora", "use_rslora": True}, False),
        ({"type": "lora", "init_lora_weights": "pissa"}, False),
        ({"type": "lora", "use_dora": True}, True),
        ({"type": "lora", "modules_to_save": ["norm"]}, True),
        ({"type": "oft"}, True),
        ("full", True),
    ],
)
def test_an_adapter_that_vllm_refuses_is_refused(method: Any, refused: bool) -> None:
    job = {"model": "a/b", "data": TRAIN, "method": method, "export": ["vllm"]}
    assert ("vllm_refuses" in {fault.code for fault in check(JobSpec.model_validate(job))}) is refused


PARENT = {"type": "job", "id": "job-01kar3v8x5m2h6n9qst4wyz0bc"}


def spec_at(values: dict[str, str]) -> JobSpec:
    """A job that stands at these values."""
    data: dict[str, Any] = {"train": {"type": "file", "id": TRAIN, "format": values["train rows"]}}
    if values["eval rows"] != "absent":
        data["eval"] = {"type": "file", "id": EVAL, "format": values["eval rows"]}
    data["streaming"] = values["streaming"] == "yes"
    return JobSpec.model_validate(
        {
            "model": "a/b" if values["adapter"] == "new" else {**PARENT, "adapter": values["adapter"]},
            "data": data,
            "stage": {"type": values["stage"], **REQUIRED.get(values["stage"], {})}
            | (
                {"loss_on": None if values["loss on"] == "default" else values["loss on"]}
                if has_loss_on(values)
                else {}
            ),
            "method": values["method"],
            "quantization": None if values["quantization"] == "default" else values["quantization"],
            "export": ["merged"] if values["merged"] == "yes" else [],
            "optimizer": values["optimizer"],
            "schedule": values["schedule"],
            "training": {"precision": values["precision"], "truncation": values["truncation"], "max_steps": 2}
            | ({"neftune_noise_alpha": 5.0} if values["noise"] == "yes" else {})
            | {"compile": values["compile"] == "yes"},
            "batching": (
                {"type": "rows", "group_by_length": True}
                if values["batching"] == "rows by length"
                else values["batching"]
            ),
            "memory": activations_at(values)
            | {
                "type": values["memory"],
                "stream": values["stream"],
                "offload_optimizer": values["offload optimizer"],
            },
            "resources": {
                "type": values["strategy"],
                "accelerator": values["accelerator"],
                "gpus": 1 if values["ranks"] == "one" else 3,
            },
            "evaluation": {"default": None, "held_out in steps": {"eval_steps": 2}}.get(
                values["evaluation"], values["evaluation"]
            ),
        }
    )


def activations_at(values: dict[str, str]) -> dict[str, Any]:
    said = {"default": None, "no": False, "yes": True, "selective": "selective"}
    return {
        "gradient_checkpointing": said[values["checkpointing"]],
        "activation_offloading": values["activation offloading"],
    }


def together() -> list[set[str]]:
    """Axes that some rule looks at, those in one set that rules connect. Rules of optimizers and of compiled blocks
    would connect all of them: each of these has a set of its own."""
    groups: list[set[str]] = []
    for rule in RULES:
        if rule.when.keys() & {"optimizer", "compile"}:
            continue
        touched = [group for group in groups if group & rule.when.keys()]
        groups = [group for group in groups if group not in touched] + [set(rule.when).union(*touched)]
    return groups + [set(rule.when) for rule in RULES if rule.when.keys() & {"optimizer", "compile"}]


def told_apart(axis: str) -> list[str]:
    """One value of an axis for each way in which the rules treat its values."""
    groups = {tuple(value in rule.when.get(axis, ()) for rule in RULES): value for value in reversed(AXES[axis])}
    return list(groups.values())


def test_every_combination_is_built_and_decided() -> None:
    """Of axes that rules connect, all of them (and of values that no rule tells apart, one); of the others, every value
    once; and some of everything at random."""
    base = {axis: values[0] for axis, values in AXES.items()}
    combinations = [{axis: value} for axis, values in AXES.items() for value in values]
    for group in together():
        axes = sorted(group)
        combinations += [dict(zip(axes, cell, strict=True)) for cell in product(*(told_apart(axis) for axis in axes))]
    chance = random.Random(0)
    combinations += [{axis: chance.choice(values) for axis, values in AXES.items()} for _ in range(1000)]
    assert len(combinations) > 2000
    for combination in combinations:
        values = base | combination
        if not has_loss_on(values):
            values["loss on"] = "default"
        spec = spec_at(values)
        assert values_of(spec) == values
        expected = {rule.code for rule in RULES if rule.refuses(values)}
        found = {fault.code for fault in check(spec)}
        assert found - OF_A_STAGE == expected
        pairs_split = values["stage"] in ("dpo", "simpo", "orpo", "reward") and values["truncation"] == "split"
        assert ("pairs_are_not_split" in found) is pairs_split
        steps_split = values["stage"] == "process_reward" and values["truncation"] == "split"
        assert ("solutions_are_not_split" in found) is steps_split
        streamed = values["stage"] in ("dpo", "kto") and values["streaming"] == "yes"
        moves = values["method"] == "full" or values["adapter"] == "continue"
        assert ("reference_is_trained" in found) is (streamed and moves)


@pytest.mark.parametrize("rule", RULES, ids=[rule.code for rule in RULES])
def test_a_rule_is_well_made(rule: Any) -> None:
    for axis, values in rule.when.items():
        assert set(values) <= set(AXES[axis])
        matters = len(AXES[axis]) == 1 or set(values) != set(AXES[axis])  # one arm today: others may come
        assert matters, "an axis that does not matter is left out"
    assert rule.reason and rule.way_out and rule.field
    assert any(rule.when.keys() <= set(page) for page in _PAGES), "every rule shows in a table of the docs"
    fields = JobSpec.model_fields
    assert rule.field.split(".")[0] in fields


def test_codes_are_unique() -> None:
    codes = [(rule.code, rule.when.get("stage")) for rule in RULES]
    assert len(set(codes)) == len(RULES)


def test_axes_follow_the_spec() -> None:
    assert AXES["method"] == ("full", "lora", "qlora", "oft", "auto")
    assert AXES["quantization"] == ("default", "none", "nf4", "int8", "qat")
    assert AXES["evaluation"] == ("default", "none", "held_out", "held_out in steps")
    assert AXES["precision"] == ("auto", "bf16", "fp16", "fp32", "fp8")
    assert AXES["strategy"] == ("single",)
    assert AXES["batching"] == ("rows", "rows by length", "tokens", "packed")


def test_the_page_has_every_rule() -> None:
    page = render()
    for rule in RULES:
        assert f"`{rule.code}`" in page
        assert rule.reason in page


# cli*.md are made of the help of every command, in a process each: `make check` looks at those.
@pytest.mark.parametrize("name", [page for page in __main__.PAGES if not page.startswith("cli")])
def test_no_generated_page_is_stale(name: str) -> None:
    assert not __main__.stale([name]), "run `make docs`"


GRPO_JOB: dict[str, Any] = {
    "model": "a/b",
    "data": {"train": {"type": "file", "id": TRAIN}},
    "stage": {"type": "grpo", "reward": ["exact"]},
}
PLAYED = {"type": "python", "source": "def respond():\n    return 1"}
EXACT = {**GRPO_JOB["stage"], "sampler": "exact"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"training": {"per_device_train_batch_size": 6}}, "no_whole_groups"),
        ({"training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}}, None),
        ({"training": {"max_length": 256}}, "no_room_for_prompts"),
        ({"batching": "packed"}, "rollouts_in_rows"),
        ({"batching": {"type": "rows", "group_by_length": True}}, "rollouts_in_rows"),
        (
            {"data": {"train": {"type": "file", "id": TRAIN}, "streaming": True}, "training": {"max_steps": 3}},
            "rollouts_of_a_stream",
        ),
        ({"method": "full"}, None),
        ({"stage": EXACT}, None),
        ({"stage": EXACT, "quantization": "none"}, None),
        ({"stage": {**GRPO_JOB["stage"], "environment": PLAYED}}, None),
        ({"stage": {"type": "ppo", "reward": ["environment"]}}, "no_environment"),
        ({"stage": {**GRPO_JOB["stage"], "environment": "task"}}, "no_environment"),
        ({"stage": {"type": "grpo", "reward": ["task"], "environment": "task"}}, None),
        ({"stage": {"type": "rloo", "reward": ["task", "environment"], "environment": "task"}}, "no_environment"),
        ({"stage": {"type": "grpo", "reward": [{"type": "model", "model": "a/b"}], "environment": PLAYED}}, None),
        ({"stage": EXACT, "method": "qlora"}, "exact_sampler"),
        ({"stage": EXACT, "training": {"precision": "fp8"}}, "exact_sampler"),
        ({"stage": EXACT, "memory": {"stream": "host"}}, "exact_sampler"),
        ({"method": "full", "stage": {**GRPO_JOB["stage"], "beta": 0.1}}, "no_reference_in_rollouts"),
        (
            {"data": {"train": {"type": "file", "id": TRAIN}, "eval": {"type": "file", "id": EVAL}}},
            None,
        ),
        (
            {
                "data": {"train": {"type": "file", "id": TRAIN}, "eval": {"type": "file", "id": EVAL}},
                "evaluation": {"eval_steps": 5, "load_best_model_at_end": True},
            },
            None,
        ),
        (
            {
                "data": {"train": {"type": "file", "id": TRAIN}, "eval": {"type": "file", "id": EVAL}},
                "evaluation": {"metric_for_best_model": "eval_loss"},
            },
            "metric_of_another_stage",
        ),
    ],
)
def test_what_a_job_with_rollouts_is_refused_for(change: dict[str, Any], code: str | None) -> None:
    assert [fault.code for fault in check(JobSpec.model_validate(GRPO_JOB | change))] == (
        [] if code is None else [code]
    )
