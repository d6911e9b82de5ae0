"""Every hostile folder (tests/support/hostile) works, or is refused in words, within bounds of time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile.cases import chosen
from tests.support.trainer import ENVIRONMENT, ROOT

MOST_BYTES = 1500 << 20
"""Of a process that has imported torch (400 MB), and may take one GiB more."""
SLOW = 15.0
"""Seconds of processor time that no case may take: a template may render for ten
(core/train/render/jinja/sandbox.py)."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> dict[str, dict[str, Any]]:
    """What became of each, by its name."""
    work = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.support.hostile.runs", str(work), str(tiny_dir), "0", "1"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["name"]: one for one in found}


def test_each_came_to_its_end(told: dict[str, dict[str, Any]]) -> None:
    assert list(told) == ["none", *(case.name for case in chosen())]
    assert len(told) >= 200
    assert (told["none"]["stage"], told["none"]["failure"]) == ("train", None), "as it stands the model trains"


def test_nothing_escapes(told: dict[str, dict[str, Any]]) -> None:
    assert not {name: one["escaped"] for name, one in told.items() if one["escaped"]}


def test_each_works_or_is_refused_in_words(told: dict[str, dict[str, Any]]) -> None:
    refused = {name: one["failure"] for name, one in told.items() if one["failure"]}
    wrong = {name: failure for name, failure in refused.items() if not in_words(failure)}
    assert not wrong, json.dumps(wrong, indent=1)
    assert len(refused) >= 200, "hostile folders are mostly refused"


def in_words(failure: dict[str, Any]) -> bool:
    if failure["failure"] == "memory":  # of a library that took all that its process may take
        return failure["code"] == "memory_limit" and "EFT_" in failure["message"]
    return (
        failure["failure"] == "user" and failure["code"] not in ("internal", "error") and len(failure["message"]) > 20
    )


def test_within_bounds(told: dict[str, dict[str, Any]]) -> None:
    assert not {name: one["peak"] for name, one in told.items() if one["peak"] > MOST_BYTES}
    assert not {name: one["seconds"] for name, one in told.items() if one["seconds"] > SLOW}


@pytest.mark.parametrize(
    ("name", "stage", "words"),
    [
        ("config num_hidden_layers 10^12", "plan", "`num_hidden_layers` is 1000000000000, and should lie between 1"),
        ("config text_config 10^400", "plan", "`text_config.num_key_value_heads` is a number of 1329 bits"),
        ("config vocab_size -1", "plan", "`vocab_size` is -1"),
        ("config num_attention_heads 0", "plan", "`num_attention_heads` is 0"),
        (
            "config more layers than files",
            "plan",
            "3 layers (`num_hidden_layers`), and the weight files hold 2",
        ),
        ("embedding of other rows", "plan", "says `vocab_size: 258`, and the embedding in the weight files has 10"),
        ("header shape negative", "plan", "model.safetensors has a broken safetensors header"),
        ("config.json is a pipe", "plan", "config.json is not a regular file"),
        ("tokenizer.json null", "train", "the model's tokenizer cannot be read"),
    ],
)
def test_what_is_said(told: dict[str, dict[str, Any]], name: str, stage: str, words: str) -> None:
    failure = told[name]["failure"]
    assert (failure["failure"], failure["code"]) == ("user", "model_unreadable")
    assert words in failure["message"] and told[name]["stage"] == stage
