"""Models from a hub: the real huggingface_hub against a real HTTP server that speaks the part of the hub it uses."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from core.errors import EftError, ModelError, NoSpace
from core.spec.axes.model import GGUFModel, HubModel
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_FENCED, EXIT_OK
from core.spec.run.orders import PrepareOrder
from core.train.hub import download
from core.train.prepare.models import Prepared, prepare_model, prepare_tokenizer
from tests.support.hub import COMMIT, FIRST, SECOND, SHARDS, Hub, safetensors, serving, tiny_model
from tests.support.tiny_gguf import write_gguf

TOKEN = "hf_TheWorkersOwnSecret"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as state:
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield state


MODEL = HubModel(id="team/tiny")


def prepare(models: Path, model: HubModel | GGUFModel = MODEL, *, offline: bool = False) -> Prepared:
    return prepare_model(model, models, [], offline, lambda phase, done, total: None)


def entries(models: Path) -> list[Path]:
    return sorted(models.glob("hub/*/*")) + sorted(models.glob("gguf/*"))


class Child:
    """`python -m core.train.entry.prepare` as a worker starts it."""

    def __init__(self, folder: Path, models: Path, server: Hub, **order: Any) -> None:
        folder.mkdir()
        self.folder = folder
        values: dict[str, Any] = {
            "job_id": "job",
            "attempt": 1,
            "model": MODEL,
            "models_dir": str(models),
            "fence_seconds": 600.0,
        }
        (folder / "run.json").write_text(PrepareOrder(**(values | order)).model_dump_json())
        environment = {"PATH": os.environ["PATH"], "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HOME": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core.train.entry.prepare", str(folder)],
            stdin=subprocess.PIPE,
            stdout=(folder / "log.txt").open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def ends(self) -> int:
        try:
            return self.process.wait(200)
        finally:
            if self.process.stdin is not None:
                self.process.stdin.close()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


def test_download_takes_what_is_needed_and_nothing_else(tmp_path: Path, server: Hub) -> None:
    told: list[tuple[str, int, int | None]] = []
    prepared = prepare_model(MODEL, tmp_path, [], False, lambda *told_now: told.append(told_now))
    assert {path.name for path in prepared.model_dir.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json", *SHARDS,
    }  # fmt: skip
    assert all((prepared.model_dir / path.name).read_bytes() == server.files[path.name]
               for path in prepared.model_dir.iterdir())  # fmt: skip
    assert not server.asked("pytorch_model.bin") and not server.asked("consolidated.safetensors")
    assert prepared.parameters == 256_000 and prepared.summary["dtypes"] == {"F32": 256_000}
    assert prepared.source == {"type": "hub", "id": "team/tiny", "revision": "main", "commit": COMMIT}
    done = [count for _, count, _ in told]
    total = sum(path.stat().st_size for path in prepared.model_dir.iterdir())
    assert {phase for phase, _, _ in told} == {"downloading"}
    assert done == sorted(done) and told[-1] == ("downloading", total, total)
    manifest = json.loads((prepared.model_dir.parent / "manifest.json").read_text())
    assert {file["path"]: file["sha256"] for file in manifest["files"]} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in prepared.model_dir.iterdir()
    }
    assert list((tmp_path / ".partial").iterdir()) == []


def test_what_is_there_is_not_asked_for_again(tmp_path: Path, server: Hub) -> None:
    first = prepare(tmp_path)
    server.seen.clear()
    assert prepare(tmp_path).model_dir == first.model_dir
    assert server.seen == ["GET /api/models/team/tiny/revision/main"]  # a branch may have moved
    server.seen.clear()
    pinned = HubModel(id="team/tiny", revision=COMMIT)
    assert prepare(tmp_path, pinned).model_dir == first.model_dir
    assert prepare(tmp_path, offline=True).source["commit"] == COMMIT
    assert server.seen == []


def test_a_preview_needs_no_weights(tmp_path: Path, server: Hub) -> None:
    def tokenizer(revision: str = "main", *, offline: bool = False) -> Prepared:
        model = HubModel(id="team/tiny", revision=revision)
        return prepare_tokenizer(model, tmp_path, [], offline, lambda phase, done, total: None)

    with pytest.raises(ModelError, match="works offline"):
        tokenizer(offline=True)
    light = tokenizer()
    assert {path.name for path in light.model_dir.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert not any(server.asked(name) for name in SHARDS) and light.source["commit"] == COMMIT
    server.seen.clear()
    assert tokenizer(COMMIT).model_dir == tokenizer(offline=True).model_dir == light.model_dir
    assert server.seen == []
    whole = prepare(tmp_path)  # half a model is not taken for one
    assert whole.model_dir != light.model_dir and all((whole.model_dir / name).is_file() for name in SHARDS)
    assert tokenizer(COMMIT).model_dir == tokenizer(offline=True).model_dir == whole.model_dir


def test_a_moved_branch_is_another_model(tmp_path: Path, server: Hub) -> None:
    first = prepare(tmp_path)
    server.commit = "b" * 40
    assert prepare(tmp_path).model_dir != first.model_dir
    assert first.model_dir.exists()


def test_offline_says_what_is_missing(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="works offline") as caught:
        prepare(tmp_path, offline=True)
    assert caught.value.code == "model_not_cached" and caught.value.field == "model.id"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="works offline"):
        prepare(tmp_path)
    assert server.seen == []


def test_a_dropped_connection_goes_on_where_it_was(tmp_path: Path, server: Hub) -> None:
    server.files[SECOND] = safetensors({"lm_head.weight": (60_000, 128)})  # huggingface_hub writes 10 MB at a time
    server.cut[SECOND] = 15_000_000
    prepared = prepare(tmp_path)
    assert (prepared.model_dir / SECOND).read_bytes() == server.files[SECOND]
    assert server.asked(SECOND)[-1].split()[-1] == "bytes=10485760-"


@pytest.mark.parametrize("how", ["kill", "terminate", "fence"])
def test_a_download_that_is_ended_half_way(tmp_path: Path, server: Hub, how: str) -> None:
    models = tmp_path / "models"
    server.trickle = SECOND
    child = Child(tmp_path / "1", models, server)
    assert server.flowing.wait(150)
    match how:
        case "kill":
            child.process.kill()
            assert child.ends() == -signal.SIGKILL
        case "terminate":
            child.process.terminate()
            assert child.ends() == EXIT_CHECKPOINTED
        case _:
            assert child.process.stdin is not None
            child.process.stdin.close()
            assert child.ends() == EXIT_FENCED
    assert entries(models) == []
    with pytest.raises(ModelError, match="works offline"):
        prepare(models, offline=True)

    server.trickle = None
    server.seen.clear()
    again = Child(tmp_path / "2", models, server)
    assert again.ends() == EXIT_OK, again.log
    assert not server.asked(FIRST)  # complete before, so not fetched again
    assert len(entries(models)) == 1 and list(models.rglob("*.incomplete")) == []
    result = again.events[-1]["result"]
    assert (Path(result["model_dir"]) / SECOND).read_bytes() == server.files[SECOND]


def test_child_speaks_the_contract_and_keeps_the_token(tmp_path: Path, server: Hub) -> None:
    server.secret = TOKEN
    child = Child(tmp_path / "1", tmp_path / "models", server)
    assert child.ends() == EXIT_OK, child.log
    events = child.events
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "phase" and events[0]["phase"] == "downloading"
    assert events[-2]["type"] == "progress" and events[-2]["bytes"] == events[-2]["total_bytes"]
    assert events[-1]["type"] == "result" and events[-1]["artifacts"] == []
    assert events[-1]["result"]["parameters"] == 256_000
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    assert list((tmp_path / "1").iterdir()) != [] and not (tmp_path / "1" / ".cache").exists()


def test_children_at_once_download_once(tmp_path: Path, server: Hub) -> None:
    models = tmp_path / "models"
    server.trickle = SECOND
    children = [Child(tmp_path / str(number), models, server) for number in range(2)]
    assert server.flowing.wait(150)
    waiting = time.monotonic() + 150
    while not any(
        "waiting" in json.dumps(child.events) for child in children if (child.folder / "events.jsonl").exists()
    ):
        assert time.monotonic() < waiting
        time.sleep(0.05)
    server.trickle = None
    assert [child.ends() for child in children] == [EXIT_OK, EXIT_OK]
    assert len([line for line in server.asked(FIRST) if line.startswith("GET")]) == 1
    assert len({child.events[-1]["result"]["model_dir"] for child in children}) == 1


def gguf_files(folder: Path, server: Hub, *, stated: bool) -> GGUFModel:
    data = write_gguf(folder / "made.gguf", gguf.GGMLQuantizationType.F16).read_bytes()
    server.files = {"tiny.F16.gguf": data, "tiny.Q8_0.gguf": b"not asked for", "README.md": b""}
    if stated:
        server.sha256["tiny.F16.gguf"] = hashlib.sha256(data).hexdigest()
    return GGUFModel(id="team/tiny", file="tiny.F16.gguf")


@pytest.mark.parametrize("stated", [True, False], ids=["lfs", "no-lfs"])
def test_a_gguf_file_of_a_repository(tmp_path: Path, server: Hub, stated: bool) -> None:
    model = gguf_files(tmp_path, server, stated=stated)
    models = tmp_path / "models"
    prepared = prepare(models, model)
    assert prepared.source["sha256"] == hashlib.sha256(server.files["tiny.F16.gguf"]).hexdigest()
    assert {key: prepared.source[key] for key in ("type", "id", "file", "commit", "dtype")} == {
        "type": "gguf", "id": "team/tiny", "file": "tiny.F16.gguf", "commit": COMMIT, "dtype": "float16",
    }  # fmt: skip
    assert list(models.rglob("*.gguf")) == [] and list((models / ".partial").iterdir()) == []
    server.seen.clear()
    assert prepare(models, model) == prepared  # without the file a second time, whether or not the hub states its hash
    assert prepare(models, model, offline=True) == prepared
    assert server.seen == ["GET /api/models/team/tiny/revision/main"]


def test_a_gguf_file_offline_or_damaged(tmp_path: Path, server: Hub) -> None:
    model = gguf_files(tmp_path, server, stated=True)
    models = tmp_path / "models"
    with pytest.raises(ModelError, match="works offline"):
        prepare(models, model, offline=True)
    server.files["tiny.F16.gguf"] = server.files["tiny.F16.gguf"][:-1] + b"x"
    with pytest.raises(download.HubUnreachable, match="arrived damaged"):
        prepare(models, model)
    server.files["tiny.F16.gguf"] = b"no such thing as a model"
    server.sha256.clear()
    with pytest.raises(ModelError, match="not a GGUF file") as caught:
        prepare(models, model)
    assert caught.value.field == "model.file"
    assert entries(models) == [] and list((models / ".partial").iterdir()) == []


def test_a_hub_that_is_down_may_be_tried_again(tmp_path: Path, server: Hub) -> None:
    server.broken = True
    child = Child(tmp_path / "1", tmp_path / "models", server)
    assert child.ends() == EXIT_FAILED
    error = child.events[-1]
    assert error["type"] == "error" and error["failure"] == "machine" and error["code"] == "hub_unreachable"
    assert "503" in error["message"]
    assert "Traceback" not in child.log and f"error hub_unreachable (machine): {error['message']}" in child.log


def test_no_hub_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        download.HubUnreachable, match=r"cannot be reached.*HF_ENDPOINT.*EFT_OFFLINE=true.*EFT_MODEL_ROOTS"
    ):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("model", "code", "named"),
    [
        (HubModel(id="team/nothing"), "model_not_found", "model.id"),
        (HubModel(id="team/tiny", revision="v9"), "model_revision_not_found", "model.revision"),
        (GGUFModel(id="team/tiny", file="model.gguf"), "model_not_found", "model.file"),
    ],
)
def test_what_is_not_there(tmp_path: Path, server: Hub, model: HubModel | GGUFModel, code: str, named: str) -> None:
    with pytest.raises(ModelError) as caught:
        prepare(tmp_path, model)
    assert (caught.value.code, caught.value.field) == (code, named)


def test_a_wrong_commit_is_a_wrong_revision(tmp_path: Path, server: Hub) -> None:
    with pytest.raises(ModelError) as caught:
        prepare(tmp_path, HubModel(id="team/tiny", revision="c" * 40))
    assert caught.value.code == "model_revision_not_found"


def test_gated_and_private(tmp_path: Path, server: Hub) -> None:
    server.gated = True
    with pytest.raises(ModelError, match="accept its conditions") as caught:
        prepare(tmp_path)
    assert caught.value.code == "model_gated"
    server.gated, server.secret = False, TOKEN
    with pytest.raises(ModelError, match="HF_TOKEN") as caught:
        prepare(tmp_path)
    assert caught.value.code == "model_not_found"


def config(**more: Any) -> bytes:
    return json.dumps({"model_type": "llama"} | more).encode()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({SHARDS[0]: None, SHARDS[1]: None, "model.safetensors.index.json": None, "consolidated.safetensors": None},
         "model_pickle"),
        ({"config.json": config(model_type="evil", auto_map={"AutoModel": "modeling_evil.Evil"})}, "model_needs_code"),
        ({"config.json": config(model_type="clip")}, "model_unsupported"),
        ({"config.json": config(quantization_config={"quant_method": "gptq"})}, "model_quantized"),
        ({"config.json": None}, "model_unreadable"),
        ({"config.json": b"{"}, "model_unreadable"),
        ({"tokenizer.json": None}, "model_unreadable"),
        ({SHARDS[1]: None}, "model_unreadable"),
        ({"model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()},
         "model_unreadable"),
        ({SHARDS[1]: tiny_model()[SHARDS[1]][:-1]}, "model_unreadable"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, server: Hub, change: dict[str, bytes | None], code: str) -> None:
    for name, data in change.items():
        if data is None:
            server.files.pop(name)
        else:
            server.files[name] = data
    with pytest.raises(ModelError) as caught:
        prepare(tmp_path)
    assert caught.value.code == code and caught.value.field == "model.id"
    assert entries(tmp_path) == []
    if SHARDS[1] not in change:
        assert not [line for line in server.asked(SECOND) if line.startswith("GET")]  # refused before 15 GB come


def test_code_in_the_repository_does_not_matter_where_transformers_has_the_class(tmp_path: Path, server: Hub) -> None:
    server.files["config.json"] = config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    prepare(tmp_path)
    assert not server.asked("modeling_evil.py")


def test_damage_on_the_way_is_noticed_and_healed(tmp_path: Path, server: Hub) -> None:
    server.sha256[SECOND] = hashlib.sha256(b"what the hub has").hexdigest()
    with pytest.raises(download.HubUnreachable, match="arrived damaged"):
        prepare(tmp_path)
    assert entries(tmp_path) == []
    server.sha256[SECOND] = hashlib.sha256(server.files[SECOND]).hexdigest()
    prepare(tmp_path)


def test_an_entry_that_lost_a_file_is_made_anew(tmp_path: Path, server: Hub) -> None:
    first = prepare(tmp_path)
    (first.model_dir / SECOND).unlink()
    with pytest.raises(ModelError, match="works offline"):
        prepare(tmp_path, offline=True)
    assert (prepare(tmp_path).model_dir / SECOND).exists()
    assert list((tmp_path / ".partial").iterdir()) == []


def test_no_room(tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MARGIN", 1e15)  # a disk too small for this model
    with pytest.raises(NoSpace, match="GB left"):
        prepare(tmp_path)
    assert entries(tmp_path) == []


def test_old_work_in_progress_is_thrown_away(tmp_path: Path, server: Hub) -> None:
    prepare(tmp_path)
    old, held, new = (tmp_path / ".partial" / name for name in ("old", "held", "new"))
    for work in (old, held, new):
        work.mkdir()
        (work / "half").write_bytes(b"x")
    for work in (old, held):
        for path in (work / "half", work):
            os.utime(path, (0, 0))
    holder = subprocess.Popen(["flock", str(tmp_path / ".locks/held.lock"), "sleep", "600"])
    try:
        while subprocess.run(["flock", "-n", str(tmp_path / ".locks/held.lock"), "true"]).returncode == 0:
            time.sleep(0.02)
        prepare(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    assert not old.exists() and held.exists() and new.exists()


def test_errors_are_for_users() -> None:
    assert issubclass(download.HubUnreachable, EftError)
