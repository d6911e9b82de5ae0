"""What a job's refusal proposes exists, and is what the person meant who wrote another trainer's word for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from core.errors import SpecError
from core.spec import hints
from core.spec.aliases import EXAMPLES, FIELDS, VALUES
from core.spec.job import JobSpec
from core.spec.load import load_yaml, parse_job

GOOD: dict[str, Any] = {"model": "lab/model", "data": {"train": "/data/a.jsonl"}}


def refused(change: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_job(GOOD | change)
    return " ".join(f"{fault.field}: {fault.message}" for fault in caught.value.faults)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def places() -> dict[str, list[str]]:
    return hints.leaves(JobSpec)


@pytest.mark.parametrize(("name", "target"), FIELDS.items())
def test_every_alias_leads_to_a_field(name: str, target: str) -> None:
    path, _, value = target.partition(" = ")
    assert path in [place for paths in places().values() for place in paths] or exists(path), target
    assert name == name.lower().replace("-", "_")
    assert name not in JobSpec.model_fields
    if value:
        parse_job(GOOD | nested(path, load_yaml(value.encode())))
    assert f"did you mean `{path}{f': {value}' if value else ''}`?" in refused({name: 1})


def exists(path: str) -> bool:
    """Of a field that stands at several depths: the nearest alone are leaves."""
    models: list[Any] = [JobSpec]
    for name in path.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [found for field in fields for found in hints.models_in(field.rebuild_annotation())]
    return True


PARENTS = {
    "attention": "training",
    "format": "data.train",
    "loss_on": "stage",
    "precision": "training",
    "truncation": "training",
    "columns": "data.train",
    "samples": "evaluation",
    "early_stopping": "evaluation",
    "rendering": "data",
    "split": "data",
    "activation_offloading": "memory",
    "offload_optimizer": "memory",
    "stream": "memory",
    "requirements": "resources",
}
"""Of names that stand inside an object."""
NEEDED = {
    "data.train": {"type": "path", "path": "/data/a.jsonl"},
    "data": {"train": "/data/a.jsonl"},
    "evaluation": {"eval_steps": 5},
}
"""What the object needs beside it."""


def written(name: str, value: Any) -> dict[str, Any]:
    parent = PARENTS.get(name, "")
    inside = NEEDED.get(parent, {}) | {name: value}
    if parent == "data.train":
        return {"data": {"train": inside}}
    return {parent: inside} if parent else inside


@pytest.mark.parametrize(
    ("field", "value", "meant"), [(f, v, m) for f, table in VALUES.items() for v, m in table.items()]
)
def test_every_value_leads_to_one_that_is_taken(field: str, value: str, meant: str) -> None:
    parse_job(GOOD | written(field, load_yaml(meant.encode())))
    assert f"did you mean `{meant}`?" in refused(written(field, value))


@pytest.mark.parametrize(("field", "example"), EXAMPLES.items())
def test_every_example_is_a_value_of_its_field(field: str, example: str) -> None:
    parse_job(GOOD | written(field, load_yaml(example.encode())))
    if field not in ("model", "columns"):
        assert f"for example `{field}: {example}`" in refused(written(field, 0.1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": {"learning_rate": 1e-4}}, "did you mean `optimizer.learning_rate`?"),
        ({"learning_rate": 1e-4}, "did you mean `optimizer.learning_rate`?"),
        ({"training": {"gradient_checkpointing": True}}, "did you mean `memory.gradient_checkpointing`?"),
        ({"precision": "bf16"}, "did you mean `training.precision`?"),
        ({"seed": 1}, "did you mean `training.seed`?"),
        ({"quantization": "4bit"}, "did you mean `nf4`?"),
        ({"method": "dora"}, "did you mean `{type: lora, use_dora: true}`?"),
        ({"adapter": "lora"}, "did you mean `method`?"),
        ({"method": {"rank": 16}}, "unknown field `rank`; did you mean `r`?"),
        ({"method": {"type": "lora", "rank": 16}}, "did you mean `r`?"),
        ({"batching": {"tokens_per_batch": 64}}, "give a `type` here (`rows`, `tokens`, `packed`)"),
        ({"optimizer": {"lr": 1e-4}}, "did you mean `learning_rate`?"),
        ({"data": {"train": "/a", "split": 0.1}}, "for example `split: {eval_fraction: 0.1}`"),
        ({"evaluation": {"eval_steps": 5, "samples": 4}}, "for example `samples: {type: greedy, rows: 4}`"),
        ({"evaluation": {"early_stopping": 3}}, "for example `early_stopping: {type: patience, patience: 3}`"),
        # beyond the names of other trainers: near spellings, here and elsewhere, and capitals
        ({"training": {"epoch": 3}}, "known here: `num_train_epochs`"),
        ({"learning-rate": 1}, "did you mean `optimizer.learning_rate`?"),
        ({"max_lenght": 9}, "did you mean `training.max_length`?"),
        ({"training": {"max_lenght": 9}}, "did you mean `max_length`?"),
        ({"Training": {}}, "did you mean `training`?"),
        ({"BF16": True}, "did you mean `training.precision: bf16`?"),
        ({"load_in_4bit": True}, "did you mean `quantization: nf4`?"),
        ({"pinned": True}, "`memory.stream.pinned`"),
        ({"wandb_project": "x"}, "known here: `version`"),
        ({"data": {"train": {"type": "file", "id": "file-" + "0" * 26, "split": "x"}}}, "did you mean `data.split`?"),
    ],
)
def test_what_was_meant_is_said(change: dict[str, Any], words: str) -> None:
    assert words in refused(change)


def test_an_evaluation_without_a_type_is_the_held_out_one() -> None:
    job = GOOD | {"data": {"train": "/a", "eval": "/b"}}
    assert parse_job(job | {"evaluation": {"eval_steps": 10}}) == parse_job(
        job | {"evaluation": {"type": "held_out", "eval_steps": 10}}
    )


def test_whatever_a_hint_names_is_there() -> None:
    """Names that differ from a field by one letter, at the top and inside each axis."""
    for name, paths in places().items():
        for wrong in (name + "x", name[:-1] or "q"):
            said = refused({wrong: 1}) if wrong not in JobSpec.model_fields else ""
            for meant in re.findall(r"did you mean `([^`:]+)", said):
                assert exists(meant), (wrong, said)
        assert all(exists(path) for path in paths)
