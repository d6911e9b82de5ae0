"""Whatever fails in a worker around one job, the slot is free within seconds, and the next project's job has it.

A real service, in whose worker one call after the other raises (tests/support/faulty). A lease here is ten minutes
long: a slot that only came back with it would fail these tests.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from api.auth import keys
from core.db.engine import Database, db_now
from core.db.tables import Allocation, Job
from core.storage.layout import Layout
from tests.support.hostile.cases import Case, cases, write
from tests.support.hub import Hub, serving
from tests.support.service import ROOT, Service, running, wait_for

SECONDS = 90
"""Far more than a slow machine needs, and far less than a lease."""


class Neighbours:
    """A service with two projects, and the faults of its worker.

    The uploads of both (but `kept`) are gone from the disk, so that each job ends in words once it has got all the way
    to its trainer's order: no test waits for torch.
    """

    def __init__(self, service: Service, faults: Path, model: Path, hostile: Path, hub: Hub) -> None:
        self.hub = hub
        self.service, self.faults, self.model, self.hostile = service, faults, str(model), hostile
        self.database = Database(f"sqlite:///{service.data / 'eft.db'}")
        key = keys.create(self.database, project="neighbour", user="bob", name="test")
        self.neighbour = httpx.Client(
            base_url=service.client.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )
        self.files = {client: self.upload(client) for client in (service.client, self.neighbour)}
        self.kept = self.upload(service.client, keep=True)
        self.lengths = itertools.count(32)

    def upload(self, client: httpx.Client, *, keep: bool = False) -> str:
        rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(4)).encode()
        reply = client.post("/files", files={"file": ("rows.jsonl", rows)})
        assert reply.status_code == 201, reply.text
        if not keep:
            Layout(self.service.data).file(reply.json()["id"]).unlink()
        return str(reply.json()["id"])

    def build(self, name: str) -> str:
        """One of the hostile folders; its path."""
        folder, wanted = self.hostile / re.sub(r"[^a-z0-9.]+", "-", name), name.removesuffix(" of the hub")
        greedy = Case(GREEDY, lambda folder: write("config.json", '{"a": [[]' + ",[]" * (1 << 23) + "]}")(folder))
        next(case for case in [greedy, *cases()] if case.name == wanted).build(Path(self.model), folder)
        return str(folder)

    def submit(self, client: httpx.Client, phase: str) -> str:
        training = {"max_length": next(self.lengths)}  # a preview that was asked for before is not made again
        if phase == "preview":
            path, asked = f"/files/{self.files[client]}/preview", {"model": self.model, "training": training}
        else:
            path, asked = "/jobs", {"model": self.model, "data": self.files[client], "training": training}
        reply = client.post(path, json=asked)
        assert reply.status_code in (201, 202), reply.text
        return str(reply.json()["id"])

    def row(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()

    def end(self, job_id: str) -> dict[str, Any]:
        """The failure with which it ends."""

        def describe() -> str:
            log = (self.service.data / "logs" / "worker.log").read_text()[-6000:]
            return f"{self.row(job_id).status}: {self.row(job_id).reason}\n{log}"

        wait_for(lambda: self.row(job_id).finished_at, SECONDS, f"the end of {job_id}", describe)
        failure = self.row(job_id).failure
        assert failure is not None, describe()
        return dict(failure)

    def left(self, place: str) -> int:
        """Calls of it that are still to fail."""
        path = self.faults / place
        return int(path.read_text() or 1) if path.exists() else 0

    def held(self) -> list[str]:
        """Jobs that have a slot."""
        with self.database.read() as session:
            return list(session.execute(select(Allocation.job_id).where(Allocation.released_at.is_(None))).scalars())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Neighbours]:
    folder = tmp_path_factory.mktemp("net")
    for made in (faults := folder / "faults", hostile := folder / "hostile"):
        made.mkdir()
    environment = {
        "EFT_MODEL_ROOTS": f"{models}:{hostile}",
        "EFT_PREPARE_BYTES": str(384 << 20),
        "EFT_LEASE_SECONDS": "600",
        "EFT_FENCE_SECONDS": "300",
        "EFT_TEST_FAULTS": str(faults),
        "PYTHONPATH": str(ROOT / "tests" / "support" / "faulty"),
    }
    with serving() as hub:
        for service in running(folder, environment | {"HF_ENDPOINT": hub.url, "no_proxy": "*"}):
            lab = Neighbours(service, faults, models / "tiny", hostile, hub)
            yield lab
            lab.database.dispose()
            lab.neighbour.close()


GREEDY = "a config of many numbers"
GONE, TOLD = "invalid_spec", "worker_error"
"""A job got as far as it can; what its worker failed with is its outcome."""


@pytest.mark.parametrize(
    ("place", "times", "ends"),
    [
        ("claim.prepare", 1, GONE),
        ("claim.train", 1, GONE),
        ("claim.preview", 1, GONE),
        ("take.prepare", 1, GONE),
        ("take.train", 2, GONE),
        ("attempt.prepare", 1, GONE),
        ("attempt.train", 1, GONE),
        ("with_shape.prepare", 1, TOLD),
        ("finish.prepare", 1, TOLD),
        ("finish.train", 1, TOLD),
        ("finish.preview", 1, TOLD),
        ("finish.prepare", 2, GONE),
        ("finish.train", 2, GONE),
    ],
)
def test_the_next_job_of_another_project_has_the_slot(lab: Neighbours, place: str, times: int, ends: str) -> None:
    phase = place.partition(".")[2]
    (lab.faults / place).write_text(str(times))
    struck = lab.submit(lab.service.client, phase)
    wait_for(lambda: lab.left(place) < times, SECONDS, "the fault to strike")
    neighbour = lab.submit(lab.neighbour, phase)
    assert lab.end(neighbour)["code"] == GONE
    failure = lab.end(struck)
    assert lab.left(place) == 0
    assert (failure["code"], failure["class"]) == (ends, "internal" if ends == TOLD else "user"), failure
    if ends == TOLD:
        assert failure["message"] == "the worker failed: OverflowError; see its log"
    wait_for(lambda: not lab.held(), SECONDS, "all slots to be free", lambda: str(lab.held()))


def test_a_stray_allocation_is_ended(lab: Neighbours) -> None:
    """As a job left it whose end was never written whole: the database says that the slot is taken."""
    over = lab.submit(lab.service.client, "train")
    lab.end(over)
    with lab.database.write() as session:
        one = select(Allocation.slot).where(Allocation.job_id == over, Allocation.slot == "prepare-0")
        assert session.execute(one).scalar_one()
        stray = update(Allocation).where(Allocation.job_id == over, Allocation.slot == "prepare-0")
        session.execute(stray.values(released_at=None))
    assert lab.end(lab.submit(lab.neighbour, "train"))["code"] == GONE
    assert not lab.held()


def test_what_another_worker_holds_is_left_to_its_lease(lab: Neighbours) -> None:
    other = lab.submit(lab.service.client, "train")
    lab.end(other)
    with lab.database.write() as session:
        theirs = {"status": "preparing", "worker": "wrk-other", "node": "elsewhere", "lease_until": db_now() + 3600}
        session.execute(update(Job).where(Job.id == other).values(**theirs, attempt=1))
        first = update(Allocation).where(Allocation.job_id == other, Allocation.attempt == 1)
        session.execute(first.values(released_at=None))
    waits = lab.submit(lab.neighbour, "train")
    log = lab.service.data / "logs" / "worker.log"
    wait_for(lambda: "though nothing runs there" in log.read_text(), SECONDS, "a claim of the slot")
    assert lab.row(waits).status == "queued" and lab.held() == [other]
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == other).values(lease_until=db_now() - 1))
    assert lab.end(waits)["code"] == GONE, "once the lease is over"
    assert lab.service.client.post(f"/jobs/{other}/cancel").status_code == 200


def test_a_job_that_cannot_be_claimed_lets_others_go_first(lab: Neighbours) -> None:
    """Its next attempt is there already: every claim of it fails, and it is the oldest of the line."""
    poison = lab.submit(lab.service.client, "train")
    lab.end(poison)
    with lab.database.write() as session:
        waits = {"status": "queued", "attempt": 1, "finished_at": None, "failure": None, "created_at": 0.0}
        session.execute(update(Job).where(Job.id == poison).values(**waits))
    assert lab.end(lab.submit(lab.neighbour, "train"))["code"] == GONE
    assert lab.row(poison).status == "queued" and lab.row(poison).not_before is not None
    assert lab.service.client.post(f"/jobs/{poison}/cancel").status_code == 200


REFUSED = (
    "config text_config 10^400", "config hidden_size 10^400", "config num_hidden_layers 10^12",
    "config more layers than files", "header shape negative", "config.json deep", "config.json is a folder",
    "model.safetensors is a pipe",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_model_is_refused_at_submit(lab: Neighbours, name: str) -> None:
    asked = {"model": lab.build(name), "data": lab.files[lab.service.client]}
    reply = lab.service.client.post("/jobs", json=asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "model_unreadable"), reply.text
    assert reply.json()["error"]["field"] == "model.path"
    planned = lab.service.client.post("/jobs", json=asked, params={"dry_run": True})
    assert planned.status_code in (200, 422), planned.text


@pytest.mark.parametrize(
    ("name", "failure", "code"),
    [
        ("config text_config 10^400", "user", "model_unreadable"),
        ("config num_hidden_layers 10^12", "user", "model_unreadable"),
        ("config more layers than files", "user", "model_unreadable"),
        ("config vocab_size -1", "user", "model_unreadable"),
        ("config model_type #3", "user", "model_unsupported"),
        ("header shape negative", "user", "model_unreadable"),
        ("header not JSON", "user", "model_unreadable"),
        ("no tokenizer", "user", "model_unreadable"),
        (GREEDY, "memory", "memory_limit"),
        ("tokenizer.json null", "user", "model_unreadable"),
    ],
)
def test_the_next_job_has_the_slot_of_a_hostile_model(lab: Neighbours, name: str, failure: str, code: str) -> None:
    """It comes from a hub, so that nobody has seen it before it is prepared, and the last one not before it trains."""
    folder = Path(lab.build(f"{name} of the hub"))
    lab.hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    lab.hub.commit = sha1(name.encode()).hexdigest()
    asked = {"model": lab.hub.repo, "data": lab.kept, "training": {"max_steps": 1}}
    reply = lab.service.client.post("/jobs", json=asked)
    assert reply.status_code == 201, reply.text
    struck = reply.json()["id"]
    wait_for(lambda: lab.row(struck).status != "queued", SECONDS, "its preparation")
    assert lab.end(lab.submit(lab.neighbour, "train"))["code"] == GONE
    found = lab.end(struck)
    assert (found["class"], found["code"]) == (failure, code), found
    if failure == "memory":
        assert "EFT_PREPARE_BYTES" in found["message"]
    assert not lab.held()
