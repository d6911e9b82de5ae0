"""`/models`, `eft models` and `eft push`: entries of the registry, their tags, files and end."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

from core.db.tables import Artifact, Job, RegisteredModel
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import Failed, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.registry import entries
from tests.service.conftest import MODEL, Api
from tests.support.client import eft, environment
from tests.support.eft_forks import program
from tests.support.hub import Hub
from tests.support.hub_push import Written, taking

FILES = {
    "adapter/adapter_model.safetensors": b"weights",
    "adapter/README.md": b"# A card\n",
    "gguf-Q8_0/model.gguf": b"gguf",
    "withheld/gguf-Q4_K_M/model.gguf": b"bad",
    "run_record.json": b"{}",
}
EXPORTS = [
    {"type": "gguf", "quantization": "Q8_0", "folder": "gguf-Q8_0", "released": True, "retention": {"retention": 0.99}},
    {
        "type": "gguf",
        "quantization": "Q4_K_M",
        "folder": "withheld/gguf-Q4_K_M",
        "released": False,
        "reason": "it has kept 0.5 of the tuning",
        "retention": {"retention": 0.5},
    },
]


def made(api: Api, files: dict[str, bytes] = FILES, **spec: Any) -> str:
    """The id of the model of a job that has succeeded."""
    job_id, token = api.start_job(**spec)
    folder = api.layout.artifacts(job_id, token.attempt)
    listed = []
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        listed.append({"path": name, "kind": "x", "bytes": len(content), "sha256": digest})
    api.end(token, Succeeded({"export": EXPORTS, "eval_after": {"eval_loss": 0.5}}, listed))
    return f"model-{job_id[4:]}"


@pytest.mark.both_databases
def test_a_job_that_succeeds_has_a_model(api: Api) -> None:
    model = made(api, name="Registered one")
    found = api.http.get(f"/models/{model}").json()
    assert (found["name"], found["kind"], found["job"]) == ("Registered one", "adapter", f"job-{model[6:]}")
    assert (found["owner"], found["project"], found["tags"], found["parent"]) == ("ada", "lab", [], None)
    assert found["base"]["id"] == MODEL and found["evaluation"] == {"eval_loss": 0.5}
    assert found["bytes"] == sum(len(content) for name, content in FILES.items() if "/" in name)
    shown = [(form["folder"], form["released"], form["retention"], form["bytes"]) for form in found["formats"]]
    assert shown == [
        ("adapter", True, None, 16),
        ("gguf-Q8_0", True, 0.99, 4),
        ("withheld/gguf-Q4_K_M", False, 0.5, 3),
    ]
    for handle in ("Registered one", "last", model[:-2], model[6:-2]):
        assert api.http.get(f"/models/{handle}").json()["id"] == model, handle
    (generation,) = api.http.get(f"/models/{model}/lineage").json()["data"]
    assert generation["job"] == found["job"]

    files = api.http.get(f"/models/{model}/files").json()["data"]
    assert [file["path"] for file in files] == sorted(name for name in FILES if "/" in name)
    for file in files:
        assert api.http.get(file["url"]).content == FILES[file["path"]]
    for path in ("run_record.json", "adapter/none", "adapter/..%2frun_record.json", "a/%00"):
        assert api.http.get(f"/models/{model}/files/{path}").status_code == 404, path


def test_what_makes_no_model(api: Api) -> None:
    job_id, token = api.start_job()
    api.end(token, Failed("user", "x", "y"))
    bare, token = api.start_job()
    api.end(token, Succeeded({}, []))
    for job in (job_id, bare):
        assert api.http.get(f"/models/model-{job[4:]}").status_code == 404


@pytest.mark.both_databases
def test_names_and_tags_select(api: Api) -> None:
    old, new = made(api, name="Versions"), made(api, name="Versions")
    page = api.http.get("/models", params={"name": "Versions"}).json()
    assert [one["id"] for one in page["data"]] == [new, old]
    first = api.http.get("/models", params={"name": "Versions", "limit": 1}).json()
    rest = api.http.get("/models", params={"name": "Versions", "after": first["next"]}).json()
    assert [one["id"] for one in rest["data"]] == [old] and not rest["has_more"]
    assert api.http.get("/models/Versions").json()["error"]["code"] == "ambiguous_handle"

    reply = api.http.post(f"/models/{old}/tags", json={"add": ["a_1", "b"], "remove": ["none"]})
    assert reply.json()["tags"] == ["a_1", "b"]
    assert api.http.post(f"/models/{old}/tags", json={"add": ["c"], "remove": ["b"]}).json()["tags"] == ["a_1", "c"]
    assert [one["id"] for one in api.http.get("/models", params={"tag": "a_1"}).json()["data"]] == [old]
    assert api.http.get("/models", params={"tag": "ax1"}).json()["data"] == [], "no pattern"
    for wrong in ("", "two words", 'a"', "x" * 65, "-a"):
        reply = api.http.post(f"/models/{old}/tags", json={"add": [wrong]})
        assert reply.status_code == 422 and reply.json()["error"]["field"] == "add", wrong
    for part in ("x", "y"):
        reply = api.http.post(f"/models/{old}/tags", json={"add": [f"{part}{n}" for n in range(20)]})
    assert reply.json()["error"]["code"] == "too_many_tags"


@pytest.mark.both_databases
def test_deleting_leaves_the_job_and_nothing_on_the_disk(api: Api) -> None:
    model = made(api)
    job = f"job-{model[6:]}"
    folder = api.layout.artifacts(job, 2)
    freed = api.http.get(f"/models/{model}").json()["bytes"]
    assert api.http.delete(f"/models/{model}").json() == {"id": model, "deleted": True, "freed_bytes": freed}
    assert [path.name for path in folder.iterdir()] == ["run_record.json"]
    assert [one["path"] for one in api.http.get(f"/jobs/{job}/artifacts").json()["data"]] == ["run_record.json"]
    assert api.http.get(f"/models/{model}").status_code == api.http.delete(f"/models/{model}").status_code == 404
    assert api.http.get(f"/jobs/{job}").json()["status"] == "succeeded"
    # What is trained from it now is refused with the reason.
    body = {"model": job, "data": api.upload(b'{"text": "a"}\n')["id"]}
    reply = api.http.post("/jobs", json=body)
    assert reply.status_code == 422 and reply.json()["error"]["code"] == "model_job_gone"

    whole = made(api)
    assert api.http.delete(f"/jobs/job-{whole[6:]}").status_code == 200
    assert api.http.get(f"/models/{whole}").status_code == 404


@pytest.mark.both_databases
def test_what_another_job_needs_stays(api: Api) -> None:
    model = made(api, name="Foundation")
    child = api.submit(model=f"job-{model[6:]}")["id"]
    reply = api.http.delete("/models/Foundation")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "model_in_use")
    assert child in reply.json()["error"]["message"]
    assert api.http.get(f"/models/{model}/files/adapter/README.md").status_code == 200
    api.http.post(f"/jobs/{child}/cancel")
    assert api.http.delete("/models/Foundation").status_code == 200


@pytest.mark.both_databases
def test_a_job_from_the_registry_by_any_handle(api: Api) -> None:
    model = made(api, name="Begun from")
    job = f"job-{model[6:]}"
    data = api.upload(b'{"text": "a"}\n')["id"]
    wanted = {"type": "job", "id": job, "adapter": "continue"}
    for named in (
        model,
        {"type": "registry", "id": "Begun from"},
        {"type": "registry", "id": model[6:-2]},
        {"type": "registry", "id": "last", "adapter": "continue"},
        {"type": "job", "id": "Begun from"},
        {"type": "job", "id": job[:-2]},
    ):
        reply = api.http.post("/jobs", params={"dry_run": "true"}, json={"model": named, "data": data})
        assert reply.status_code == 200 and reply.json()["spec"]["model"] == wanted, (named, reply.text)
    child, token = api.start_job(model={"type": "registry", "id": model})
    listed = [{"path": "adapter/a.safetensors", "kind": "adapter", "bytes": 1, "sha256": "0" * 64}]
    api.end(token, Succeeded({}, listed))
    shown = api.http.get(f"/models/model-{child[4:]}").json()
    assert (shown["parent"], shown["base"]["id"]) == (model, MODEL)
    assert [one["job"] for one in api.http.get(f"/models/model-{child[4:]}/lineage").json()["data"]] == [child, job]

    stranger = api.client("elsewhere", "eve")
    rows = api.upload(b'{"text": "a"}\n', client=stranger)["id"]
    for named in (model, {"type": "registry", "id": "Begun from"}, {"type": "job", "id": job}):
        reply = stranger.post("/jobs", json={"model": named, "data": rows})
        assert reply.status_code == 404 and reply.json()["error"]["field"] == "model.id", (named, reply.text)
    made(api, name="Begun from")
    reply = api.http.post("/jobs", json={"model": {"type": "registry", "id": "Begun from"}, "data": data})
    assert (reply.status_code, reply.json()["error"]["field"]) == (409, "model.id")


@pytest.mark.both_databases
def test_an_export_that_is_asked_for_later(api: Api) -> None:
    """Rules and rows; what is written, in tests/service/test_chains.py and tests/train/test_exports.py."""
    model = made(api, name="Exported later")
    job, url = f"job-{model[6:]}", f"/models/{model}/exports"
    for wrong, field in (({"export": []}, "export"), ({"export": ["pickle"]}, "export.0"), ({}, "export")):
        reply = api.http.post(url, json=wrong)
        assert reply.status_code == 422 and reply.json()["error"]["field"].startswith(field), (wrong, reply.text)
    taken = api.http.post(url, json={"export": ["merged", {"type": "gguf", "quantization": "Q8_0"}]})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "exported_already"), taken.text
    reply = api.http.post(url, json={"export": ["merged", {"type": "gguf", "quantization": "Q4_K_M"}]})
    assert reply.status_code == 201 and reply.headers["location"] == reply.json()["links"]["self"], reply.text
    export = reply.json()["id"]
    assert [one["type"] for one in reply.json()["export"]] == ["merged", "gguf"]
    assert [one["id"] for one in api.http.get(url).json()["data"]] == [export]
    assert api.http.get(f"/jobs/{export}").status_code == 404, "no job"
    for path, code in ((f"/models/{model}", "model_in_use"), (f"/jobs/{job}", "job_in_use")):
        refused = api.http.delete(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, code)
        assert f"`{export}` is making formats" in refused.json()["error"]["message"]

    with api.database.write() as session:
        first = claim(session, "wrk-test", "box", Slot("export-0", "export"), 600)
        assert first is not None and first.token.job_id == export and first.kind == "prepare"
        finish(session, first.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
    with api.database.write() as session:
        second = claim(session, "wrk-test", "box", Slot("export-0", "export"), 600)
        assert second is not None and second.kind == "export"
        running(session, second.token)
    folder = api.layout.artifacts(export, second.token.attempt) / "merged"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"merged weights")
    digest = hashlib.sha256(b"merged weights").hexdigest()
    listed = [{"path": "merged/model.safetensors", "kind": "model", "bytes": 14, "sha256": digest}]
    outcome = {"type": "merged", "folder": "merged", "released": True, "retention": {"retention": 1.0}}
    with api.database.write() as session:
        finish(session, second.token, "export", Succeeded({"export": [outcome]}, listed), 0, RetryPolicy())

    shown = api.http.get(f"/models/{model}").json()
    assert [one["folder"] for one in shown["formats"]] == [
        "adapter", "gguf-Q8_0", "withheld/gguf-Q4_K_M", "merged",
    ]  # fmt: skip
    assert shown["bytes"] == sum(len(content) for name, content in FILES.items() if "/" in name) + 14
    assert api.http.get(f"/models/{model}/files/merged/model.safetensors").content == b"merged weights"
    assert eft(api, "models", "export", model, "merged").returncode != 0
    third = eft(api, "models", "export", model, "gguf-F16").stdout.strip()
    assert api.http.post(f"{url}/{third}/cancel").json()["status"] == "cancelled"
    assert api.http.delete(f"/models/{model}").json()["freed_bytes"] == shown["bytes"]
    assert not api.layout.job(export).exists()
    with api.database.read() as session:
        assert session.get(Job, export) is None

    whole = made(api, {"model/model.safetensors": b"x", "run_record.json": b"{}"}, method="full")
    reply = api.http.post(f"/models/{whole}/exports", json={"export": ["merged"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "nothing_to_merge")


def test_models_of_workers_and_apis_without_a_registry(api: Api) -> None:
    model, lost = made(api), made(api)
    with api.database.write() as session:
        session.execute(delete(RegisteredModel).where(RegisteredModel.id == model))
        session.execute(delete(Artifact).where(Artifact.job_id == f"job-{lost[6:]}"))
        session.execute(delete(RegisteredModel).where(RegisteredModel.id == lost))
        stray = RegisteredModel(
            id="model-0000000000000000000000stray", name=None, kind="model", job_id="job-gone", tags=[],
            owner_id=session.execute(select(Job.owner_id).limit(1)).scalar_one(),
            project_id=session.execute(select(Job.project_id).limit(1)).scalar_one(),
        )  # fmt: skip
        session.add(stray)
    with api.database.write() as session:
        entries.reconcile(session)
    assert api.http.get(f"/models/{model}").json()["kind"] == "adapter"
    assert api.http.get(f"/models/{lost}").status_code == 404, "its weights were deleted"
    with api.database.read() as session:
        assert session.get(RegisteredModel, "model-0000000000000000000000stray") is None


def test_from_the_command_line(api: Api, tmp_path: Path) -> None:
    model = made(api, name="Shown in a shell")
    listed = json.loads(eft(api, "models", "list", "--name", "Shown in a shell", "--json").stdout)["data"]
    assert [one["id"] for one in listed] == [model]
    assert "adapter,gguf-Q8_0" in eft(api, "models", "list").stdout
    assert eft(api, "models", "tag", model, "production").stdout == "production\n"
    shown = eft(api, "models", "show", "Shown in a shell").stdout
    assert "tags: production" in shown and "no: it has kept 0.5 of the tuning" in shown
    done = eft(api, "models", "download", model, "adapter", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / "out" / "gguf-Q8_0").exists()
    assert f"job-{model[6:]}" in eft(api, "models", "lineage", model).stdout
    refused = eft(api, "serve", "Shown in a shell", "--print", "vllm")
    assert refused.returncode == 2 and f"eft models export {model} merged --wait" in " ".join(refused.stderr.split())
    assert eft(api, "models", "rm", "Shown in a shell").stdout.startswith(f"{model} deleted: 23 B freed")


# --- eft push --------------------------------------------------------------------------------------

WEIGHTS = bytes(range(256)) * 64


def test_the_deletion_of_a_job_says_before_that_its_model_goes(api: Api) -> None:
    model = made(api, name="Goes with its job")
    job = model.replace("model", "job")
    goes = api.http.delete(f"/jobs/{job}", params={"dry_run": True}).json()
    assert (goes["name"], goes["model"]) == ("Goes with its job", model)
    assert goes["exports"] == [one["folder"] for one in EXPORTS]
    assert goes["freed_bytes"]["artifacts"] == sum(map(len, FILES.values()))
    said = eft(api, "delete", job, "--dry-run")
    assert said.returncode == 0 and f"its model {model} with gguf-Q8_0, withheld/gguf-Q4_K_M goes too" in said.stdout
    assert api.http.get(f"/models/{model}").status_code == 200
    assert api.http.delete(f"/jobs/{job}").json() == goes | {"deleted": True}
    assert api.http.get(f"/models/{model}").status_code == 404


PUSHED = {
    "adapter/adapter_model.safetensors": WEIGHTS,
    "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "/data/models/base"}).encode(),
    "adapter/README.md": b"---\nlibrary_name: peft\n---\n# A card\n",
    "gguf-Q8_0/model.gguf": WEIGHTS[::-1],
    "withheld/gguf-Q4_K_M/model.gguf": b"bad",
}
ADAPTER = {name.removeprefix("adapter/"): data for name, data in PUSHED.items() if name.startswith("adapter/")}


def push(api: Api, hub: Hub, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    settings = environment(api, **known | more)
    return subprocess.run([program(), "push", *arguments], env=settings, capture_output=True, text=True, check=False)


def test_a_push_is_one_commit_and_a_second_one_sends_what_is_new(api: Api, tmp_path: Path) -> None:
    model = made(api, PUSHED, name="Pushed")
    with taking() as (hub, written):
        hub.secret = "hf_secret"
        mirror = push(api, hub, tmp_path, "Pushed", "lab/voice", HF_HUB_DISABLE_XET="0")
        assert mirror.returncode == 4 and "HF_HUB_DISABLE_XET=1 if it is a mirror without Xet" in mirror.stderr
        done = push(api, hub, tmp_path, "Pushed", "lab/voice")
        assert done.returncode == 0, done.stderr
        assert "names the local folder /data/models/base" in done.stderr
        assert written.repositories == {"lab/voice": "private"}
        assert written.branches["lab/voice@main"] == ADAPTER
        assert written.messages == [f"Pushed: adapter ({model})"]
        assert done.stdout.startswith(f"{hub.url}/lab/voice/commit/") and written.uploads == 1
        again = push(
            api, hub, tmp_path, f"job-{model[6:]}", "lab/voice", "adapter/", "--revision", "next", "-m", "Try", "--json"
        )
        assert again.returncode == 0, again.stderr
        assert written.branches["lab/voice@next"] == ADAPTER and written.uploads == 1, "the hub had the weights"
        told = json.loads(again.stdout)
        assert (told["model"], told["format"], written.messages[1:]) == (model, "adapter", ["Try"])
        other = push(api, hub, tmp_path, "Pushed", "lab/gguf", "gguf-Q8_0", "--public")
        assert other.returncode == 0, other.stderr
        assert written.repositories["lab/gguf"] == "public"
        assert written.branches["lab/gguf@main"] == {"model.gguf": WEIGHTS[::-1]}
    kept = [path for path in api.layout.root.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if b"hf_secret" in path.read_bytes()], "the server never sees the token"


@pytest.fixture(scope="module")
def shared(api: Any) -> str:
    return made(api, PUSHED)


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "words"),
    [
        (("lab",), {}, 2, "OWNER/NAME"),
        (("lab/voice", "merged"), {}, 2, "eft models export"),
        (("lab/voice", "withheld/gguf-Q4_K_M"), {}, 2, "it has kept 0.5 of the tuning"),
        (("lab/voice",), {"HF_TOKEN": ""}, 2, "hf auth login"),
        (("lab/voice",), {"HF_TOKEN": "hf_other"}, 5, "the right to write"),
        (("lab/voice",), {"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE"),
        (("lab/voice",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 4, "push again"),
    ],
)
def test_what_cannot_be_pushed_leaves_nothing(
    api: Api, tmp_path: Path, shared: str, arguments: tuple[str, ...], settings: dict[str, str], code: int, words: str
) -> None:
    with taking() as (hub, written):
        hub.secret = "hf_secret"
        done = push(api, hub, tmp_path, shared, *arguments, **settings)
        assert done.returncode == code and words in done.stderr, done.stderr
        assert written == Written()
