"""Continued pre-training: documents apart or joined, every token learned once, packed and streamed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from core.errors import DataError, SpecError
from core.spec.axes.batching import Packed
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.train import recipe
from core.train.data.dataset import TokenDataset
from core.train.data.order import PackedOrder, digest
from core.train.data.reader import refuse_rows
from core.train.data.truncate import fitted
from tests.support.trainer import events, write_rows, write_run

LENGTHS = (9, 1, 30, 17)


def job(**axes: Any) -> JobSpec:
    return resolve(parse_job({"model": "a/b", "data": "/rows.jsonl", "stage": "cpt", **axes}))


def documents() -> TokenDataset:
    """Documents of these lengths whose tokens count up, as the renderer marks them."""
    ends = np.cumsum(LENGTHS)
    starts = ends - np.array(LENGTHS)
    learned = np.ones(ends[-1], dtype=np.bool_)
    learned[starts] = False
    return TokenDataset(np.arange(ends[-1], dtype=np.int32), learned, starts, ends, np.array([1, 2, 3, 5]))


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"document {n} says: " + "word " * (5 * n % 40)} for n in range(count)]


def test_the_defaults_are_those_of_pre_training_unless_the_job_says_otherwise() -> None:
    spec = job()
    assert isinstance(spec.batching, Packed)
    assert (spec.training.truncation, spec.training.num_train_epochs) == ("split", 1.0)
    assert resolve(spec) == spec == resolve(JobSpec.model_validate(spec.model_dump(mode="json")))
    said = job(batching="rows", training={"truncation": "cut_left", "num_train_epochs": 3})
    assert (said.batching.type, said.training.truncation, said.training.num_train_epochs) == ("rows", "cut_left", 3.0)
    sft = resolve(parse_job({"model": "a/b", "data": "/rows.jsonl"}))
    assert (sft.batching.type, sft.training.truncation) == ("rows", "cut_right")


def test_rows_with_answers_are_refused() -> None:
    with pytest.raises(DataError, match="`stage: cpt` learns from text"):
        refuse_rows(job().stage, "messages")


def test_joined_documents_are_always_split() -> None:
    across = {"type": "cpt", "across": True}
    assert job(stage=across).training.truncation == "split"
    with pytest.raises(SpecError, match="joins all documents"):
        job(stage=across, training={"truncation": "cut_left"})


def learned(used: TokenDataset) -> list[int]:
    return [int(ids[at]) for ids, marks in map(used.__getitem__, range(len(used))) for at in np.flatnonzero(marks)]


def test_documents_apart_are_split_and_each_of_their_tokens_is_learned_once() -> None:
    used, report = fitted(job(training={"max_length": 8}), documents())
    first = set(np.cumsum(LENGTHS) - np.array(LENGTHS))
    assert learned(used) == [token for token in range(sum(LENGTHS)) if token not in first]
    assert (max(used.lengths), report.truncated, report.dropped) == (8, 3, 1)
    whole = documents()
    for start, end in zip(used.starts, used.ends, strict=True):
        at = np.searchsorted(whole.starts, start, side="right") - 1
        assert end <= whole.ends[at], "no row has tokens of two documents"


def test_joined_documents_fill_every_row_and_learn_the_beginnings_too() -> None:
    used, report = fitted(job(stage={"type": "cpt", "across": True}, training={"max_length": 8}), documents())
    assert learned(used) == list(range(1, sum(LENGTHS)))
    assert list(used.lengths[:-1]) == [8] * (len(used) - 1)
    assert used.lines.tolist() == [1, 1, 3, 3, 3, 3, 5, 5]
    assert (report.label_tokens, report.longest) == (sum(LENGTHS) - 1, 30)


@pytest.mark.parametrize("axes", [{"stage": "cpt"}, {"stage": {"type": "cpt", "across": True}}])
def test_a_run_is_packed_and_reports_perplexity_and_tokens(
    tmp_path: Path, tiny_dir: Path, axes: dict[str, Any]
) -> None:
    train, held_out = (write_rows(tmp_path / f"{name}.jsonl", rows(count)) for name, count in (("a", 8), ("b", 2)))
    training = {"max_length": 32}
    batching = {"type": "packed", "tokens_per_batch": 4096}
    found = {}
    for streaming in (False, True):
        data = {"train": str(train), "eval": str(held_out), "streaming": streaming}
        more = {"max_steps": 1} if streaming else {}
        run = write_run(tmp_path / f"run{streaming}", tiny_dir, train, **axes, batching=batching, data=data,
                        training=training | more)  # fmt: skip
        assert recipe.run(run) == 0, events(run)[-1]
        found[streaming] = [event["values"] for event in events(run, "metrics")]
    metrics = found[False]
    assert [one["perplexity"] for one in metrics] == [math.exp(one["loss"]) for one in metrics]
    (record,) = (event["record"] for event in events(tmp_path / "runFalse", "run_record"))
    assert metrics[-1]["total_tokens"] == record["data"]["train"]["tokens"]
    assert record["data"]["loss_on"] == "all"
    (_, evaluation) = (event["values"] for event in events(tmp_path / "runFalse", "evaluation"))
    assert evaluation == {
        "eval_loss": evaluation["eval_loss"],
        "eval_perplexity": math.exp(evaluation["eval_loss"]),
    }
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    whole = sum(len(tokenizer(row["text"]).input_ids) + 1 for row in rows(8))
    joined = isinstance(axes["stage"], dict)
    assert record["data"]["train"]["label_tokens"] == whole - (1 if joined else 8)
    assert "Continued pre-training" in (tmp_path / "runFalse/artifacts/adapter/README.md").read_text()


def test_a_corpus_is_kept_in_arrays_and_its_lengths_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = documents().lengths
    assert lengths.itemsize == 8
    order = PackedOrder(lengths, batch_size=32, accumulation=1, seed=0)
    assert order.state_dict()["lengths"] == digest(list(lengths)) == digest(lengths)
    monkeypatch.setattr("core.train.data.order.digest", lambda lengths: "again")
    assert order.state_dict()["lengths"] != "again"
    assert sorted(row for step in order.plan(0) for row in step) == [0, 1, 2, 3]
