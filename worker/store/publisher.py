"""What one attempt brings to an object store: each checkpoint once it is told, rollouts and the log as they grow, and
at the end what it hands back. Everything is local first; a checkpoint is in the store when its manifest is, which goes
up last.

A thread of its own sends, so that leases, events and wishes to stop never wait for an upload. Files of a checkpoint are
linked aside when it is told, so that the trainer may remove its own meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from core.spec.run.checkpoint_names import BEST, superseded
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS, LOG_FILE, ROLLOUTS, SCORES
from core.spec.run.manifest import MANIFEST
from core.spec.run.model_cache import MODELS, REFS, entry_of
from core.storage.bucket import LOG_PART, Bucket, log_key
from core.storage.store import StoreAway

log = logging.getLogger("eft.worker")

OUTGOING = "outgoing"
"""Below the run folder: links to the files of a checkpoint on its way."""
PART = "part-"
"""Before the name of one whose links are being made."""
LOG_SECONDS = 5.0
RETRY_SECONDS = 5.0


class Publisher:
    """Publishes what one attempt makes. `lost`: set when nothing may be written for it any more."""

    def __init__(self, bucket: Bucket, folder: Path, key: str, keep_last: int, lost: threading.Event) -> None:
        self._bucket, self._folder, self._key, self._keep = bucket, folder, key, keep_last
        self._lost = lost
        self._condition = threading.Condition()
        self._waiting: str | None = None
        self._sending: str | None = None
        self._published: list[str] = []
        self._best: set[str] = set()
        self._rollouts: set[str] = set()
        self._logged = 0
        self._part = 0
        self._stopped = False
        self._told = False
        self._thread = threading.Thread(target=self._run, name="eft-publish", daemon=True)
        self._thread.start()

    def checkpoint(self, path: str) -> None:
        """`checkpoints/step-…` of this attempt is complete, and the database has its event. One that waits still is not
        sent any more: this one is further. One that is under way is: else none would ever arrive where they come faster
        than the network takes them."""
        name = Path(path).name
        source = self._folder / CHECKPOINTS
        if not self._lay_aside(source / name):
            return  # removed already: one that is further has been told, or will be
        for best in source.glob(f"{BEST}*"):
            self._lay_aside(best)
        with self._condition:
            passed, self._waiting = self._waiting, name
            under_way = self._sending
            self._condition.notify_all()
        if passed not in (None, name, under_way):
            shutil.rmtree(self._folder / OUTGOING / passed, ignore_errors=True)

    def _lay_aside(self, folder: Path) -> bool:
        """Links to all its files, or nothing where the trainer has removed it meanwhile."""
        target = self._folder / OUTGOING / folder.name
        if target.exists():
            return True
        part = target.with_name(f"{PART}{folder.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700, parents=True)
        try:
            for file in folder.iterdir():
                os.link(file, part / file.name)
            files = json.loads((part / MANIFEST).read_bytes())["files"]
        except FileNotFoundError:
            files = None
        if files is None or any(not (part / name).exists() for name in files):
            shutil.rmtree(part)
            return False
        part.rename(target)
        return True

    def finish(
        self, artifacts: Iterable[Mapping[str, Any]], checkpoints: bool, gives_up: Callable[[float], bool]
    ) -> bool:
        """Send what is left. `checkpoints`: the newest too, since the job goes on. `gives_up` waits so many seconds and
        says whether to end. False: it was given up."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join()
        if not checkpoints:
            self._waiting = None

        left = [f"{ARTIFACTS}/{artifact['path']}" for artifact in artifacts]

        def send() -> None:
            self._send_checkpoint()
            self._send_rollouts()
            self._send_log()
            while left:
                self._bucket.put_file(f"{self._key}/{left[0]}", self._folder / left[0])
                del left[0]  # what has arrived is not sent again

        done = persist(send, gives_up)
        shutil.rmtree(self._folder / OUTGOING, ignore_errors=True)
        return done

    def close(self) -> None:
        """Send nothing more; done already after `finish`."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join()
        shutil.rmtree(self._folder / OUTGOING, ignore_errors=True)

    # -- the thread

    def _run(self) -> None:
        pause = LOG_SECONDS
        while True:
            with self._condition:
                if not self._stopped and (self._waiting is None or pause == RETRY_SECONDS):
                    self._condition.wait(pause)
                if self._stopped:
                    return
            try:
                self._send_checkpoint()
                self._send_rollouts()
                self._send_log()
                pause, self._told = LOG_SECONDS, False
            except (StoreAway, OSError) as error:
                if not self._told:
                    log.warning("cannot copy %s to the data root: %s; trying again", self._key, error)
                pause, self._told = RETRY_SECONDS, True
            except Exception:
                log.exception("publishing %s", self._key)
                pause = RETRY_SECONDS

    def _send_checkpoint(self) -> None:
        with self._condition:
            name = self._sending = self._waiting
        if name is None or self._lost.is_set():
            return
        try:
            self._send_one(name)
        finally:
            with self._condition:
                self._sending, overtaken = None, self._waiting not in (None, name)
            if overtaken and name not in self._published:
                self._published.insert(0, name)  # the uploaded part goes first
                shutil.rmtree(self._folder / OUTGOING / name, ignore_errors=True)

    def _send_one(self, name: str) -> None:
        outgoing = self._folder / OUTGOING
        best = {path.name for path in outgoing.glob(f"{BEST}*")}
        for one in sorted(best - self._best):
            self._send_folder(outgoing / one, f"{self._key}/{CHECKPOINTS}/{one}")
            self._best.add(one)
        self._send_folder(outgoing / name, f"{self._key}/{CHECKPOINTS}/{name}")
        self._published.append(name)
        with self._condition:
            if self._waiting == name:
                self._waiting = None
        shutil.rmtree(outgoing / name, ignore_errors=True)
        if self._lost.is_set():
            return  # somebody may be fetching the one before
        old = [one for one in self._published if one in superseded([one, name])]
        # The trainer keeps some longer, by evaluation or by hour (checkpoint.keep_best, keep_hourly).
        passed = [one for one in self._published if one not in old][: -self._keep]
        old += [one for one in passed if not (self._folder / CHECKPOINTS / one).is_dir()]
        for one in old:
            self._bucket.discard(f"{self._key}/{CHECKPOINTS}/{one}")
            self._published.remove(one)
        there = {path.name for path in (self._folder / CHECKPOINTS).glob(f"{BEST}*")}
        for gone in sorted(self._best - there):
            self._bucket.discard(f"{self._key}/{CHECKPOINTS}/{gone}")
            self._best.discard(gone)
            shutil.rmtree(outgoing / gone, ignore_errors=True)

    def _send_folder(self, folder: Path, key: str) -> None:
        for path in sorted(folder.iterdir()):
            if path.name != MANIFEST:
                self._bucket.put_file(f"{key}/{path.name}", path)
        if not self._lost.is_set():
            self._bucket.put_file(f"{key}/{MANIFEST}", folder / MANIFEST)

    def _send_rollouts(self) -> None:
        """Rollouts and scores of endpoints, each file once: the trainer renames it into place when it is whole, and
        does not write it again."""
        for name, pattern in ((SCORES, "*.json"), (ROLLOUTS, "*.jsonl")):
            for path in sorted((self._folder / name).glob(pattern)):
                if path.name not in self._rollouts and not self._lost.is_set():
                    self._bucket.put_file(f"{self._key}/{name}/{path.name}", path)
                    self._rollouts.add(path.name)

    def _send_log(self) -> None:
        try:
            descriptor = os.open(self._folder / LOG_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            size = os.fstat(descriptor).st_size
            if size < self._logged:  # it was truncated
                self._logged = self._part = 0
            while self._logged < size:
                data = os.pread(descriptor, LOG_PART, self._part)
                if not data:
                    return
                self._bucket.write(log_key(self._key, self._part), data)
                self._logged = self._part + len(data)
                if len(data) == LOG_PART:
                    self._part += LOG_PART
        finally:
            os.close(descriptor)


def publish_prepared(bucket: Bucket, root: Path, prepared: Mapping[str, Any]) -> None:
    """The model and the data sets that a child has prepared, whatever of them the store lacks; then the names that lead
    to them. Raises StoreAway."""
    models = [prepared, *prepared.get("reward_models", ())]
    paths = [
        *(one["model_dir"] for one in models),
        *(path for one in prepared.get("datasets", ()) for path in one["paths"]),
    ]
    for key in dict.fromkeys(entry for path in paths if (entry := entry_of(path)) is not None):
        if bucket.size(f"{key}/{MANIFEST}") is not None:
            continue
        for path in sorted((root / key).rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                bucket.put_file(str(path.relative_to(root)), path)
        bucket.put_file(f"{key}/{MANIFEST}", root / key / MANIFEST)
    known = {entry.key: entry.modified for entry in bucket.tree(f"{MODELS}/{REFS}")}
    for ref in (root / MODELS / REFS).glob("*.json"):
        key = str(ref.relative_to(root))
        if key not in known or ref.stat().st_mtime > known[key]:
            bucket.write(key, ref.read_bytes())


def persist(send: Callable[[], None], gives_up: Callable[[float], bool]) -> bool:
    """Until the store is there. False: given up."""
    told = False
    while True:
        try:
            send()
            return True
        except StoreAway as error:
            if not told:
                log.warning("%s; trying again", error)
                told = True
            if gives_up(RETRY_SECONDS):
                return False
