"""A backup while jobs run, the loss of everything, a restore elsewhere; and a newer schema under a worker at work."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from box.backup.create import Options, create
from box.backup.restore import restore
from box.backup.settle import HELD
from box.backup.store import BackupStore
from core.db import migrate
from core.db.engine import Database
from core.settings import Settings
from core.storage.layout import Layout
from tests.support.next_schema import next_schema
from tests.support.service import Service, wait_for
from tests.support.target import Target, target

STEPS, SAVE_STEPS = 300, 20


@pytest.fixture
def there() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def services(tmp_path: Path, models: Path) -> Iterator[tuple[Service, Service]]:
    """One that will be lost, and the one into which it is restored, which is not started yet."""
    environment = {"EFT_MODEL_ROOTS": str(models), "EFT_CPU_SLOTS": "2", "EFT_WEBHOOK_ALLOW": "127.0.0.1"}
    made = []
    for name in ("lost", "new"):
        (tmp_path / name).mkdir()
        made.append(Service(tmp_path / name, environment))
    try:
        made[0].start()
        yield made[0], made[1]
    finally:
        for service in made:
            service.stop()
        left = [pid for service in made for pid in service.processes()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def spec(service: Service, models: Path) -> dict[str, Any]:
    rows = service.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(32)))
    return {
        "model": str(models / "tiny"),
        "data": service.upload(rows),
        "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "max_length": 64},
        "checkpoint": {"type": "disk", "save_steps": SAVE_STEPS, "keep_last": 2},
    }


def lose(service: Service) -> None:
    """Everything at once, and the disk with it."""
    for pid in service.processes():
        with contextlib.suppress(ProcessLookupError):  # it went with its parent
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not service.processes(), 120, "its processes to be gone")
    service.process.wait(120)
    shutil.rmtree(service.data)


def stop_beyond_a_checkpoint(service: Service, job_id: str) -> bool:
    """It trains quickly: from now on it waits for what follows, and its worker keeps the lease. False: it was quicker
    than we are, and has come to its end."""
    found = service.data / "runs" / job_id
    wait_for(
        lambda: next(found.glob("attempt-*/checkpoints/step-*/manifest.json"), None), 200, "its checkpoint",
        lambda: service.describe(job_id),
    )  # fmt: skip
    stopped = 0
    for pid in service.trainers(job_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stopped += 1
    status = service.job(job_id)["status"]
    assert status in ("running", "succeeded"), service.describe(job_id)
    return status == "running" and stopped > 0  # without one, what it has made is being handed in


def adapter(service: Service, job_id: str) -> bytes:
    return service.artifact(job_id, "adapter/adapter_model.safetensors")


def test_a_backup_while_jobs_run_and_a_restore_elsewhere(
    services: tuple[Service, Service], models: Path, there: Target, tmp_path: Path
) -> None:
    service, restored = services
    for name in ("api", "worker"):
        log = service.data / "logs" / f"{name}.log"
        assert os.readlink(f"/proc/{service.pid(name)}/fd/2") == str(log), "it rotates that file itself"
    assert "Ready to accept connections" in (service.data / "logs" / "broker.log").read_text()
    hooks = [
        service.client.post("/webhooks", json={"url": url, "events": ["job.started", "job.succeeded"]})
        for url in (there.url("/good"), "http://127.0.0.1:9/nobody")
    ]
    assert [hook.status_code for hook in hooks] == [201, 201], [hook.text for hook in hooks]
    job = spec(service, models)
    undisturbed, others = service.submit(job), [service.submit(job)]
    while not stop_beyond_a_checkpoint(service, others[-1]):
        assert len(others) < 10, "each of them was quicker than the test"
        others.append(service.submit(job))
    other = others[-1]
    wait_for(lambda: len(there.got) >= 2, 120, "both notices of the start", lambda: service.describe(other))

    # While the other one is at work, and this one may be.
    store, database = BackupStore(tmp_path / "backups"), Database(f"sqlite:///{service.data / 'eft.db'}")
    made = create(database, Layout(service.data), store, Options())
    assert made.missing == [] and made.brought > 0
    assert not list(store.damage(made))
    before = {got.headers["webhook-id"] for got in there.got}

    # The next version's schema comes under the worker of this one, and nobody minds.
    scripts = next_schema(tmp_path / "next")
    migrate.upgrade(database, scripts=scripts)
    assert migrate.current(database) == "next"
    late = service.submit(job)
    assert service.wait(undisturbed, "succeeded")["result"]["steps"] == STEPS
    wait_for(lambda: "preparing" in service.statuses(late), 90, "its claim", lambda: service.describe(late))
    checks = service.client.get("/readyz").json()["checks"]
    assert checks["schema"] == {
        "ok": True,
        "detail": f"next, of a newer version; this one ({migrate.head()}) can still use it",
    }
    database.dispose()

    weights, key = adapter(service, undisturbed), service.folder / "key"
    lose(service)

    # Elsewhere: another folder, another name.
    done = restore(Settings(data=str(restored.data)), store)
    moved = set(done.settled.handed_back)
    assert {other} <= moved <= {undisturbed, *others}
    assert done.settled.held >= 2
    shutil.copy(key, restored.folder / "key")
    restored.start()
    assert restored.key == service.key and restored.client.get("/jobs").status_code == 200, "keys go on working"
    assert len(restored.client.get("/jobs").json()["data"]) == 1 + len(others), "what came after the backup is gone"
    for job_id in (undisturbed, other):
        assert restored.wait(job_id, "succeeded")["result"]["steps"] == STEPS
        assert adapter(restored, job_id) == weights
        steps = {event["data"]["step"] for event in events(restored, job_id, "resumed")}
        assert not steps or (job_id in moved and min(steps) >= SAVE_STEPS), "from a checkpoint"
        assert steps or job_id != other, "which had one when the backup was made; the first may not have been so far"
        assert restored.client.get(f"/jobs/{job_id}/metrics").json()["loss"][-1][0] == STEPS
    wait_for(
        lambda: sum(got.path == "/good" for got in there.got) >= len(before) + 2 * len(moved), 90, "its new notices"
    )
    again = [got.headers["webhook-id"] for got in there.got if got.headers["webhook-id"] in before]
    assert len(again) == len(before), "nothing that was sent is sent again"
    hook = hooks[1].json()["id"]
    dead = restored.client.get(f"/webhooks/{hook}/deliveries", params={"state": "dead"}).json()["data"]
    assert {one["last_error"] for one in dead} == {HELD}


def events(service: Service, job_id: str, kind: str) -> list[dict[str, Any]]:
    reply = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000})
    return [event for event in reply.json()["data"] if event["type"] == kind]
