"""`POST /models`: models and adapters that were made elsewhere, and what is refused before anything is kept of it.
Training on them is in
tests/service/test_chains.py. The commands are those of docs/models.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError
from core.train.hub.handed_back_files import require_fit
from tests.service.conftest import MODEL, Api
from tests.support.client import eft
from tests.support.uploads import CONFIG, LAYER, adapter_files, safetensors

NAN, INFINITE = float("nan"), float("inf")
TINY_CONFIG = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 8}
WEIGHTS = {
    "model.embed_tokens.weight": ((8, 4), (0.5,) * 32),
    "model.layers.0.self_attn.q_proj.weight": ((4, 4), (0.5,) * 16),
}
TINY = [
    ("config.json", json.dumps(TINY_CONFIG).encode()),
    ("model.safetensors", safetensors(WEIGHTS)),
    ("tokenizer.json", b"{}"),
]
Files = list[tuple[str, bytes]]


def sent(api: Api, files: Files, client: Any = None, **fields: str) -> Any:
    return (client or api.http).post("/models", files=[("file", one) for one in files], data=fields)


def with_file(files: Files, name: str, content: bytes) -> Files:
    return [*((known, data) for known, data in files if known != name), (name, content)]


@pytest.mark.both_databases
def test_an_adapter_is_an_entry_of_the_registry(api: Api) -> None:
    reply = sent(api, adapter_files(), name="From elsewhere")
    assert reply.status_code == 201, reply.text
    found = reply.json()
    assert reply.headers["location"] == f"/models/{found['id']}"
    assert (found["name"], found["kind"], found["stage"], found["method"]) == (
        "From elsewhere", "adapter", "upload", "lora",
    )  # fmt: skip
    assert found["base"]["id"] == MODEL == CONFIG["base_model_name_or_path"] and found["parent"] is None
    files = api.http.get(f"/models/{found['id']}/files").json()["data"]
    contents = {f"adapter/{name}": content for name, content in adapter_files()}
    assert {file["path"] for file in files} == set(contents)
    for file in files:
        assert api.http.get(file["url"]).content == contents[file["path"]]

    # A job continues it by any handle, with what the adapter has.
    data = api.upload(b'{"text": "a"}\n')["id"]
    job = {"model": {"type": "registry", "id": "From elsewhere"}, "data": data}
    spec = api.http.post("/jobs", params={"dry_run": "true"}, json=job).json()["spec"]
    assert (spec["model"]["adapter"], spec["method"]["r"], spec["method"]["lora_alpha"]) == ("continue", 2, 4)
    assert spec["method"]["target_modules"] == ["q_proj"]
    again = api.http.post("/jobs", params={"dry_run": "true"}, json=spec)
    assert again.status_code == 200 and again.json()["spec"] == spec, "a resolved spec is good for another job"
    child = api.submit(model=found["id"])["id"]
    generations = api.http.get(f"/jobs/{child}/lineage").json()["data"]
    assert [one["method"] for one in generations] == ["lora", "lora"]
    refused = api.http.delete(f"/models/{found['id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
    api.http.post(f"/jobs/{child}/cancel")

    reply = api.http.post(f"/models/{found['id']}/exports", json={"export": ["merged"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "export_without_rows")
    for upload in (found["id"].replace("model-", "upload-"), "From elsewhere"):
        assert api.http.get(f"/jobs/{upload}").status_code == 404, "no job"
    assert api.http.delete(f"/models/{found['id']}").json()["freed_bytes"] == found["bytes"]
    assert not list(api.layout.runs.glob("upload-*")) and not list(api.layout.uploads.iterdir())
    assert api.http.get(f"/models/{found['id']}").status_code == 404


def test_a_model_and_an_adapter_over_it(api: Api) -> None:
    whole = sent(api, TINY, name="Whole").json()
    assert (whole["kind"], whole["method"], whole["parent"]) == ("model", "full", None)
    over = sent(api, adapter_files(base_model_name_or_path="/somewhere/else"), base=whole["id"])
    assert over.status_code == 201, over.text
    assert over.json()["parent"] == whole["id"]
    refused = api.http.delete(f"/models/{whole['id']}")
    assert refused.status_code == 409 and f"`{over.json()['id']}` was made from" in refused.json()["error"]["message"]
    reply = sent(api, adapter_files(), base=over.json()["id"])
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "base_is_adapter")
    merged = sent(
        api, adapter_files(), base=json.dumps({"type": "registry", "id": over.json()["id"], "adapter": "merge"})
    )
    assert merged.status_code == 201, merged.text
    for model in (merged, over):
        assert api.http.delete(f"/models/{model.json()['id']}").status_code == 200
    assert api.http.delete(f"/models/{whole['id']}").status_code == 200


BAD: dict[str, tuple[Files, dict[str, str], str, str]] = {
    "a pickle": (with_file(adapter_files(), "adapter_model.bin", b"x"), {}, "model_pickle", "adapter_model.bin"),
    "code": (with_file(TINY, "modeling.py", b"x"), {}, "model_unsupported", "modeling.py"),
    "NaN": (adapter_files((0.5, NAN) * 4), {}, "model_not_finite", f"{LAYER}.lora_A.weight"),
    "infinity": (adapter_files((0.5, -INFINITE) * 4), {}, "model_not_finite", "lora_A"),
    "a path": (with_file(TINY, "../config.json", b"{}"), {}, "invalid_request", "must not contain"),
    "a manifest that leads outside": (
        with_file(TINY, "model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/model.safetensors"}}'),
        {}, "model_unreadable", "../../etc",
    ),
    "a shard that is missing": (
        with_file(TINY, "model.safetensors.index.json", b'{"weight_map": {"a": "model-2.safetensors"}}'),
        {}, "model_unreadable", "model-2.safetensors",
    ),
    "a torn file": (with_file(TINY, "model.safetensors", TINY[1][1][:-4]), {}, "model_unreadable", "bytes long"),
    "sizes that do not belong together": (
        with_file(TINY, "config.json", json.dumps(TINY_CONFIG | {"vocab_size": 9}).encode()),
        {}, "model_unreadable", "vocab_size: 9",
    ),
    "no tokenizer": (TINY[:2], {}, "model_unreadable", "tokenizer"),
    "both": ([*TINY, *adapter_files()], {}, "model_unsupported", "one after the other"),
    "neither": (TINY[1:], {}, "model_unreadable", "config.json"),
    "twice": ([*TINY, TINY[0]], {}, "invalid_request", "comes twice"),
    "another rank": (adapter_files(r=3), {}, "model_unreadable", "`r: 3`"),
    "another kind of adapter": (adapter_files(peft_type="IA3"), {}, "adapter_unsupported", "IA3"),
    "ranks of its own": (adapter_files(rank_pattern={"q_proj": 1}), {}, "adapter_unsupported", "rank_pattern"),
    "a rank beyond bounds": (adapter_files(lora_alpha=-1), {}, "adapter_unsupported", "lora_alpha"),
    "no base": (adapter_files(base_model_name_or_path="/tmp/x"), {}, "invalid_request", "/tmp/x"),
    "another base": (adapter_files(), {"base": "Qwen/Qwen3-0.6B"}, "adapter_of_another_base", "Qwen/Qwen3-0.6B"),
    "a base that is not there": (adapter_files(), {"base": "model-" + "0" * 26}, "not_found", "no model"),
    "a folder that is not allowed": (adapter_files(), {"base": "/etc"}, "path_not_allowed", "EFT_MODEL_ROOTS"),
    "a base of a model": (TINY, {"base": MODEL}, "invalid_request", "leave it out"),
    "a name that is none": (TINY, {"name": "-"}, "invalid_request", "is not a name"),
}  # fmt: skip


def test_what_is_refused_leaves_nothing(api: Api) -> None:
    before = {path.name for path in api.layout.runs.iterdir()}
    for why, (files, fields, code, words) in BAD.items():
        reply = sent(api, files, **fields)
        assert 400 <= reply.status_code < 500, (why, reply.text)
        found = reply.json()["error"]
        assert found["code"] == code and words in found["message"] and found["field"], (why, found)
        assert not list(api.layout.uploads.iterdir()), why
    assert {path.name for path in api.layout.runs.iterdir()} == before
    assert api.http.post("/models", json={}).status_code == 415
    stranger = api.client("elsewhere", "eve")
    mine = sent(api, TINY).json()["id"]
    assert sent(api, adapter_files(), stranger, base=mine).status_code == 404
    api.http.delete(f"/models/{mine}")


@pytest.mark.parametrize(
    ("kind", "value"), [("BF16", b"\xc0\x7f"), ("F16", b"\x00\x7c"), ("F64", b"\0" * 6 + b"\xf8\xff")]
)
def test_numbers_that_are_none_in_every_width(tmp_path: Path, kind: str, value: bytes) -> None:
    from core.plan.models.uploaded import require_finite

    for data, finite in ((value, False), (b"\0" * len(value), True), (value[:-1] + b"\x3f", True)):
        header = json.dumps({"w": {"dtype": kind, "shape": [1], "data_offsets": [0, len(value)]}}).encode()
        path = tmp_path / "w.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)
        if finite:
            require_finite(path, lambda: False)
        else:
            with pytest.raises(ModelError, match="w holds NaN"):
                require_finite(path, lambda: False)


def test_an_adapter_of_another_base_is_found_before_training(tmp_path: Path) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    for folder, files in ((adapter, adapter_files()), (base, TINY)):
        folder.mkdir()
        for name, content in files:
            (folder / name).write_bytes(content)
    require_fit(adapter, base)
    for weights, words in (
        ({"model.layers.0.self_attn.q_proj.weight": ((6, 6), (0.5,) * 36)}, r"\[2, 4\], and .* \[6, 6\]"),
        ({"model.embed_tokens.weight": ((8, 4), (0.5,) * 32)}, "none of the layers"),
    ):
        (base / "model.safetensors").write_bytes(safetensors(weights))
        with pytest.raises(ModelError, match=words) as caught:
            require_fit(adapter, base)
        assert caught.value.code == "adapter_of_another_base"


def test_from_the_command_line(api: Api, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in [*adapter_files(), ("optimizer.pt", b"stays here")]:
        (folder / name).write_bytes(content)
    done = eft(api, "models", "upload", str(folder), "--name", "By hand", "--base", MODEL)
    assert done.returncode == 0, done.stderr
    model = done.stdout.strip()
    assert api.http.get("/models/By hand").json()["id"] == model
    assert len(api.http.get(f"/models/{model}/files").json()["data"]) == 2
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused = eft(api, "models", "upload", str(folder))
    assert refused.returncode != 0 and "which can run code" in " ".join(refused.stderr.split())
    api.http.delete(f"/models/{model}")
