"""Two boxes, each in a network namespace of its own: one trains what the other has prepared, and goes on with what the
other can no longer do. The data root is a folder that each mounts elsewhere, or a bucket: the commit decides which, and
a run with EFT_TEST_EVERYTHING=1 has both."""

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
from tests.support.boxes import BUCKET, S3, Cluster, Net
from tests.support.hub import COMMIT, Hub, serving
from tests.support.selection import one_a_commit
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


@pytest.fixture(params=one_a_commit("folder", "bucket"))
def cluster(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    net: Net,
    database_server: Callable[[], tuple[URL, int]],
    hub: Hub,
) -> Iterator[Cluster]:
    hub.broken = False
    hub.seen.clear()
    url, port = database_server()
    with boxes.broker(tmp_path, net) as broker_port:
        if request.param == "folder":
            cluster = Cluster(tmp_path, net, port, broker_port, url, None, hub.url.rpartition(":")[2])
            try:
                yield cluster
            finally:
                cluster.close()
        else:
            with boxes.object_store(tmp_path, BUCKET) as store_port:
                cluster = Cluster(tmp_path, net, port, broker_port, url, store_port, hub.url.rpartition(":")[2])
                try:
                    yield cluster
                finally:
                    cluster.close()


def test_a_job_each_and_one_of_them_on_both(cluster: Cluster, hub: Hub, undisturbed: list[str]) -> None:
    cluster.start(1)
    with cluster.api():
        asked = f"{cluster.net.here[0]}:{cluster.api_port}"
        seen = subprocess.run(
            ["ip", "netns", "exec", cluster.net.names[0], sys.executable, "-c", READY, asked],
            capture_output=True, text=True,
        )  # fmt: skip
        assert seen.stdout.strip() == "ready", f"the API is not reached from a box: {seen.stderr}"
        data = boxes.rows(64)
        file_id = cluster.client.post("/files", files={"file": ("rows.jsonl", data)}).json()["id"]
        spec = {
            "model": {"type": "hub", "id": hub.repo, "revision": COMMIT},
            "data": file_id,
            "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "max_length": 64},
            "checkpoint": {"save_steps": SAVE_STEPS},
        }
        cluster.serves(1)
        for _ in range(5):  # where it was quicker than we are, another one is
            moved = cluster.submit(**spec)
            cluster.wait(moved, lambda job: job.furthest_step >= SAVE_STEPS, "its first checkpoint")
            if cluster.freeze(moved):  # it trains quickly: now it waits for what follows
                break
        if cluster.store_port is not None:
            wait_for(lambda: stored_checkpoints(cluster, moved), 120, "a checkpoint in the bucket", cluster.logs)
        assert cluster.job(moved).status == "running", "it was quicker than the test"

        # The other box comes, with no way to the hub: the model is what the first one has brought.
        hub.broken = True
        before = len(hub.seen)
        cluster.start(0)
        if undisturbed:
            cluster.serves(0)
            assert cluster.kill(moved) == "box-1"
        else:
            whole = cluster.submit(**spec, resources={"requirements": {"labels": ["box=0"]}})
            cluster.wait(whole, lambda job: job.status == "running", "training on the other box")
            assert cluster.kill(moved) == "box-1"
            cluster.wait(whole, lambda job: job.status == "succeeded", "its end")
            assert cluster.attempts(whole)[-1] == ("train", "box-0")
            undisturbed.append(weights(cluster, whole))
        cluster.wait(moved, lambda job: job.status == "succeeded", "its end on the other box")

        assert len(hub.seen) == before or all("/resolve/" not in line for line in hub.seen[before:])
        assert [node for kind, node in cluster.attempts(moved) if kind == "train"] == ["box-1", "box-0"]
        assert len(cluster.resumed(moved)) == 1 and cluster.resumed(moved)[0] >= SAVE_STEPS
        prepared = cluster.job(moved).prepared
        assert prepared is not None and prepared["model_dir"] == f"models/hub/team--tiny/{COMMIT}/model"
        assert weights(cluster, moved) == undisturbed[0], "going on at another box changes no bit"
        part = cluster.client.get(f"/files/{file_id}/content", headers={"range": "bytes=5-14"})
        assert (part.status_code, part.content) == (206, data[5:15])
        log = cluster.client.get(f"/jobs/{moved}/logs")
        assert log.status_code == 200 and int(log.headers["x-log-size"]) > 0
        if cluster.store_port is not None:
            check_the_bucket(cluster, moved, file_id, data)


READY = """
import json, sys, urllib.request
print(json.load(urllib.request.urlopen(f"http://{sys.argv[1]}/readyz"))["status"])
"""


def weights(cluster: Cluster, job_id: str) -> str:
    listed = cluster.client.get(f"/jobs/{job_id}/artifacts").json()["data"]
    (adapter,) = [one for one in listed if one["path"].endswith("adapter_model.safetensors")]
    content = cluster.client.get(f"/jobs/{job_id}/artifacts/{adapter['path']}").content
    assert hashlib.sha256(content).hexdigest() == adapter["sha256"]
    return str(adapter["sha256"])


def bucket(cluster: Cluster) -> Bucket:
    return Bucket(
        Settings(
            data=f"s3://{BUCKET}/labs/one",
            s3_endpoint=f"http://127.0.0.1:{cluster.store_port}",
            s3_access_key_id=S3["EFT_S3_ACCESS_KEY_ID"],
            s3_secret_access_key=S3["EFT_S3_SECRET_ACCESS_KEY"],
        )
    )


def stored_checkpoints(cluster: Cluster, job_id: str) -> list[str]:
    keys = [entry.key for entry in bucket(cluster).tree(f"runs/{job_id}")]
    return [key for key in keys if "/checkpoints/" in key and key.endswith("/manifest.json")]


def check_the_bucket(cluster: Cluster, job_id: str, file_id: str, data: bytes) -> None:
    store = bucket(cluster)
    assert store.read(f"files/{file_id}") == data
    for attempt in {key.split("/")[2] for key in stored_checkpoints(cluster, job_id)}:
        kept = [key for key in stored_checkpoints(cluster, job_id) if f"/{attempt}/" in key]
        assert len(kept) <= 2, "checkpoint.keep_last"
    assert not list((cluster.folder / "box-0" / "work").glob("runs/*/*/outgoing")), (
        "links of checkpoints that were sent"
    )
    # Deleted through the API, it is gone from the bucket.
    with cluster.database.read() as session:
        assert session.execute(select(File.id)).scalars().all() == [file_id]
    assert cluster.client.delete(f"/files/{file_id}").status_code == 200
    assert store.size(f"files/{file_id}") is None
