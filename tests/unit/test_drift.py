"""What a run that resumes is compared with, and what a difference means: every rule by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from core.plan.drift import RULES, compare, page, worst

THEN: dict[str, Any] = {
    "base": "12fd25f7",
    "data": {"train": ["aa"], "eval": ["bb"]},
    "ranks": 1,
    "spec": {
        "name": "one",
        "optimizer": {"type": "adamw", "learning_rate": 1e-4},
        "memory": {"stream": {"type": "none"}},
        "resources": {"max_runtime_seconds": None},
        "checkpoint": {"save_steps": 5},
        "evaluation": {"eval_steps": 5, "per_device_eval_batch_size": 8},
        "export": ["merged"],
        "tracking": ["tensorboard"],
        "batching": {"tokens_per_batch": 9},
        "training": {
            "max_steps": 9,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "precision": "auto",
            "attention": "auto",
            "compile": False,
        },
    },
    "code": "cc",
    "versions": {"torch": "2.13.0", "safetensors": "0.8"},
    "driver": "rocm 7.2",
    "device": "cuda",
    "device_name": "a card",
    "arch": "gfx942",
    "precision": "bf16",
    "weights_dtype": "bfloat16",
    "attention": {"kernel": "flash"},
    "products": "direct",
    "tf32": False,
    "threads": 2,
    "compiled": {"eager": {}},
}
LEAVES = {"spec": "optimizer.learning_rate", "spec.training": "max_steps", "versions": "torch", "attention": "kernel"}
LEAVES |= {"spec.memory": "stream.type", "spec.resources": "max_runtime_seconds", "spec.checkpoint": "save_steps"}
LEAVES |= {"spec.evaluation": "eval_steps", "compiled": "eager"}


def changed(path: str) -> dict[str, Any]:
    """THEN with another value on a path."""
    now = copy.deepcopy(THEN)
    *places, last = path.split(".")
    at = now
    for place in places:
        at = at[place]
    assert last in at, path
    at[last] = "another"
    return now


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_each_rule_decides_about_its_own_field(rule: Any) -> None:
    path = f"{rule.field}.{LEAVES[rule.field]}" if rule.field in LEAVES else rule.field
    (found,) = compare(THEN, changed(path))
    assert (found.path, found.rule) == (path, rule)
    assert found.words == f"{path.removeprefix('versions.')} was {_words(path)}, is another"
    assert compare(THEN, changed(path), but=[rule.field]) == [], "changed on purpose"


def _words(path: str) -> str:
    value: Any = THEN
    for part in path.split("."):
        value = value[part]
    return "unset" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def test_what_is_not_compared() -> None:
    assert compare(THEN, copy.deepcopy(THEN)) == []
    assert compare(THEN, changed("spec.name")) == []
    old = {name: value for name, value in THEN.items() if name not in ("base", "data", "spec", "code")}
    assert compare(old, changed("base")) == [], "an earlier version did not remember it"
    assert compare(THEN, THEN | {"node": "elsewhere"}) == []


def test_the_worst_of_all_counts() -> None:
    now = changed("spec.memory.stream.type")
    assert worst(compare(THEN, now)) == "same" == worst([])
    now["threads"] = 4
    assert worst(compare(THEN, now)) == "last bits"
    now["precision"] = "fp32"
    assert worst(compare(THEN, now)) == "other"


def test_the_page_has_every_rule() -> None:
    assert all(f"| `{rule.field}` | {rule.verdict} |" in page() for rule in RULES)
