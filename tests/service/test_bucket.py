"""A data root in an object store, against a real server of its protocol: what is there is whole, what is fetched is
what was stored, and what a process was killed over is seen by nobody."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert, select, update

from api.files.checking import Checkers
from api.files.upload import FaultyFile, Upload
from api.jobs.output import logs
from api.models import service as models
from api.models.upload import ModelUpload
from core import HOME
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Artifact, DiskUsage, Job, Project, User
from core.errors import ModelError, NoSpace
from core.ids import new_id
from core.jobs.lifecycle.registry import uploads
from core.jobs.lifecycle.retention import RetentionRules
from core.jobs.lifecycle.submit import Actor, submit
from core.jobs.views.rollouts import RolloutPage, newest_rollout, rollout_page
from core.settings import Settings
from core.spec.axes.model import HubModel
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.run.chain import HandedBack, ModelChain, RewardModelPin, WeightFile
from core.storage.bucket import PART, Bucket
from core.storage.layout import Layout
from core.storage.open import open_store
from core.storage.store import Folder, ObjectChanged, StoreAway
from core.train.checkpoint import store as checkpoints
from tests.support import boxes
from tests.support.claims import claim_of
from tests.support.service import wait_for
from tests.support.uploads import adapter_files
from worker.store import objects, publisher
from worker.store.local_cache import LocalCache
from worker.store.publisher import Publisher
from worker.store.staging import Staging

ADA = Actor("user-ada", "proj-lab")
JOB = "job-01kar3v8x5m2h6n9qst4wyz0bc"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with boxes.object_store(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def settings(server: int, tmp_path: Path) -> Settings:
    """A bucket and a work folder of the test's own."""
    name = f"bucket-{tmp_path.name.replace('_', '-').lower()[-40:].strip('-')}"
    assert httpx.put(f"http://127.0.0.1:{server}/{name}", trust_env=False).status_code == 200
    return Settings(
        data=f"s3://{name}/eft", work=tmp_path / "work", s3_endpoint=f"http://127.0.0.1:{server}",
        s3_access_key_id="lab", s3_secret_access_key="secret", min_free_bytes=0,
    )  # fmt: skip


@pytest.fixture
def bucket(settings: Settings) -> Bucket:
    found = open_store(settings)
    assert isinstance(found, Bucket)
    return found


@pytest.fixture
def layout(settings: Settings) -> Layout:
    layout = Layout(settings.root)
    layout.create()
    return layout


def keys(bucket: Bucket, prefix: str = "") -> list[str]:
    return sorted(entry.key for entry in bucket.tree(prefix))


# -- objects


def test_small_objects(bucket: Bucket) -> None:
    assert bucket.create("a/mark", b"one") and not bucket.create("a/mark", b"two")
    assert bucket.read("a/mark") == b"one"
    bucket.write("a/mark", b"three")
    assert (bucket.size("a/mark"), bucket.size("a/other")) == (5, None)
    with pytest.raises(FileNotFoundError):
        bucket.read("a/other")
    with pytest.raises(ObjectChanged):
        bucket.open("a/mark", size=7, start=0, length=7)
    source = bucket.open("a/mark", size=5, start=1, length=3)
    assert source.read(100) == b"hre"
    source.close()
    bucket.delete("a/mark")
    bucket.delete("a/mark")
    assert keys(bucket) == []


def test_a_large_file_goes_up_and_comes_down_in_parts(bucket: Bucket, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 37
    (tmp_path / "large").write_bytes(content)
    bucket.put_file("files/large", tmp_path / "large")
    assert [(entry.key, entry.bytes) for entry in bucket.tree("files")] == [("files/large", len(content))]
    digest = bucket.get_file("files/large", tmp_path / "back", len(content))
    assert digest == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "back").read_bytes() == content
    with pytest.raises(ObjectChanged):
        bucket.get_file("files/large", tmp_path / "longer", len(content) + 1)
    bucket.discard("files")
    assert keys(bucket) == []


KILLED = """
import sys
from core.settings import Settings
from core.storage.bucket import PART, Bucket
bucket = Bucket(Settings())
sent = bucket.incoming("files/half", __import__("pathlib").Path(sys.argv[1]))
sent.write(bytes(2 * PART))
print("sent", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_sent_is_seen_by_nobody_and_swept(settings: Settings, bucket: Bucket) -> None:
    environment = os.environ | {
        "EFT_DATA": settings.data,
        "EFT_S3_ENDPOINT": settings.s3_endpoint,
        "EFT_S3_ACCESS_KEY_ID": settings.s3_access_key_id,
        "EFT_S3_SECRET_ACCESS_KEY": settings.s3_secret_access_key,
    }
    command = [sys.executable, "-c", KILLED, str(settings.work / "part")]
    sender = subprocess.Popen(
        command, cwd=HOME, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None and sender.stdin is not None
    assert sender.stdout.readline() == "sent\n"
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    sender.stdin.close()
    sender.stdout.close()
    assert keys(bucket) == [] and bucket.size("files/half") is None
    assert bucket.sweep(older_than=3600.0) == 1  # of any age: this server says of all uploads that 2010 began them
    assert bucket.sweep(older_than=-60.0) == 0


def test_what_a_store_refuses_is_said_in_words(settings: Settings) -> None:
    def words(**changes: str) -> str:
        with pytest.raises(StoreAway) as caught:
            Bucket(settings.model_copy(update=changes)).read("x")
        return caught.value.message

    assert "create the bucket first" in words(data="s3://there-is-none/eft")
    assert "cannot be reached" in words(s3_endpoint="http://127.0.0.1:9") and "EFT_S3_ENDPOINT" in words(
        s3_endpoint="http://127.0.0.1:9"
    )


# -- the API's side


def test_an_upload_streams_in_and_a_refused_one_leaves_nothing(
    settings: Settings, bucket: Bucket, layout: Layout
) -> None:
    row = json.dumps({"text": "lamp " * 100_000}).encode() + b"\n"
    checkers = Checkers()
    upload = Upload(layout, bucket, settings, checkers)
    for _ in range(80):  # 40 MB
        upload.write(row)
    assert keys(bucket) == [], "nothing is there before all of it is"
    stored = upload.finish()
    assert bucket.size(f"files/{stored.id}") == stored.bytes == 80 * len(row) > 2 * PART
    assert list(layout.uploads.iterdir()) == []

    refused = Upload(layout, bucket, settings, checkers)
    for _ in range(80):
        refused.write(row)
    refused.write(b"{not json\n")
    with pytest.raises(FaultyFile):
        refused.finish()
    refused.abort()
    assert list(layout.uploads.iterdir()) == []
    listing = bucket._s3.list_multipart_uploads
    wait_for(lambda: not listing(Bucket=bucket._bucket).get("Uploads"), 30, "the parts to go")
    assert keys(bucket) == [f"files/{stored.id}"]
    checkers.close()


def test_a_log_in_parts_reads_as_the_file_does(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LOG_PART", 1000)
    run = tmp_path / "runs" / JOB / "attempt-1"
    run.mkdir(parents=True)
    sender = Publisher(bucket, run, f"runs/{JOB}/attempt-1", 2, threading.Event())
    with (run / "log.txt").open("wb") as log:
        for number in range(150):
            log.write(f"line {number} ü\n".encode())
            log.flush()
            if number in (10, 90, 149):
                sender._send_log()
    here, there = Folder(tmp_path), bucket
    for asked in ({}, {"offset": 0}, {"offset": 1234}, {"offset": 10**6}, {"tail": 3}, {"tail": 0}):
        assert logs.of_run(here, f"runs/{JOB}/attempt-1", **asked) == logs.of_run(
            there, f"runs/{JOB}/attempt-1", **asked
        ), asked
    assert logs.of_run(there, f"runs/{JOB}/attempt-2") == logs.LogWindow("", 0, 0)
    assert sender.finish((), False, lambda _: True)


# -- the worker's side


def write_checkpoint(run: Path, name: str, content: bytes) -> None:
    checkpoints.write(run / "checkpoints", name, lambda folder: _fill(folder, content))


def _fill(folder: Path, content: bytes) -> None:
    (folder / "weights").write_bytes(content)
    (folder / "state.json").write_text("{}")


def test_a_checkpoint_is_there_with_its_manifest_and_another_box_goes_on_from_it(
    bucket: Bucket, layout: Layout, tmp_path: Path
) -> None:
    run, key = layout.attempt(JOB, 1), f"runs/{JOB}/attempt-1"
    run.mkdir(parents=True)
    lost = threading.Event()
    sender = Publisher(bucket, run, key, keep_last=2, lost=lost)
    for step in (10, 20, 30):
        write_checkpoint(run, f"step-{step:08d}", b"weights of %d" % step)
        if step == 20:
            write_checkpoint(run, "best-00000020", b"the best")
        sender.checkpoint(f"checkpoints/step-{step:08d}")
        checkpoints.prune(run / "checkpoints", 1)  # the trainer does not wait for the upload
        manifest = f"{key}/checkpoints/step-{step:08d}/manifest.json"
        wait_for(lambda manifest=manifest: bucket.size(manifest) is not None, 60, manifest)
    wait_for(lambda: not any("step-00000010" in one for one in keys(bucket)), 60, "keep_last")
    assert sender.finish((), True, lambda _: True)
    assert not (run / "outgoing").exists()

    # A box lost its power between the files of the next and their manifest.
    bucket.write(f"{key}/checkpoints/step-00000040/weights", b"half")
    other = Layout(tmp_path / "other")
    other.create()
    copies = LocalCache(bucket, other, 0, 0)
    stage = Staging(copies, claim_of(JOB, 2))
    stage._checkpoints(lambda: None)
    found = checkpoints.newest_first([other.attempt(JOB, 1) / "checkpoints"])
    assert [(one.step, checkpoints.fault(one.path)) for one in found] == [(30, None)]
    assert (found[0].path / "weights").read_bytes() == b"weights of 30"
    assert (other.attempt(JOB, 1) / "checkpoints" / "best-00000020" / "weights").read_bytes() == b"the best"

    # What was damaged in the store is not used, and is not offered any more; the one before is.
    bucket.write(f"{key}/checkpoints/step-00000030/weights", b"weights of 3O")
    third = Layout(tmp_path / "third")
    third.create()
    Staging(LocalCache(bucket, third, 0, 0), claim_of(JOB, 2))._checkpoints(lambda: None)
    assert [one.step for one in checkpoints.newest_first([third.attempt(JOB, 1) / "checkpoints"])] == [20]
    assert bucket.size(f"{key}/checkpoints/step-00000030/manifest.json") is None
    assert list((third.root / "fetching").iterdir()) == []

    # One that is shorter than it was is damaged, too: nobody waits for the store because of it.
    bucket.write(f"{key}/checkpoints/step-00000020/weights", b"")
    fourth = Layout(tmp_path / "fourth")
    fourth.create()
    Staging(LocalCache(bucket, fourth, 0, 0), claim_of(JOB, 2))._checkpoints(lambda: None)
    assert checkpoints.newest_first([fourth.attempt(JOB, 1) / "checkpoints"]) == []


def test_a_step_that_is_saved_twice_stays_in_the_bucket(bucket: Bucket, layout: Layout, tmp_path: Path) -> None:
    """A stop request right after a periodic save: two versions of one moment, and only one may be kept."""
    run, key = layout.attempt(JOB, 1), f"runs/{JOB}/attempt-1"
    run.mkdir(parents=True)
    sender = Publisher(bucket, run, key, keep_last=1, lost=threading.Event())
    for name in ("step-00000010", "step-00000010-v2"):
        write_checkpoint(run, name, name.encode())
        sender.checkpoint(f"checkpoints/{name}")
        manifest = f"{key}/checkpoints/{name}/manifest.json"
        wait_for(lambda manifest=manifest: bucket.size(manifest) is not None, 60, manifest)
    assert sender.finish((), True, lambda _: True)
    assert not any("step-00000010/" in one for one in keys(bucket))
    other = Layout(tmp_path / "other")
    other.create()
    Staging(LocalCache(bucket, other, 0, 0), claim_of(JOB, 2))._checkpoints(lambda: None)
    (found,) = checkpoints.newest_first([other.attempt(JOB, 1) / "checkpoints"])
    assert ((found.path / "weights").read_bytes(), found.step) == (b"step-00000010-v2", 10)


class Slow(Bucket):
    """A network that takes checkpoints more slowly than they come: it stops at the first one's weights."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def put_file(self, key: str, path: Path) -> None:
        if key.endswith("state.json"):
            self.under_way.set()
            assert self.go_on.wait(60)
        super().put_file(key, path)


def test_checkpoints_that_come_faster_than_the_network_takes_them_arrive(settings: Settings, layout: Layout) -> None:
    slow, run = Slow(settings), layout.attempt(JOB, 1)
    key = f"runs/{JOB}/attempt-1"
    sender = Publisher(slow, run, key, keep_last=2, lost=threading.Event())
    for step in (10, 20, 30):
        write_checkpoint(run, f"step-{step:08d}", b"weights of %d" % step)
        if step == 30:  # the trainer was removing this one when its files were looked at
            (run / "checkpoints" / "best-00000030").mkdir()
            (run / "checkpoints" / "best-00000030" / "weights").write_bytes(b"half")
        sender.checkpoint(f"checkpoints/step-{step:08d}")
        checkpoints.prune(run / "checkpoints", 1)
        assert slow.under_way.wait(60)
    slow.go_on.set()
    assert sender.finish((), True, lambda _: True)
    manifests = [name for name in keys(slow, key) if name.endswith("manifest.json")]
    assert manifests == [f"{key}/checkpoints/step-{step:08d}/manifest.json" for step in (10, 30)]


def test_a_worker_that_has_lost_the_job_publishes_nothing_more(bucket: Bucket, layout: Layout) -> None:
    run, lost = layout.attempt(JOB, 1), threading.Event()
    write_checkpoint(run, "step-00000010", b"x")
    lost.set()
    sender = Publisher(bucket, run, f"runs/{JOB}/attempt-1", 2, lost)
    sender.checkpoint("checkpoints/step-00000010")
    sender.finish((), True, lambda _: True)
    assert not [key for key in keys(bucket) if key.endswith("manifest.json")]


def test_a_store_that_is_away_is_waited_for(settings: Settings, layout: Layout, server: int) -> None:
    away = Bucket(settings.model_copy(update={"data": "s3://comes-later/eft"}))
    run = layout.attempt(JOB, 1)
    write_checkpoint(run, "step-00000010", b"x")
    (run / "artifacts").mkdir()
    (run / "artifacts" / "adapter").write_bytes(b"weights")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "00000000.jsonl").write_bytes(b"{}\n{}\n")
    (run / "scores").mkdir()
    (run / "scores" / "0f.json").write_bytes(b"[0.5]")
    sender = Publisher(away, run, f"runs/{JOB}/attempt-1", 2, threading.Event())
    sender.checkpoint("checkpoints/step-00000010")
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        assert httpx.put(f"http://127.0.0.1:{server}/comes-later", trust_env=False).status_code == 200
        return False

    assert sender.finish([{"path": "adapter"}], True, wait)
    assert len(asked) == 1
    assert away.read(f"runs/{JOB}/attempt-1/artifacts/adapter") == b"weights"
    assert away.size(f"runs/{JOB}/attempt-1/checkpoints/step-00000010/manifest.json") is not None
    shutil.rmtree(run / "scores")
    LocalCache(away, layout, most=2500, reserve=0).small(f"runs/{JOB}/attempt-1/scores")  # as another box does
    assert (run / "scores" / "0f.json").read_bytes() == b"[0.5]"
    page = rollout_page(away, layout, JOB, 2, 0, skip=1, limit=1)  # as the API serves it
    assert (newest_rollout(away, layout, JOB, 2), page) == (0, RolloutPage([{}], False))


def test_copies_are_bounded_and_what_is_in_use_stays(bucket: Bucket, layout: Layout) -> None:
    copies = LocalCache(bucket, layout, most=2500, reserve=0)
    names = [f"file-01kar3v8x5m2h6n9qst4wyz0b{letter}" for letter in "cdef"]
    digests = {}
    for name in names:
        content = os.urandom(1000)
        bucket.write(f"files/{name}", content)
        digests[name] = hashlib.sha256(content).hexdigest()
    copies.hold(f"files/{names[0]}")
    for age, name in enumerate(names[:3]):
        assert copies.file(f"files/{name}", 1000, digests[name])
        os.utime(layout.files / name, (time.time() - 100 + age,) * 2)
    # Two have room. The oldest is in use, so the next one went.
    assert sorted(path.name for path in layout.files.iterdir()) == [names[0], names[2]]
    copies.release([f"files/{names[0]}"])
    assert copies.file(f"files/{names[3]}", 1000, digests[names[3]])
    assert sorted(path.name for path in layout.files.iterdir()) == [names[2], names[3]]
    assert not copies.file(f"files/{names[0]}", 1000, "0" * 64), "not what was uploaded"
    assert not copies.file("files/file-01kar3v8x5m2h6n9qst4wyz0bz", 1000, "0" * 64), "not there"
    with pytest.raises(NoSpace, match="EFT_WORK"):
        LocalCache(bucket, layout, most=0, reserve=1 << 60).make_room(1)


# -- housekeeping


def test_what_rules_let_go_and_what_nobody_knows(bucket: Bucket, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'lab.db'}")
    migrate.upgrade(database)
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
        spec = resolve(JobSpec.model_validate({"model": "team/tiny", "data": "/rows.jsonl"}))
        old, young = (submit(session, ADA, spec).id for _ in range(2))
        ended = {"status": "succeeded", "attempt": 2}
        session.execute(update(Job).where(Job.id == old).values(**ended, finished_at=time.time() - 40 * 86_400))
        session.execute(update(Job).where(Job.id == young).values(**ended, finished_at=time.time() - 86_400))
        for job_id in (old, young):
            row = {"attempt": 2, "path": "adapter", "kind": "adapter", "bytes": 1, "sha256": "0" * 64}
            session.execute(
                insert(Artifact).values(job_id=job_id, owner_id=ADA.user_id, project_id=ADA.project_id, **row)
            )
    parts = [
        f"attempt-{n}/{part}"
        for n in (1, 2)
        for part in ("checkpoints/s/w", "artifacts/adapter", "log/0000000000000000")
    ]
    unknown = new_id("job")
    for job_id in (old, young, unknown):
        for part in parts:
            bucket.write(f"runs/{job_id}/{part}", b"x" * 10)
    orphan = new_id("file")
    bucket.write(f"files/{orphan}", b"x")
    bucket.write("models/hub/a/b/manifest.json", b"x" * 5)

    assert objects.remove_orphans(database, bucket) == [], "they may be about to get their rows"
    assert set(objects.remove_orphans(database, bucket, older_than=-60.0)) == {f"files/{orphan}", f"runs/{unknown}"}
    objects.measure(database, bucket)
    with database.read() as session:
        used = {kind: size for kind, size in session.execute(select(DiskUsage.kind, DiskUsage.bytes))}  # noqa: C416
    assert {kind: used[kind] for kind in ("checkpoints", "runs", "models")} == {
        "checkpoints": 40, "runs": 80, "models": 5
    }  # fmt: skip
    assert objects.collect(database, bucket, RetentionRules(checkpoints_days=30)) == 30
    left = [key.removeprefix(f"runs/{old}/") for key in keys(bucket, f"runs/{old}")]
    assert left == ["attempt-1/log/0000000000000000", "attempt-2/artifacts/adapter", "attempt-2/log/0000000000000000"]
    assert len(keys(bucket, f"runs/{young}")) == 6
    assert objects.collect(database, bucket, RetentionRules(checkpoints_days=30, history_days=30)) == 20
    assert keys(bucket, f"runs/{old}") == [f"runs/{old}/attempt-2/artifacts/adapter"]
    database.dispose()


@pytest.mark.parametrize("scores", [False, True])
def test_the_weights_that_a_job_starts_from_come_from_the_bucket(bucket: Bucket, tmp_path: Path, scores: bool) -> None:
    """Those of the pinned hashes and no others."""
    parent, content = (
        "job-01kar3v8x5m2h6n9qst4wyz0bd",
        {"adapter_model.safetensors": b"w", "adapter_config.json": b"{}"},
    )
    key = f"runs/{parent}/attempt-2/artifacts/adapter"
    for name, data in content.items():
        bucket.write(f"{key}/{name}", data)
    files = [
        WeightFile(path=f"adapter/{name}", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in content.items()
    ]
    handed = HandedBack(job=parent, attempt=2, folder="adapter", files=files)
    chain = ModelChain(root=HubModel(id="team/tiny"), adapter=handed)
    here = Layout(tmp_path / "here")
    here.create()
    child = dataclasses.replace(claim_of(JOB, 1), chain=chain.model_dump(mode="json"))
    if scores:  # the answers of this job
        pin = RewardModelPin(reward="model", field="stage.reward.0.model", chain=chain, spec=child.spec, lineage=[])
        child = dataclasses.replace(child, chain=None, reward_models=[pin.model_dump(mode="json")])
    stage = Staging(LocalCache(bucket, here, 0, 0), child)
    stage._handed_back(lambda: None)
    assert {path.name: path.read_bytes() for path in (here.root / key).iterdir()} == content
    stage.close()

    bucket.write(f"{key}/adapter_model.safetensors", b"x")
    there = Layout(tmp_path / "there")
    there.create()
    Staging(LocalCache(bucket, there, 0, 0), child)._handed_back(lambda: None)
    assert [path.name for path in (there.root / key).iterdir()] == ["adapter_config.json"], "another one is not taken"


def test_a_model_that_is_uploaded_lies_in_the_bucket_until_it_is_deleted(
    settings: Settings, bucket: Bucket, layout: Layout, tmp_path: Path
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'lab.db'}")
    migrate.upgrade(database)
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))

    def sent() -> ModelUpload:
        upload = ModelUpload(layout, bucket, settings, 0)
        for name, content in adapter_files():
            upload.begin(name)
            upload.write(content)
        return upload

    refused = sent()
    refused.begin("adapter_model.bin.safetensors")
    refused.write(b"torn")
    with pytest.raises(ModelError):
        refused.check()
    refused.abort()
    gone = sent()
    gone.finish(gone.check())
    assert len(keys(bucket)) == 2
    gone.abort()  # its rows could not be written
    assert keys(bucket) == [] and not list(layout.uploads.iterdir()) and not list(layout.runs.iterdir())

    upload = sent()
    stored = upload.finish(upload.check())
    spec = {"model": "team/tiny", "data": "/dev/null", "method": stored.found.method.model_dump(exclude_none=True)}
    with database.write() as session:
        over = resolve(JobSpec.model_validate(spec))
        model = uploads.record(session, ADA, stored, name="Far away", over=over)
        chain = submit(
            session,
            ADA,
            resolve(JobSpec.model_validate(spec | {"model": {"type": "job", "id": stored.id, "adapter": "continue"}})),
        ).chain
    here = Layout(tmp_path / "here")
    here.create()
    stage = Staging(LocalCache(bucket, here, 0, 0), dataclasses.replace(claim_of(JOB, 1), chain=chain))
    stage._handed_back(lambda: None)
    folder = here.artifacts(stored.id, 1) / "adapter"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict(adapter_files())
    stage.close()
    with database.write() as session:
        session.execute(update(Job).where(Job.kind == "train").values(status="cancelled"))
    removed = models.delete(database, settings, layout, bucket, ADA, model)
    assert removed["freed_bytes"] == sum(len(content) for _, content in adapter_files())
    assert keys(bucket) == []
    database.dispose()
