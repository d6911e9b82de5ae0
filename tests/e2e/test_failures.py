"""What goes wrong with a job or its box, on a real service: time used up, hangs, memory, a full disk."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import ROOT, Service, running, wait_for


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, "-m", "tests.support.tiny_model", str(folder / "tiny")], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    """Its data root is a small file system of its own where this user may mount one; the database is elsewhere."""
    folder = tmp_path_factory.mktemp("failures")
    mounted = os.geteuid() == 0
    (folder / "data").mkdir(mode=0o700)
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "eft-test", folder / "data"], check=True)
    try:
        yield from running(
            folder,
            {
                "EFT_MODEL_ROOTS": str(models),
                "EFT_DATABASE_URL": f"sqlite:///{folder / 'eft.db'}",
                "EFT_HANG_SECONDS_TRAINING": "8",
                "EFT_MIN_FREE_BYTES": str(8 << 20),
            },
        )
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder / "data"], check=True)


@pytest.fixture(scope="module")
def file(service: Service) -> str:
    rows = service.folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "completion": " " + "x" * 200}) + "\n" for n in range(96))
    )
    return service.upload(rows)


def job(service: Service, models: Path, file: str, steps: int = 100_000, batch: int = 4, **axes: Any) -> str:
    return service.submit(
        {
            "model": str(models / "tiny"),
            "data": file,
            "training": {"max_steps": steps, "per_device_train_batch_size": batch, "max_length": 256},
            "checkpoint": {"type": "disk", "save_steps": 5},
            **axes,
        }
    )


def retry(service: Service, job_id: str) -> str:
    return service.client.post(f"/jobs/{job_id}/retry").json()["id"]


def steps(service: Service, job_id: str) -> list[int]:
    return [step for step, _ in service.client.get(f"/jobs/{job_id}/metrics").json().get("loss", [])]


def test_time_is_up(service: Service, models: Path, file: str) -> None:
    seconds = 12
    while True:
        job_id = job(service, models, file, resources={"type": "single", "max_runtime_seconds": seconds})
        failure = service.wait(job_id, "failed", "succeeded")["failure"]
        assert (failure["class"], failure["code"]) == ("user", "max_runtime")
        assert failure["field"] == "resources.max_runtime_seconds" and "`retry`" in failure["message"]
        if steps(service, job_id):
            break
        seconds *= 2  # all of it went into loading: this machine is busy, or slow
    done = steps(service, job_id)
    newest = max(path.name for path in (service.data / "runs" / job_id).glob("attempt-*/checkpoints/*"))
    assert newest.startswith(f"step-{done[-1]:08d}"), "the checkpoint is of the last moment"
    again = job_id
    while not steps(service, again := retry(service, again)):
        wait_for(lambda job_id=again: steps(service, job_id) or ended(service, job_id), 200, "a step or the end")
        if steps(service, again):
            break  # or all of it went into loading once more
    service.client.post(f"/jobs/{again}/cancel")
    wait_for(lambda: ended(service, again), 200, "its end")
    assert steps(service, again)[0] == done[-1] + 1, "it went on where the other had to stop"


def ended(service: Service, job_id: str) -> bool:
    return service.job(job_id)["status"] in ("succeeded", "failed", "cancelled")


def test_a_frozen_trainer_is_killed_and_tried_again(service: Service, models: Path, file: str) -> None:
    job_id = job(service, models, file)
    service.wait_for_step(job_id, 6)
    (pid,) = service.trainers(job_id)
    os.kill(pid, signal.SIGSTOP)
    told = wait_for(lambda: events(service, job_id, "hung"), 120, "the hang", lambda: service.describe(job_id))
    assert "no sign of life" in told[0]["failure"]["message"] and told[0]["failure"]["class"] == "machine"
    assert not Path(f"/proc/{pid}").exists()
    service.wait_for_step(job_id, 7)  # by another one
    service.client.post(f"/jobs/{job_id}/cancel")
    service.wait(job_id, "cancelled")


def events(service: Service, job_id: str, code: str) -> list[dict[str, Any]]:
    """The status events that tell of such a failure."""
    reply = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000})
    changes = [event["data"] for event in reply.json()["data"] if event["type"] == "status"]
    return [change for change in changes if "failure" in change and change["failure"]["code"] == code]


def test_out_of_memory_goes_on_with_half_the_batch(service: Service, models: Path) -> None:
    rows = service.folder / "long.jsonl"
    rows.write_text((json.dumps({"prompt": "a", "completion": " " + "x" * 500}) + "\n") * 128)
    long_file = service.upload(rows)
    sizes = {"max_steps": 8, "per_device_train_batch_size": 128, "max_length": 512}
    job_id = job(service, models, long_file, training=sizes, checkpoint={"type": "disk", "save_steps": 1})
    service.wait_for_step(job_id, 1)
    (pid,) = service.trainers(job_id)
    # It may map less than a step needs; malloc returns tensors above 32 MiB to the kernel, and asks again. Looked at
    # for one whole step, however long one takes here.
    most, seen = 0, service.job(job_id)["progress"]["step"]
    while service.job(job_id)["progress"]["step"] < seen + 2:
        most = max(most, int(Path(f"/proc/{pid}/statm").read_text().split()[0]))
    limit = most * resource.getpagesize() - (32 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    ended = service.wait(job_id, "failed", "succeeded")
    assert ended["status"] == "succeeded", service.describe(job_id)
    batch, accumulation = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    assert ended["adjusted"] == {batch: 64, accumulation: 2}
    assert ended["spec"]["training"]["per_device_train_batch_size"] == 128
    (told,) = events(service, job_id, "out_of_memory")
    assert told["to"] == "queued" and f"{batch} = 64" in told["reason"]
    assert steps(service, job_id) == list(range(1, 9))


def test_a_full_disk_waits_and_goes_on(service: Service, models: Path, file: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a file system of our own to fill needs root; the trainer's part is in tests/train")
    # Full fine-tuning: its checkpoints are of megabytes, and do not fit beside the ballast.
    job_id = job(
        service, models, file, steps=200, method="full", checkpoint={"type": "disk", "save_steps": 20, "keep_last": 10}
    )
    service.wait_for_step(job_id, 25)
    ballast = service.data / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while stream.write(b"\0" * 65536):
                pass
        except OSError:
            pass
        stream.truncate(max(0, stream.tell() - (256 << 10)))  # room for events, not for a checkpoint
    waiting = wait_for(
        lambda: (now := service.job(job_id))["status"] == "queued" and now,
        120,
        "queued",
        lambda: service.describe(job_id),
    )
    assert waiting["reason"].startswith("waits for room on the data root"), waiting["reason"]
    assert waiting["failure"] is None
    (told,) = events(service, job_id, "no_space")
    assert told["needs_bytes"] > 1 << 20 and "its checkpoint of" in told["reason"]
    figures = r"waits for room on the data root: 0 MiB free, needs (\d+) \((\d+) for itself, 8 stay in reserve\)"
    said = wait_for(lambda: re.fullmatch(figures, service.job(job_id)["reason"]), 60, "both figures")
    assert int(said[2]) == -(-told["needs_bytes"] >> 20) and int(said[1]) <= int(said[2]) + 8
    time.sleep(3)  # sweeps look once a second
    assert service.job(job_id)["attempt"] == waiting["attempt"], "nothing is tried while there is no room"
    left = [path.name for path in (service.data / "runs" / job_id / "attempt-2" / "checkpoints").iterdir()]
    assert "step-00000020" in left and not [name for name in left if name.startswith("tmp-")]
    ballast.unlink()
    ended = service.wait(job_id, "succeeded", "failed")
    assert ended["status"] == "succeeded", service.describe(job_id)
    assert steps(service, job_id) == list(range(1, 201))
