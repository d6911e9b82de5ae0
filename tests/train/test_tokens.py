"""Tokenising: cached by content, the same from several processes; a cache that fails costs time, never a job."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from core import caches
from core.data.rows import Numbered, PromptCompletion
from core.spec.axes.rendering import ModelTemplate
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import DataOrder, RunOrder
from core.train.data.cache import ARRAYS, TokenCache, TokenisedRows
from core.train.data.dataset import TokenDataset
from core.train.data.preview import preview
from core.train.data.tokenise.chunks import render_rows
from core.train.data.tokenise.helpers import HelperKilled
from core.train.data.tokenise.whole import dataset_of, render_rows_in_parallel
from core.train.data.truncate import truncate
from core.train.failures import describe
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.trainer import events, notices, pairs, run, weights, write_rows, write_run

TRAINING = {"max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}


def go(folder: Path, cache: Path, model: Path, rows: Path, held: Path, **training: Any) -> Path:
    """A run with that cache."""
    run_dir = write_run(folder, model, rows, held_out=held, training=TRAINING | training, cache_dir=cache)
    assert run(run_dir) == 0, events(run_dir)[-1]
    return run_dir


@pytest.fixture(scope="module")
def first(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that began with an empty cache; beside it its rows and the cache, which tests copy."""
    folder = tmp_path_factory.mktemp("tokens")
    train, held = (write_rows(folder / f"{name}.jsonl", pairs(count)) for name, count in (("train", 20), ("held", 5)))
    return go(folder / "run", folder / "cache", tiny_dir, train, held)


@pytest.fixture
def cached(tmp_path: Path, tiny_dir: Path, first: Path) -> Callable[..., Path]:
    """Starts runs over one cache, as `first` has left it; answers the run folder."""
    shutil.copytree(first.with_name("cache"), tmp_path / "cache")
    train, held = first.with_name("train.jsonl"), first.with_name("held.jsonl")

    def start(name: str, *, rows: Path = train, **training: Any) -> Path:
        return go(tmp_path / name, tmp_path / "cache", tiny_dir, rows, held, **training)

    return start


def entries(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "cache" / "tokens").glob("*/*/about.json"))


def test_the_second_job_reads_no_row(
    tmp_path: Path, first: Path, cached: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(entries(tmp_path)) == 2, "training and held-out rows"
    monkeypatch.setattr("core.train.data.tokens.rows_of", lambda *_: pytest.fail("the rows were read again"))
    second = cached("second")
    assert weights(first) == weights(second)
    a, b = (events(folder, "run_record")[0]["record"]["data"] for folder in (first, second))
    assert a == b
    assert not notices(second)
    third = cached("third", max_length=16, truncation="split")
    assert events(third, "run_record")[0]["record"]["data"]["train"]["pieces"] > 0


def test_a_preview_fills_the_cache_of_the_job(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", pairs(20))
    runs = [
        write_run(tmp_path / name, tiny_dir, rows, training=TRAINING, cache_dir=tmp_path / "cache")
        for name in ("preview", "job", "again")
    ]
    orders = [RunOrder.model_validate_json((folder / ORDER_FILE).read_bytes()) for folder in runs]
    first = preview(orders[0], load_tokenizer(tiny_dir))
    assert len(entries(tmp_path)) == 1
    monkeypatch.setattr("core.train.data.tokens.rows_of", lambda *_: pytest.fail("the rows were read again"))
    assert run(runs[1]) == 0, events(runs[1])[-1]
    record = events(runs[1], "run_record")[0]["record"]["data"]["train"]
    assert (record["rows"], record["tokens"]) == (first["rows"]["used"], first["epoch"]["tokens"])
    assert preview(orders[2], load_tokenizer(tiny_dir)) == first
    assert caches.make_room(tmp_path / "cache", 0), "after the run nobody holds it any more"


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("row", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}, CHAT], ids=["pair", "fault"])
def test_what_cannot_be_rendered_is_not_kept(tmp_path: Path, tiny_dir: Path, row: dict[str, Any]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    folder = write_run(tmp_path / "preview", tiny_dir, rows, training=TRAINING, cache_dir=tmp_path / "cache")
    tokenizer = load_tokenizer(tiny_dir)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    found = preview(RunOrder.model_validate_json((folder / ORDER_FILE).read_bytes()), tokenizer)
    assert found["ok"] == ("chosen" in row), found
    assert bool(list((tmp_path / "cache").glob("tokens/*/*"))) == ("chosen" in row)  # another stage learns from pairs


def test_a_mixture_in_the_run_record_and_on_the_card(tmp_path: Path, tiny_dir: Path) -> None:
    files = [write_rows(tmp_path / f"{name}.jsonl", pairs(8)) for name in "ab"]
    sources = [{"source": str(path), "weight": weight} for path, weight in zip(files, (3, 1), strict=True)]
    folder = write_run(
        tmp_path / "run",
        tiny_dir,
        files[0],
        data={"train": {"type": "mixture", "sources": sources}},
        training=TRAINING,
        batching={"type": "packed", "tokens_per_batch": 96},
    )
    assert run(folder) == 0, events(folder)[-1]
    (record,) = events(folder, "run_record")
    assert [one["weight"] for one in record["record"]["data"]["train"]["sources"]] == [3, 1]
    card = (folder / "artifacts" / "adapter" / "README.md").read_text()
    assert ", weight 3, SHA-256 `" in card and ", weight 1 |" in card and "at most 96 tokens, packed," in card


def test_rows_in_use_are_held(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", pairs(3))
    dataset = TokenDataset(
        np.arange(8, dtype=np.int32), np.ones(8, dtype=np.bool_), np.array([0, 4]), np.array([4, 8]), np.array([1, 2])
    )
    store = TokenCache(tmp_path / "cache")
    kept = store.keep(store.source_key(DataOrder.of(path)), "how", TokenisedRows(dataset, "text", 0, 2))
    used, _ = truncate(kept.dataset, 3, "cut_right")
    del kept
    assert caches.make_room(tmp_path / "cache", 0) == []
    assert used[1][0].tolist() == [4, 5, 6]
    del used
    gc.collect()
    assert len(caches.make_room(tmp_path / "cache", 0)) == 1


def test_other_rows_and_other_rendering_are_other_entries(tmp_path: Path, cached: Callable[..., Path]) -> None:
    rows = write_rows(tmp_path / "train.jsonl", pairs(21))
    cached("second", rows=rows)
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize("ways", [("bytes", "version"), ("cut off", "no list")], ids=" and ".join)
def test_a_bad_entry_is_made_anew_and_told(
    tmp_path: Path, first: Path, cached: Callable[..., Path], ways: tuple[str, str]
) -> None:
    """Entries of training and of held-out rows are one to the cache: each is bad in a way of its own."""
    for folder, how in zip(entries(tmp_path), ways, strict=True):
        about = folder / "about.json"
        match how:
            case "bytes":
                content = bytearray((folder / "ids").read_bytes())
                content[len(content) // 2] ^= 1
                (folder / "ids").write_bytes(content)
            case "version":
                about.write_text(json.dumps(json.loads(about.read_text()) | {"version": 0}))
            case "cut off":
                os.truncate(folder / "learned", 3)
            case _:
                about.unlink()
    second = cached("second")
    told = notices(second)
    assert {notice["code"] for notice in told} == {"token_cache"} and len(told) == 2
    assert all("made anew" in notice["message"] for notice in told)
    assert weights(first) == weights(second)
    assert not notices(cached("third"))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, cached: Callable[..., Path]) -> None:
    shutil.rmtree(tmp_path / "cache" / "tokens")
    (tmp_path / "cache" / "tokens").write_text("a file where the folder should be")
    run_dir = cached("run")
    assert "could not be kept" in notices(run_dir)[0]["message"]


def _store(cache: str, path: str, barrier: Any) -> None:
    ids = np.arange(1000, dtype=np.int32)
    ends = np.arange(10, 1001, 10)
    dataset = TokenDataset(ids, np.ones(1000, dtype=np.bool_), ends - 10, ends, np.arange(100))
    store = TokenCache(Path(cache))
    source = store.source_key(DataOrder.of(Path(path)))
    barrier.wait(250)
    for number in range(20):
        kept = store.keep(source, f"fingerprint {number}", TokenisedRows(dataset, "text", 0, 100))
        assert kept.dataset.ids.tolist() == ids.tolist()
    assert not store.faults, store.faults


def test_processes_that_make_the_same_entries_at_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", pairs(3))
    context = multiprocessing.get_context("fork")  # the cache is without torch
    barrier = context.Barrier(2)
    both = [context.Process(target=_store, args=(str(tmp_path / "cache"), str(path), barrier)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(entries(tmp_path)) == 20
    store = TokenCache(tmp_path / "cache")
    source = store.source_key(DataOrder.of(path))
    assert all(store.load(source, f"fingerprint {number}") for number in range(20)) and not store.faults
    shutil.rmtree(tmp_path / "cache")
    assert store.load(source, "fingerprint 0") is None


def test_several_processes_give_the_same_tokens(tiny_dir: Path) -> None:
    rows = [Numbered(n + 1, PromptCompletion(row["prompt"], row["completion"])) for n, row in enumerate(pairs(1200))]
    options = RenderOptions("completions", ModelTemplate())
    alone = render_rows(rows, Renderer(load_tokenizer(tiny_dir), options))
    told: list[int] = []
    together = render_rows_in_parallel(iter(rows), options, tiny_dir, 2, told.append)
    for name in ARRAYS:
        assert np.array_equal(getattr(dataset_of(alone), name), getattr(dataset_of(together), name)), name
    assert (alone.cut_prompts, alone.rows) == (together.cut_prompts, together.rows)
    assert told == sorted(told) and told[-1] > 0


def test_no_tokenizer_of_transformers_needs_torch() -> None:
    """A process that makes tokens of rows hides torch from it: what it may import there has to ask for torch first."""
    folder = Path(transformers.__file__).parent
    names = ("models/*/tokenization_*.py", "models/*/configuration_*.py", "tokenization_*.py", "configuration_utils.py")
    modules = [path for name in names for path in folder.glob(name)]
    needing = [path for path in modules if re.search(r"^(import|from) torch\b", path.read_text(encoding="utf-8"), re.M)]
    assert len(modules) > 500 and not needing


def test_a_helper_that_the_kernel_kills_is_told_as_want_of_memory(tiny_dir: Path) -> None:
    rows = (Numbered(n + 1, PromptCompletion(f"count to {n}", " x")) for n in itertools.count())
    killed: list[int] = []

    def between(done: int) -> None:
        if done > 0 and not killed:
            child = multiprocessing.active_children()[0]
            assert child.pid is not None
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(HelperKilled) as caught:
        render_rows_in_parallel(rows, RenderOptions("completions", ModelTemplate()), tiny_dir, 1, between)
    told = describe(caught.value, "loading")
    assert (told["failure"], told["code"], told["field"]) == ("memory", "host_out_of_memory", None)
    assert "SIGKILL" in told["message"] and "memory" in told["message"]


def test_a_fault_in_another_process_is_the_same_fault(tiny_dir: Path) -> None:
    from core.data.rows import Message, Preference
    from core.errors import DataError

    rows = [Numbered(n + 1, Preference("x", (Message("assistant", "y"),), "z")) for n in range(600)]
    with pytest.raises(DataError, match="all messages, or all plain text"):
        render_rows_in_parallel(rows, RenderOptions("completions", ModelTemplate()), tiny_dir, 1, lambda _: None)
