"""Data sets from a hub: the real huggingface_hub against a real server; nothing about their files is guessed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

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


# --- containers that uploads do not have, and slices -----------------------------------------------------


def arrow(rows: dict[str, list[Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table(rows)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def archive(*members: tuple[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return held.getvalue()


WRITTEN: list[tuple[str, bytes, list[dict[str, Any]]]] = [
    ("train.jsonl.gz", gzip.compress(rows(0, 2)), [{"q": "q0", "a": "a0"}, {"q": "q1", "a": "a1"}]),
    ("train.json.bz2", bz2.compress(b'[{"q": "x", "a": "y"}]'), [{"q": "x", "a": "y"}]),
    ("train.csv.xz", lzma.compress(b"q,a\nx,y\n"), [{"q": "x", "a": "y"}]),
    ("train.tsv", b"q\ta\nx, z\ty\n", [{"q": "x, z", "a": "y"}]),
    ("train.txt", b"one\ntwo\n", [{"text": "one"}, {"text": "two"}]),
    ("train.arrow", arrow({"q": ["x"], "a": ["y"]}), [{"q": "x", "a": "y"}]),
    (
        "train.tar",
        archive(
            ("0.json", b'{"q": "x"}'), ("0.txt", b"y"), ("0.pth", b"no tensor"), ("1.json", b'{"q": "z"}'),
            ("1.txt", b"w"), ("1.pth", b"none"),
        ),
        [{"q": "x", "txt": "y"}, {"q": "z", "txt": "w"}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "expected"), WRITTEN, ids=[name for name, _, _ in WRITTEN])
def test_other_containers(server: Hub, tmp_path: Path, name: str, data: bytes, expected: list[dict[str, Any]]) -> None:
    server.files = {name: data, "load.py": b"raise SystemExit('code of the data set ran')"}
    (path,), origin = prepare(tmp_path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{key: row[key] for key in row if key in expected[0]} for row in found] == expected
    assert origin["files"] == [name] and not server.asked("load.py")
    assert (
        not {line.split()[1] for line in server.seen}
        - {f"/api/datasets/team/sums/revision/{revision}" for revision in ("main", COMMIT)}
        - {f"/datasets/team/sums/resolve/{COMMIT}/{name}"}
    )
    assert prepare(tmp_path, offline=True)[0] == [path]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:50%]", [0, 1, 2]),
        ("train[4:]", [4, 5]),
        ("train[-1:]", [5]),
        ("test[:1]+train[1:3]", [90, 1, 2]),
        ("test+train[:1]", [90, 91, 0]),
    ],
)
def test_slices(server: Hub, tmp_path: Path, split: str, expected: list[int]) -> None:
    source = SOURCE.model_copy(update={"split": split})
    paths, origin = prepare(tmp_path, source)
    order, _ = data_orders(Data(train=source), lambda source, field: (paths, origin))
    found = [numbered.row for _, numbered in RowStream(order).rows()]
    assert [row.prompt for row in found] == [f"q{n}" for n in expected]  # type: ignore[union-attr]
    assert origin["split"] == split


def test_the_card_says_how_files_are_read(server: Hub, tmp_path: Path) -> None:
    server.files = {"a.csv": b"q;a\nx, y;z\n"}
    server.card = {"configs": [{"config_name": "all", "data_files": "*.csv", "sep": ";"}]}
    (path,), _ = prepare(tmp_path)
    assert json.loads(path.read_text()) == {"q": "x, y", "a": "z"}


@pytest.mark.parametrize(
    ("files", "update", "code", "field"),
    [
        ({"train.jsonl.gz": b"no gzip"}, {}, "dataset_unreadable", "data.train"),
        ({"train.arrow": b"ARROW1 no more"}, {}, "dataset_unreadable", "data.train"),
        ({"train.jsonl": rows(0, 3)}, {"split": "train[:300%]"}, "dataset_not_found", "data.train.split"),
        ({"train.jsonl": rows(0, 3)}, {"split": "train[3:]"}, "dataset_not_found", "data.train.split"),
        ({"train.jsonl": rows(0, 3) + b"{"}, {"split": "train[:2]"}, "invalid_data", "line 4"),
    ],
)
def test_files_that_cannot_be_read(
    server: Hub, tmp_path: Path, files: dict[str, bytes], update: dict[str, Any], code: str, field: str
) -> None:
    server.files = files
    with pytest.raises(EftError) as caught:
        prepare(tmp_path, SOURCE.model_copy(update=update))
    assert (caught.value.code, caught.value.field) == (code, field), caught.value.message


def test_the_notation_of_a_split_is_checked_at_once() -> None:
    for good in ("train", "train[:10%]", "train[-5:]+test[1:2]", "v1.0-dev"):
        assert HubDataset(id="team/sums", split=good).split == good
    for bad in ("train[", "train[a:b]", "train[1]", "train+", "train[:1.5%]", "", "train [:1]"):
        with pytest.raises(ValidationError):
            HubDataset(id="team/sums", split=bad)
