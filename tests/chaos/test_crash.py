"""kill -9 of everything in mid-job: it ends well, with bitwise the weights of a run that nobody disturbed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from core.jobs.base.states import TRANSITIONS, Status
from tests.support.service import SHORT, Service, running, wait_for

STEPS = 60
UNDISTURBED = ["queued", "preparing", "queued", "starting", "running", "succeeded"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    yield from running(tmp_path_factory.mktemp("chaos"), {"EFT_MODEL_ROOTS": str(models), "EFT_SPARE": "1"})


@pytest.fixture(scope="module")
def spec(service: Service, models: Path) -> dict[str, Any]:
    rows = service.folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "completion": f" it is {n * n}"}) + "\n" for n in range(96))
    )
    return {
        "model": str(models / "tiny"),
        "data": service.upload(rows),
        "method": {"type": "lora", "lora_dropout": 0.1},
        "training": {"max_steps": STEPS, "per_device_train_batch_size": 4, "max_length": 64},
        "checkpoint": {"type": "disk", "save_steps": 10},
    }


@pytest.fixture(scope="module")
def undisturbed(service: Service, spec: dict[str, Any]) -> str:
    job_id = service.submit(spec)
    with Watch(service, job_id) as watch:
        watch.until("succeeded", "failed")
    watch.check(UNDISTURBED)
    return weights(service, job_id)


def weights(service: Service, job_id: str) -> str:
    return hashlib.sha256(service.artifact(job_id, "adapter/adapter_model.safetensors")).hexdigest()


class Watch:
    """Looks at a job five times a second: its state over HTTP, its trainers in /proc, its state again."""

    def __init__(self, service: Service, job_id: str) -> None:
        self.service, self.job_id = service, job_id
        self.seen: list[str] = []
        self.faults: list[str] = []
        self._job: dict[str, Any] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def until(self, *wanted: str) -> dict[str, Any]:
        """The job in one of these states, by the looks that are made anyway."""
        what = f"{self.job_id} to be {' or '.join(wanted)}"
        wait_for(lambda: self._job.get("status") in wanted, 200, what, lambda: self.service.describe(self.job_id))
        return self._job

    def _run(self) -> None:
        while not self._end.wait(0.2):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            before = self.service.job(self.job_id)
            trainers = self.service.trainers(self.job_id)
            after = self.service.job(self.job_id)
        except Exception:
            return  # the API is being killed; there is nothing to see
        self._job = after
        for job in (before, after):
            if not self.seen or self.seen[-1] != job["status"]:
                self.seen.append(job["status"])
        if len(trainers) > 1:
            self.faults.append(f"{len(trainers)} trainers at once: {trainers}")
        # Both looks in one waiting or final state, and of one attempt: the process list between them belongs to it.
        same = before["status"] == after["status"] and before["attempt"] == after["attempt"]
        if (
            same
            and before["status"] in ("queued", "preparing", "paused", "succeeded", "failed", "cancelled")
            and trainers
        ):
            self.faults.append(f"{before['status']}, and there are trainers: {trainers}")

    def check(self, expected: list[str]) -> None:
        """The history is `expected`; what was seen is a path of the transition table and, some states being too short
        to be seen, a part of that history in its order."""
        assert not self.faults, self.faults
        history = self.service.statuses(self.job_id)
        assert history == expected, self.service.describe(self.job_id)
        for one, next_one in pairwise(history):
            assert Status(next_one) in TRANSITIONS[Status(one)]
        rest = iter(history)
        assert all(status in rest for status in self.seen), (self.seen, history)


def trainer_of(service: Service, job_id: str) -> int:
    (pid,) = service.trainers(job_id)
    return pid


def test_kill_9_of_the_trainer(service: Service, spec: dict[str, Any], undisturbed: str) -> None:
    """A snapshot of each step in memory outlives the trainer: at most the step that was under way is done again, and
    the one that was not whole yet."""
    job_id = service.submit(spec | {"checkpoint": {"save_steps": 1000, "memory_steps": 1}})
    with Watch(service, job_id) as watch:
        service.wait_for_step(job_id, 11)
        os.kill(trainer_of(service, job_id), signal.SIGKILL)
        job = watch.until("succeeded", "failed")
    (resumed,) = [event["data"]["step"] for event in events(service, job_id) if event["type"] == "resumed"]
    assert resumed >= max(9, last_step(service, job_id, attempt=2) - 2)
    assert not list(Path("/dev/shm").glob(f"eft-*/{job_id}")), "its memory is free again"
    again = ["starting", "running"]
    watch.check(["queued", "preparing", "queued", *again, "queued", *again, "succeeded"])
    assert weights(service, job_id) == undisturbed
    assert job["attempt"] == 3
    curve = service.client.get(f"/jobs/{job_id}/metrics", params={"names": "loss"}).json()["loss"]
    assert [step for step, _ in curve] == list(range(1, STEPS + 1))


def test_kill_9_of_the_worker(service: Service, spec: dict[str, Any], undisturbed: str) -> None:
    job_id = service.submit(spec)
    with Watch(service, job_id) as watch:
        service.wait_for_step(job_id, 11)  # one checkpoint is there, and most is yet to come
        trainer = trainer_of(service, job_id)
        worker = service.pid("worker")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: trainer not in service.trainers(job_id), 60, "the trainer to end after its worker")
        watch.until("succeeded", "failed")
    again = ["starting", "running"]
    watch.check(["queued", "preparing", "queued", *again, "queued", *again, "succeeded"])
    assert weights(service, job_id) == undisturbed
    assert service.pid("worker") != worker
    curve = service.client.get(f"/jobs/{job_id}/metrics", params={"names": "loss"}).json()["loss"]
    assert [step for step, _ in curve] == list(range(1, STEPS + 1)), "a hole where the worker died"


def answers(service: Service) -> bool:
    try:
        return service.client.get("/healthz").status_code == 200
    except Exception:
        return False


def test_sigterm_to_the_worker_hands_back(service: Service, spec: dict[str, Any], undisturbed: str) -> None:
    job_id = service.submit(spec)
    with Watch(service, job_id) as watch:
        service.wait_for_step(job_id, 13)
        worker = service.pid("worker")
        began = time.monotonic()
        os.kill(worker, signal.SIGTERM)
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), 90, "the worker to leave")
        assert time.monotonic() - began < float(SHORT["EFT_STOP_GRACE_SECONDS"]), "nobody had to be killed"
        watch.until("succeeded", "failed")
    again = ["starting", "running"]
    watch.check(["queued", "preparing", "queued", *again, "queued", *again, "succeeded"])
    assert weights(service, job_id) == undisturbed
    reasons = [event["data"].get("reason", "") for event in events(service, job_id) if event["type"] == "status"]
    assert any("is leaving" in reason for reason in reasons)
    (resumed,) = [event["data"]["step"] for event in events(service, job_id) if event["type"] == "resumed"]
    assert resumed == last_step(service, job_id, attempt=2), "what it had done was done again"


def last_step(service: Service, job_id: str, attempt: int) -> int:
    path = service.data / "runs" / job_id / f"attempt-{attempt}" / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return max(line["step"] for line in lines if line["type"] == "metrics")


def events(service: Service, job_id: str) -> list[dict[str, Any]]:
    return service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000}).json()["data"]


def test_kill_9_of_the_api_disturbs_no_job_and_a_drained_node_loses_at_most_the_running_micro_step(
    service: Service, spec: dict[str, Any]
) -> None:
    """Two jobs with the same bits: one trains while the API is killed, the other one's node is drained. Windows of 16
    micro-steps, so that the drain comes inside one; the worker is killed while the node is drained."""
    training = {**spec["training"], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    fine = {**spec, "training": {**training, "max_steps": 9}}
    alone = service.submit(fine)
    service.wait_for_step(alone, 2)
    api, trainer = service.pid("api"), trainer_of(service, alone)
    os.kill(api, signal.SIGKILL)
    wait_for(lambda: service.pid("api") != api, 90, "another API")
    wait_for(lambda: answers(service), 90, "the API to answer")
    assert service.trainers(alone) in ([trainer], []), "the job was disturbed"
    service.wait(alone, "succeeded", "failed")
    assert service.statuses(alone) == UNDISTURBED
    job_id = service.submit(fine)
    service.wait_for_step(job_id, 2)
    node = service.client.get("/nodes").json()["data"][0]["name"]
    assert service.client.post(f"/nodes/{node}/drain", params={"reason": "a test"}).json()["state"] == "draining"
    wait_for(lambda: service.client.get(f"/nodes/{node}").json()["state"] == "drained", 120, "drained")
    assert service.trainers(job_id) == []
    (back,) = [e["data"] for e in events(service, job_id) if e["type"] == "status" and "drained" in e["data"]]
    assert back["drained"] == {"node": node, "reason": "a test"} and back["actor"].startswith("user-")
    worker = service.pid("worker")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: service.pid("worker") != worker, 90, "another worker")
    time.sleep(3)  # sweeps ring once a second
    assert service.job(job_id)["status"] == "queued", "the next worker of the node claims nothing either"
    assert service.client.post(f"/nodes/{node}/undrain").json()["state"] in ("serving", "silent")
    ended = service.wait(job_id, "succeeded", "failed")
    assert ended["status"] == "succeeded" and ended["attempt"] == 3, service.describe(job_id)
    told = events(service, job_id)
    left = [e["data"] for e in told if e["type"] == "checkpoint" and e["attempt"] == 2][-1]
    (resumed,) = [e["data"] for e in told if e["type"] == "resumed"]
    place = (left["step"], left["micro_step"])
    assert (resumed["step"], resumed["micro_step"]) == place, "not one micro-step was done twice"
    assert left["step"] >= last_step(service, job_id, attempt=2)
    assert weights(service, job_id) == weights(service, alone)


def test_pause_and_resume(service: Service, spec: dict[str, Any], undisturbed: str) -> None:
    job_id = service.submit(spec)
    with Watch(service, job_id) as watch:
        service.wait_for_step(job_id, 13)
        assert service.client.post(f"/jobs/{job_id}/pause").status_code == 200
        watch.until("paused")
        assert service.trainers(job_id) == []
        assert service.client.post(f"/jobs/{job_id}/resume").status_code == 200
        watch.until("succeeded", "failed")
    again = ["starting", "running"]
    watch.check(["queued", "preparing", "queued", *again, "pausing", "paused", "queued", *again, "succeeded"])
    assert weights(service, job_id) == undisturbed


def test_cancel_of_a_running_job(service: Service, spec: dict[str, Any]) -> None:
    job_id = service.submit({**spec, "training": {**spec["training"], "max_steps": 100_000}})
    waiting = service.submit({**spec, "training": {**spec["training"], "max_steps": 100_000}})  # for the one slot
    with Watch(service, job_id) as watch:
        service.wait_for_step(job_id, 2)
        assert service.client.post(f"/jobs/{job_id}/cancel").status_code == 200
        watch.until("cancelled")
        assert service.trainers(job_id) == []
    watch.check(["queued", "preparing", "queued", "starting", "running", "stopping", "cancelled"])
    service.wait(waiting, "starting", "running")
    assert service.client.post(f"/jobs/{waiting}/cancel").status_code == 200
    service.wait(waiting, "cancelled")
