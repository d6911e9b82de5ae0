"""The spec as a document: short forms, defaults, words for every mistake."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from core.base.attribute_docs import attribute_docs
from core.errors import SpecError, TooLarge
from core.settings import Settings
from core.spec import axes, job
from core.spec.base import SpecModel
from core.spec.job import JobSpec
from core.spec.load import load_json, load_yaml, parse_job
from core.spec.resolve import resolve
from core.spec.run import orders
from core.spec.run.orders import DataOrder, RunOrder

FILE = "file-" + "0" * 26
GOOD: dict[str, Any] = {"model": "a/b", "data": FILE}


def models() -> list[type[SpecModel]]:
    modules = [import_module(f"{axes.__name__}.{found.name}") for found in iter_modules(axes.__path__)]
    found = {
        value
        for module in (*modules, job, orders)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, SpecModel) and value is not SpecModel
    }
    return sorted(found, key=lambda value: value.__name__)


@pytest.mark.parametrize("spec_model", [m for m in models() if m.__module__ != orders.__name__])
def test_every_field_is_documented(spec_model: type[SpecModel]) -> None:
    assert spec_model.__doc__
    docs = attribute_docs(spec_model)
    for name in spec_model.model_fields:
        assert name == "type" or docs.get(name), f"{spec_model.__name__}.{name} has no docstring"


def test_every_setting_is_documented() -> None:
    docs = attribute_docs(Settings)
    for name in Settings.model_fields:
        assert docs.get(name), f"EFT_{name.upper()} has no docstring"


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ({"method": "full"}, {"method": {"type": "full"}}),
        ({"model": "a/b@v1"}, {"model": {"type": "hub", "id": "a/b", "revision": "v1"}}),
        ({"model": "/m/x"}, {"model": {"type": "local", "path": "/m/x"}}),
        ({"model": "/m/x.gguf"}, {"model": {"type": "gguf", "path": "/m/x.gguf"}}),
        ({"data": FILE}, {"data": {"train": {"type": "file", "id": FILE}}}),
        ({"data": {"train": "/d/x.jsonl"}}, {"data": {"train": {"type": "path", "path": "/d/x.jsonl"}}}),
        ({"evaluation": "none"}, {"evaluation": {"type": "none"}}),
        ({"method": "qlora"}, {"method": {"type": "qlora"}}),
        ({"quantization": "int8"}, {"quantization": {"type": "int8", "block_size": 64}}),
        ({"export": "merged"}, {"export": [{"type": "merged", "merge_onto": "trained"}]}),
        ({"export": ["merged"]}, {"export": [{"type": "merged", "dtype": "auto"}]}),
        # an object without `type` is the axis's default arm, where that has all of its fields
        ({"method": {"r": 8}}, {"method": {"type": "lora", "r": 8}}),
        ({"method": {}}, {"method": {"type": "lora"}}),
        ({"schedule": {"warmup_ratio": 0.1}}, {"schedule": {"type": "linear", "warmup_ratio": 0.1}}),
        ({"batching": {"group_by_length": True}}, {"batching": {"type": "rows", "group_by_length": True}}),
        (
            {"data": {"train": FILE, "rendering": {"pairs": "joined"}}},
            {"data": {"train": FILE, "rendering": {"type": "model", "pairs": "joined"}}},
        ),
    ],
)
def test_short_forms(short: dict[str, Any], full: dict[str, Any]) -> None:
    assert parse_job(GOOD | short) == parse_job(GOOD | full)


def test_resolving_writes_every_default_and_changes_nothing_twice() -> None:
    spec = parse_job(GOOD | {"data": {"train": {"type": "file", "id": FILE, "format": "text"}}})
    once = resolve(spec)
    assert resolve(once) == once
    dumped = once.model_dump(mode="json")
    assert (dumped["stage"]["loss_on"], dumped["method"]["lora_alpha"]) == ("all", 64.0)
    assert (dumped["optimizer"]["learning_rate"], dumped["evaluation"]) == (2e-4, {"type": "none"})
    assert parse_job(dumped) == once
    assert resolve(parse_job(GOOD)).stage.loss_on is None  # only whoever reads the rows can tell


@pytest.mark.parametrize(
    ("axes", "packing"),
    [
        ({}, {"type": "none"}),
        ({"method": "full"}, {"type": "none"}),
        ({"method": "qlora"}, {"type": "nf4", "double": True, "skip_modules": []}),
        ({"method": "qlora", "quantization": "int8"}, {"type": "int8", "block_size": 64, "skip_modules": []}),
        (
            {"method": {"type": "lora", "r": 4}, "quantization": "nf4"},
            {"type": "nf4", "double": True, "skip_modules": []},
        ),
    ],
)
def test_qlora_packs_the_base(axes: dict[str, Any], packing: dict[str, Any]) -> None:
    spec = resolve(parse_job(GOOD | axes))
    assert spec.quantization is not None and spec.quantization.model_dump() == packing
    assert parse_job(spec.model_dump(mode="json")) == spec


def test_a_run_order_survives_its_file() -> None:
    train = DataOrder.of(Path("/t"))
    order = RunOrder(job_id="j", attempt=1, spec=resolve(parse_job(GOOD)), model_dir="/m", train=train)
    assert RunOrder.model_validate_json(order.model_dump_json()) == order


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"method": {"type": "lora", "rr": 1}}, "method.rr", "did you mean `r`?"),
        ({"batching": {"tokens_per_batch": 64}}, "batching", "give a `type`"),
        ({"data": {"train": FILE, "rendering": {"name": "chatml"}}}, "data.rendering", "give a `type`"),
        ({"method": 7}, "method", "object"),
        ({"method": None}, "method", "object"),
        ({"model": [1]}, "model", "a list"),
        ({"training": {"precision": "double"}}, "training.precision", "`bf16`"),
        ({"training": {"max_steps": 10.5}}, "training.max_steps", "integer"),
        ({"training": {"max_steps": True}}, "training.max_steps", "integer"),
        ({"optimizer": {"type": "adamw", "betas": [0.9, 1.0]}}, "optimizer.betas[1]", "less than 1"),
        ({"optimizer": {"type": "adamw", "betas": [0.9]}}, "optimizer.betas[1]", "required"),
        ({"method": {"type": "lora", "target_modules": []}}, "method.target_modules", ""),
        ({1: 2}, "1", "unknown field"),
        ({"method": {"type": "qlora", "lora_r": 1}}, "method.lora_r", "did you mean"),
        ({"quantization": "int4"}, "quantization.type", "did you mean `nf4`?"),
        ({"quantization": {"type": "int8", "block_size": 65}}, "quantization.block_size", "64"),
        ({"export": ["merged", {"type": "merged"}]}, "export", "once"),
        ({"export": "merge"}, "export[0].type", "merged"),
        ({"export": [{"type": "merged", "merge_on": "original"}]}, "export[0].merge_on", "did you mean `merge_onto`?"),
    ],
)
def test_mistakes_are_named(change: dict[Any, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(GOOD | change)
    assert caught.value.field == field
    assert words in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from([*JobSpec.model_fields, "methd"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(fields, json_values, max_size=5))
def test_anything_is_a_job_or_a_refusal_in_words(change: dict[str, Any]) -> None:
    """Never another exception, and never a message that a terminal would obey."""
    try:
        parse_job(GOOD | change)
    except SpecError as error:
        assert error.message.isprintable()
        for fault in error.faults:
            assert fault.message
            assert (fault.field or "x").isprintable()
        json.dumps(error.as_dict()).encode()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.text(alphabet="{}[]:,-&*!?|>'\"%@ \n#ab01.e<", max_size=120).map(str.encode))
def test_any_bytes_are_a_document_or_a_refusal(text: bytes) -> None:
    for load in (load_json, load_yaml):
        try:
            load(text)
        except SpecError as error:
            assert error.code in ("invalid_json", "invalid_yaml")


def test_yaml_reads_numbers_as_json_does() -> None:
    assert load_yaml(b"a: 1e-4\nb: 5E3\nc: .5e1\nd: 1e4x\ne: 2") == {"a": 1e-4, "b": 5e3, "c": 5.0, "d": "1e4x", "e": 2}


def test_a_yaml_document_is_bounded() -> None:
    with pytest.raises(TooLarge):
        load_yaml(b"a: b\n" * 20_000)


NO_AXIS = ("Data", "GroupFactors", "Requirements", "ResumeFrom", "TrainedPart", "Training", "Weighted")


def test_every_axis_has_its_discriminator() -> None:
    for spec_model in models():
        no_axis = spec_model.__name__ in NO_AXIS
        if no_axis or spec_model.__module__ in (orders.__name__, "core.spec.job", "core.spec.run.chain"):
            continue
        assert issubclass(spec_model, BaseModel)
        if spec_model.__subclasses__():
            continue  # no arm, but what some share
        assert isinstance(spec_model.model_fields["type"].default, str), spec_model.__name__
