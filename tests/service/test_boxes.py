"""Two boxes, each in a network namespace of its own: one trains what the other has prepared, and goes on with what the
other can no longer do. Once with a folder that each mounts elsewhere, once with a bucket."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, select

from core.db.tables import File
from core.settings import Settings
from core.storage.bucket import Bucket
from tests.support import boxes
from tests.support.boxes import BUCKET, S3, Lab, Net
from tests.support.hub import COMMIT, Hub, serving
from tests.support.service import wait_for

STEPS, SAVE_STEPS = 300, 10


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    boxes.require_namespaces()
    with boxes.net() as made:
        yield made


@pytest.fixture(scope="module")
def database_server(net: Net) -> Iterator[Callable[[], tuple[URL, int]]]:
    with boxes.database_server(net) as make:
        yield make


@pytest.fixture(scope="module")
def hub(tiny_dir: Path) -> Iterator[Hub]:
    """Has the tiny model, on every address of this machine."""
    with serving("0.0.0.0") as hub:
        hub.files = {path.name: path.read_bytes() for path in tiny_dir.iterdir()}
        yield hub


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """SHA-256 of the weights of the job that nobody disturbed, once there is one: the same for both data roots."""
    return []


@pytest.fixture(params=["folder", "bucket"])
def lab(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    net: Net,
    database_server: Callable[[], tuple[URL, int]],
    hub: Hub,
) -> Iterator[Lab]:
    hub.broken = False
    hub.seen.clear()
    url, port = database_server()
    with boxes.broker(tmp_path, net) as broker_port:
        if request.param == "folder":
            lab = Lab(tmp_path, net, port, broker_port, url, None, hub.url.rpartition(":")[2])
            try:
                yield lab
            finally:
                lab.close()
        else:
            with boxes.object_store(tmp_path, BUCKET) as store_port:
                lab = Lab(tmp_path, net, port, broker_port, url, store_port, hub.url.rpartition(":")[2])
                try:
                    yield lab
                finally:
                    lab.close()


def test_a_job_each_and_one_of_them_on_both(lab: Lab, hub: Hub, undisturbed: list[str]) -> None:
    lab.start(1)
    with lab.api():
        seen = subprocess.run(
            ["ip", "netns", "exec", lab.net.names[0], sys.executable, "-c", READY, f"{lab.net.here[0]}:{lab.api_port}"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert seen.stdout.strip() == "ready", f"the API is not reached from a box: {seen.stderr}"
        data = boxes.rows(64)
        file_id = lab.client.post("/files", files={"file": ("rows.jsonl", data)}).json()["id"]
        spec = {
            "model": {"type": "hub", "id": hub.repo, "revision": COMMIT},
            "data": file_id,
            "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "max_length": 64},
            "checkpoint": {"save_steps": SAVE_STEPS},
        }
        lab.serves(1)
        for _ in range(5):  # where it was quicker than we are, another one is
            moved = lab.submit(**spec)
            lab.wait(moved, lambda job: job.furthest_step >= SAVE_STEPS, "its first checkpoint")
            if lab.freeze(moved):  # it trains quickly: now it waits for what follows
                break
        if lab.store_port is not None:
            wait_for(lambda: stored_checkpoints(lab, moved), 120, "a checkpoint in the bucket", lab.logs)
        assert lab.job(moved).status == "running", "it was quicker than the test"

        # The other box comes, with no way to the hub: the model is what the first one has brought.
        hub.broken = True
        asked = len(hub.seen)
        lab.start(0)
        if undisturbed:
            lab.serves(0)
            assert lab.kill(moved) == "box-1"
        else:
            whole = lab.submit(**spec, resources={"requirements": {"labels": ["box=0"]}})
            lab.wait(whole, lambda job: job.status == "running", "training on the other box")
            assert lab.kill(moved) == "box-1"
            lab.wait(whole, lambda job: job.status == "succeeded", "its end")
            assert lab.attempts(whole)[-1] == ("train", "box-0")
            undisturbed.append(weights(lab, whole))
        lab.wait(moved, lambda job: job.status == "succeeded", "its end on the other box")

        assert len(hub.seen) == asked or all("/resolve/" not in line for line in hub.seen[asked:])
        assert [node for kind, node in lab.attempts(moved) if kind == "train"] == ["box-1", "box-0"]
        assert len(lab.resumed(moved)) == 1 and lab.resumed(moved)[0] >= SAVE_STEPS
        prepared = lab.job(moved).prepared
        assert prepared is not None and prepared["model_dir"] == f"models/hub/team--tiny/{COMMIT}/model"
        assert weights(lab, moved) == undisturbed[0], "going on at another box changes no bit"
        part = lab.client.get(f"/files/{file_id}/content", headers={"range": "bytes=5-14"})
        assert (part.status_code, part.content) == (206, data[5:15])
        log = lab.client.get(f"/jobs/{moved}/logs")
        assert log.status_code == 200 and int(log.headers["x-log-size"]) > 0
        if lab.store_port is not None:
            check_the_bucket(lab, moved, file_id, data)


READY = """
import json, sys, urllib.request
print(json.load(urllib.request.urlopen(f"http://{sys.argv[1]}/readyz"))["status"])
"""


def weights(lab: Lab, job_id: str) -> str:
    listed = lab.client.get(f"/jobs/{job_id}/artifacts").json()["data"]
    (adapter,) = [one for one in listed if one["path"].endswith("adapter_model.safetensors")]
    content = lab.client.get(f"/jobs/{job_id}/artifacts/{adapter['path']}").content
    assert hashlib.sha256(content).hexdigest() == adapter["sha256"]
    return str(adapter["sha256"])


def bucket(lab: Lab) -> Bucket:
    return Bucket(
        Settings(
            data=f"s3://{BUCKET}/labs/one",
            s3_endpoint=f"http://127.0.0.1:{lab.store_port}",
            s3_access_key_id=S3["EFT_S3_ACCESS_KEY_ID"],
            s3_secret_access_key=S3["EFT_S3_SECRET_ACCESS_KEY"],
        )
    )


def stored_checkpoints(lab: Lab, job_id: str) -> list[str]:
    keys = [entry.key for entry in bucket(lab).tree(f"runs/{job_id}")]
    return [key for key in keys if "/checkpoints/" in key and key.endswith("/manifest.json")]


def check_the_bucket(lab: Lab, job_id: str, file_id: str, data: bytes) -> None:
    store = bucket(lab)
    assert store.read(f"files/{file_id}") == data
    for attempt in {key.split("/")[2] for key in stored_checkpoints(lab, job_id)}:
        kept = [key for key in stored_checkpoints(lab, job_id) if f"/{attempt}/" in key]
        assert len(kept) <= 2, "checkpoint.keep_last"
    assert not list((lab.folder / "box-0" / "work").glob("runs/*/*/outgoing")), "links of checkpoints that were sent"
    # Deleted through the API, it is gone from the bucket.
    with lab.database.read() as session:
        assert session.execute(select(File.id)).scalars().all() == [file_id]
    assert lab.client.delete(f"/files/{file_id}").status_code == 200
    assert store.size(f"files/{file_id}") is None
