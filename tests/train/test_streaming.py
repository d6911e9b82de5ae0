"""`data.streaming`: rows are read block by block while the run goes on, and a run that left goes on to the bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from core.data.stream import RowStream
from core.errors import DataError, SpecError
from core.spec.load import parse_job
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.spec.run.orders import DataFiles, DataOrder
from core.train.base.stop import Stop
from core.train.data import streaming
from core.train.render.renderer import renderer_of
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.trainer import PLAIN, events, pairs, run, weights, write_rows, write_run


class StopAfter(Stop):
    """Asked to leave once so many events of a kind were written."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir, self.steps = run_dir, steps

    @property  # type: ignore[override]
    def requested(self) -> bool:
        return len(events(self.run_dir, "metrics")) >= self.steps


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 10)


@pytest.mark.parametrize("batching", ["rows", "packed"])
def test_left_between_and_in_blocks(tmp_path: Path, tiny_dir: Path, batching: str) -> None:
    """27 rows in blocks of 10, 10 and 7; the run goes over the end of the file and of a block."""
    train = write_rows(tmp_path / "train.jsonl", pairs(27))
    training = {"max_steps": 12, "per_device_train_batch_size": 3, "max_length": 64, "precision": "fp32"}
    axes: dict[str, Any] = {
        "training": training,
        "data": {"train": str(train), "streaming": True, "rendering": PLAIN},
        "batching": batching if batching == "rows" else {"type": "packed", "tokens_per_batch": 80},
        "method": {"type": "lora", "lora_dropout": 0.1},
    }
    calm = write_run(tmp_path / "calm", tiny_dir, train, **axes)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    attempts: list[Path] = []
    for number in range(20):
        folder = write_run(
            tmp_path / f"attempt-{number}", tiny_dir, train, resume_from=list(reversed(attempts)), **axes
        )
        attempts.append(folder)
        code = run(folder, StopAfter(folder, 3))
        if code == EXIT_OK:
            break
        assert code == EXIT_CHECKPOINTED, events(folder)[-1]
    assert number >= 3
    assert weights(attempts[-1]) == weights(calm)


def test_blocks_made_ahead_are_the_same(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own; and what it began is gone on with by a run that has none."""
    train = write_rows(tmp_path / "train.jsonl", pairs(27))
    axes: dict[str, Any] = {
        "training": {"max_steps": 14, "per_device_train_batch_size": 3, "max_length": 64, "precision": "fp32"},
        "data": {"train": str(train), "streaming": True, "rendering": PLAIN},
    }
    here = write_run(tmp_path / "here", tiny_dir, train, **axes)
    assert run(here) == EXIT_OK, events(here)[-1]
    monkeypatch.setattr(streaming, "AHEAD_SECONDS", 0.0)
    made, kept = tmp_path / "made", streaming.make_block
    monkeypatch.setattr(streaming, "make_block", lambda *about: made.touch() or kept(*about))
    first = write_run(tmp_path / "first", tiny_dir, train, **axes)
    assert run(first, StopAfter(first, 9)) == EXIT_CHECKPOINTED
    assert not made.exists(), "only the helper made blocks behind the first"
    monkeypatch.setattr(streaming, "AHEAD_SECONDS", 1e9)
    second = write_run(tmp_path / "second", tiny_dir, train, resume_from=[first], **axes)
    assert run(second) == EXIT_OK, events(second)[-1]
    assert made.exists()
    assert weights(second) == weights(here)


def test_each_pass_has_every_row_once_in_another_order(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": f"{n}:", "completion": "x"} for n in range(27)])
    job = {"model": str(tiny_dir), "data": {"train": str(train), "streaming": True, "rendering": PLAIN}}
    spec = parse_job(job | {"training": {"max_steps": 50, "per_device_train_batch_size": 4}})
    tokenizer = load_tokenizer(tiny_dir)
    feed = streaming.StreamLoader(
        DataOrder.of(train), spec, lambda found: renderer_of(spec, found, tokenizer), between=lambda: None, notice=print
    )
    passes: dict[float, list[int]] = {}
    for step in range(16):
        for make in feed.batches(step).batches:
            batch = make()
            for row, length in zip(batch.input_ids.tolist(), batch.lengths, strict=True):
                text = tokenizer.decode(row[:length])
                passes.setdefault(feed.epochs_after(step), []).append(int(text.partition(":")[0]))
    assert [Counter(rows) for rows in passes.values()] == [Counter(range(27))] * 2
    first, second = passes.values()
    assert first != second != list(range(27))


def test_a_weighted_mixture_begins_anew_as_a_whole(tmp_path: Path, tiny_dir: Path) -> None:
    """A pass of it ends in the midst of one of its sources; the next one is as long, in blocks as large."""
    rows = [{"prompt": f"{n}:", "completion": "x"} for n in range(12)]
    first, second = write_rows(tmp_path / "a.jsonl", rows[:8]), write_rows(tmp_path / "b.jsonl", rows[8:])
    job = {"model": str(tiny_dir), "data": {"train": str(first), "streaming": True, "rendering": PLAIN}}
    spec = parse_job(job | {"training": {"max_steps": 50, "per_device_train_batch_size": 1}})
    order = DataOrder(sources=[DataFiles(paths=[str(path)], weight=1.0) for path in (first, second)])
    tokenizer = load_tokenizer(tiny_dir)
    feed = streaming.StreamLoader(
        order, spec, lambda found: renderer_of(spec, found, tokenizer), between=lambda: None, notice=print
    )
    seen: dict[float, int] = {}
    for step in range(80):
        rows_here = sum(len(make().lengths) for make in feed.batches(step).batches)
        seen[feed.epochs_after(step)] = seen.get(feed.epochs_after(step), 0) + rows_here
    whole = sum(1 for _ in RowStream(order).rows())
    assert 12 <= whole < 40 and [seen[0.0], seen[1.0]] == [whole, whole]


def test_raw_text_behind_chats_is_refused_as_without_streaming(tmp_path: Path, tiny_dir: Path) -> None:
    """Whichever comes first: raw text is learned as a whole, and a chat behind it would be."""
    text = write_rows(tmp_path / "text.jsonl", [{"text": f"t{n}"} for n in range(12)])
    chat = write_rows(tmp_path / "chat.jsonl", pairs(12))
    spec = parse_job(
        {"model": str(tiny_dir), "data": {"train": str(text), "streaming": True, "rendering": PLAIN}}
        | {"training": {"max_steps": 50, "per_device_train_batch_size": 2}}
    )
    tokenizer = load_tokenizer(tiny_dir)
    for paths in ((text, chat), (chat, text)):
        order = DataOrder(sources=[DataFiles(paths=[str(path)]) for path in paths])
        feed = streaming.StreamLoader(
            order, spec, lambda found: renderer_of(spec, found, tokenizer), between=lambda: None, notice=print
        )
        feed.batches(4)  # the first block has rows of the first source alone
        with pytest.raises(DataError, match="raw text is learned as a whole"):
            feed.batches(5)


@pytest.mark.parametrize(
    ("ahead", "barren"),
    [(False, [4]), (False, [0, 1, 4]), (True, [0, 1, 4])],  # a helper that makes blocks ahead starts slowly: once
    ids=["here, the last block", "here, the first two and the last", "ahead, the first two and the last"],
)
def test_a_block_with_nothing_to_learn_is_skipped(
    tmp_path: Path, tiny_dir: Path, barren: list[int], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of its rows fill max_length. The run goes on, and one that left goes on to the bit."""
    if ahead:
        monkeypatch.setattr(streaming, "AHEAD_SECONDS", 0.0)
    blocks = [pairs(10) for _ in range(4)] + [pairs(3)]
    for number in barren:
        blocks[number] = [{"prompt": "x" * 200, "completion": " yes"}] * len(blocks[number])
    train = write_rows(tmp_path / "train.jsonl", [row for block in blocks for row in block])
    axes: dict[str, Any] = {
        "training": {"max_steps": 22, "per_device_train_batch_size": 5, "max_length": 64, "precision": "fp32"},
        "data": {"train": str(train), "streaming": True},
        "method": {"type": "lora"},
    }
    calm = write_run(tmp_path / "calm", tiny_dir, train, **axes)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    assert len(events(calm, "metrics")) == 22
    (told,) = [event for event in events(calm, "notice") if event["code"] == "block_skipped"]
    assert f"a block of {len(blocks[barren[0]])} streamed rows" in told["message"]
    left = write_run(tmp_path / "left", tiny_dir, train, **axes)
    assert run(left, StopAfter(left, 2 * (5 - len(barren)))) == EXIT_CHECKPOINTED  # at the end of a pass
    again = write_run(tmp_path / "again", tiny_dir, train, resume_from=[left], **axes)
    assert run(again) == EXIT_OK, events(again)[-1]
    assert weights(again) == weights(calm)


def test_a_stream_with_nothing_to_learn_is_refused(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": "x" * (100 + n), "completion": "y"} for n in range(27)])
    axes: dict[str, Any] = {
        "training": {"max_steps": 2, "max_length": 64},
        "data": {"train": str(train), "streaming": True},
    }
    folder = write_run(tmp_path / "run", tiny_dir, train, **axes)
    assert run(folder) == EXIT_FAILED
    error = events(folder)[-1]
    assert (error["type"], error["failure"], error["field"]) == ("error", "user", "training.max_length")
    assert "no row has anything to learn" in error["message"]


def test_it_needs_max_steps(tiny_dir: Path) -> None:
    with pytest.raises(SpecError, match=r"needs `training\.max_steps`"):
        parse_job({"model": str(tiny_dir), "data": {"train": "/rows.jsonl", "streaming": True}})
