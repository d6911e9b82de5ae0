"""Data sets from a hub: the real huggingface_hub against a real server; nothing about their files is guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.data.stream import RowStream
from core.errors import DataError, EftError
from core.spec.axes.data import Data, HubDataset
from core.spec.files import data_orders
from core.train.hub.datasets import choose, prepare_dataset
from core.train.hub.model_cache import ModelCache
from tests.support.hub import COMMIT, Hub, serving


def rows(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"q": f"q{n}", "a": f"a{n}"}).encode() + b"\n" for n in range(first, first + count))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as state:
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        state.repo, state.kind = "team/sums", "dataset"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"q": ["q5"], "a": ["a5"]}), sink)
        state.files = {
            "README.md": b"# never read",
            "main/train-00000-of-00002.jsonl": rows(0, 5),
            "main/train-00001-of-00002.parquet": sink.getvalue().to_pybytes(),
            "main/test.jsonl": rows(90, 2),
            "loader.py": b"raise SystemExit('code of the data set ran')",
        }
        yield state


SOURCE = HubDataset(id="team/sums", columns={"prompt": "q", "completion": "a"})


def prepare(models: Path, source: HubDataset = SOURCE, *, offline: bool = False) -> tuple[list[Path], dict[str, Any]]:
    cache = ModelCache(models)
    return prepare_dataset(source, "data.train", cache, offline, lambda phase, done, total: None)


def test_rows_come_from_every_file_of_the_split_pinned_and_cached(server: Hub, tmp_path: Path) -> None:
    paths, origin = prepare(tmp_path)
    assert (origin["commit"], origin["files"]) == (COMMIT, [name for name in server.files if "train" in name])
    assert not server.asked("loader.py") and not server.asked("test.jsonl")
    order, _ = data_orders(Data(train=SOURCE), lambda source, field: (paths, origin))
    found = [numbered.row for _, numbered in RowStream(order).rows()]
    assert [row.prompt for row in found] == [f"q{n}" for n in range(6)]  # type: ignore[union-attr]
    assert prepare(tmp_path, offline=True) == (paths, origin)
    pinned = SOURCE.model_copy(update={"revision": COMMIT})
    assert prepare(tmp_path, pinned)[0] == paths
    before = len(server.seen)
    assert prepare(tmp_path, pinned)[0] == paths
    assert len(server.seen) == before  # a pinned, cached data set needs no network


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        ({"split": "validation"}, "data.train.split", "no file of the split `validation`"),
        ({"config": "other"}, "data.train.config", "no folder `other`"),
        ({"files": ["train/*.csv"]}, "data.train.files", "no data file `train/*.csv`"),
        ({"revision": "v9"}, "data.train.revision", "no revision v9"),
        ({"id": "team/nothing"}, "data.train.id", "no data set team/nothing"),
    ],
)
def test_what_is_not_there_is_said(server: Hub, tmp_path: Path, wrong: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(EftError) as caught:
        prepare(tmp_path, SOURCE.model_copy(update=wrong))
    assert caught.value.field == field and words in caught.value.message


def test_a_choice_of_subsets_is_the_jobs_to_make() -> None:
    names = ["easy/train.jsonl", "hard/train.jsonl"]
    with pytest.raises(DataError, match="choose one as `config`"):
        choose(SOURCE, names, None, "data.train")
    assert choose(SOURCE.model_copy(update={"config": "hard"}), names, None, "data.train") == names[1:]
    card = [
        {"config_name": "all", "data_files": [{"split": "train", "path": "*/train.jsonl"}]},
        {"config_name": "hard", "data_files": "hard/*.jsonl"},
    ]
    with pytest.raises(DataError, match="several subsets"):
        choose(SOURCE, names, card, "data.train")
    assert choose(SOURCE.model_copy(update={"config": "all"}), names, card, "data.train") == names
    with pytest.raises(DataError, match="no split `test`"):
        choose(SOURCE.model_copy(update={"config": "all", "split": "test"}), names, card, "data.train")
