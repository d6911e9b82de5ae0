"""Rows of pairs and labels that a training job cannot use: each is told with its file, its place and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.spec.load import parse_job
from core.spec.resolve import resolve
from tests.support.trainer import chats, events, notices, run, write_rows, write_run

PAIR = {"prompt": "count to 3:", "chosen": " one two three", "rejected": " no"}
GOOD = {"prompt": "count to 3:", "completion": " one two three", "label": True}
LONG = {**PAIR, "prompt": "count " * 30}


def trained(tmp_path: Path, model: Path, rows: list[Any], stage: str, **training: Any) -> Path:
    folder = write_run(
        tmp_path / "run",
        model,
        write_rows(tmp_path / "rows.jsonl", rows),
        stage=stage,
        method={"type": "lora", "r": 4},
        training={"num_train_epochs": 1, "max_length": 64, "precision": "fp32"} | training,
    )
    run(folder)
    return folder


@pytest.mark.parametrize(
    ("stage", "rows", "code", "field", "words"),
    [
        ("kto", [GOOD] * 3, "one_class", "data.train", "all 3 rows have the label true"),
        ("kto", [GOOD, {**GOOD, "label": "bad"}], "invalid_data", "line 2: label", "rows.jsonl: line 2: label: "),
        ("dpo", [PAIR, {**PAIR, "rejected": PAIR["chosen"]}], "invalid_data", "line 2: rejected", "or remove the row"),
        ("dpo", chats(3), "invalid_data", "data.train", "`stage: dpo` learns from preference"),
        ("sft", [PAIR], "invalid_data", "data.train", "format preference, and `stage: sft` learns from messages"),
        ("dpo", [LONG] * 2, "invalid_data", "training.max_length", "the longest row (line 1) has"),
        ("kto", [PAIR] * 2, "invalid_data", "lines 1 to 2: completion", "rows.jsonl: lines 1 to 2: completion"),
        ("process_reward", [PAIR] * 2, "invalid_data", "data.train", "`stage: process_reward` learns from stepwise"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    tmp_path: Path, tiny_dir: Path, stage: str, rows: list[Any], code: str, field: str, words: str
) -> None:
    folder = trained(tmp_path, tiny_dir, rows, stage)
    (error,) = events(folder, "error")
    assert (error["code"], error["field"]) == (code, field), error["message"]
    assert words in error["message"]


def test_a_pair_whose_prompt_fills_the_length_is_left_out_whole(tmp_path: Path, tiny_dir: Path) -> None:
    folder = trained(tmp_path, tiny_dir, [PAIR, LONG, PAIR, {**PAIR, "rejected": " no" * 40}], "dpo")
    (told,) = [notice for notice in notices(folder) if notice["code"] == "rows_truncated"]
    assert "2 training rows are longer than max_length = 64 tokens" in told["message"]
    assert "1 of them had nothing left to learn" in told["message"]
    (record,) = events(folder, "run_record")
    assert record["record"]["data"]["train"]["rows"] == 3


def test_the_stage_says_that_rows_have_a_judgement() -> None:
    source = {"type": "path", "path": "/data/rows.jsonl"}
    job = {"model": "a/b", "stage": "kto", "data": {"train": [source, {**source, "format": "prompt_completion"}]}}
    spec = resolve(parse_job(job))
    assert [one.source.format for one in spec.data.train.sources] == ["kto", "prompt_completion"]  # type: ignore[union-attr]
    assert resolve(spec) == spec
