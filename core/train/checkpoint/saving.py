"""Checkpoints of a run on their way: into the memory of the box first, and from there to the disk.

A step waits only until its state is in memory (a tmpfs). A thread completes the snapshot and copies it to the disk
while the next steps compute. Snapshots that go no further are taken in between. Where memory is not given, or has no
room, a step waits until its checkpoint is on the disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from core.spec.run.folder import CHECKPOINTS
from core.storage.checkpoints import copy_checkpoint, name_for
from core.train.base import disk
from core.train.checkpoint import engine_state, store
from core.train.engine import Engine
from core.train.memory.available import available_bytes
from core.train.run import Run

T = TypeVar("T")
SHARE = 0.02
"""Share of the training time that snapshots take with `memory_steps: auto`."""
GUESSED_RATE = 250e6
"""Bytes a second at which a snapshot is taken, until one was."""
STATE_BYTES = 12
"""Bytes of the state of a trained weight, by the same guess: itself and two moments in float32."""


@dataclass(frozen=True, slots=True)
class Done:
    """What the thread has done with a snapshot."""

    path: Path | None
    """Its copy on the disk; None: it stays in memory."""
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A checkpoint that the thread completes."""

    step: int
    micro: int
    needs: int
    blocked: float
    """Seconds that the run waited for it."""
    done: Future[Done]


class Saver:
    """Saves the checkpoints of a run. One is under way at a time: the next waits for it. Each of several ranks has a
    saver, and `save` and `due` are what they do together."""

    def __init__(self, run: Run, engine: Engine, written: Callable[[Path, int, int], None]) -> None:
        """`written` is called, by `poll`, `finish` and `save`, with each checkpoint that is on the disk, its step and
        its micro-step."""
        self._run = run
        self._engine = engine
        self._written = written
        self._root = run.folder / CHECKPOINTS
        memory = run.order.memory_dir
        self._memory: Path | None = None if memory is None else Path(memory) / CHECKPOINTS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eft-checkpoint")
        self._under_way: UnderWay | None = None
        self._since = time.monotonic()
        trained = sum(parameter.numel() for parameter in engine.trained_parameters.values())
        self._cost = trained * STATE_BYTES / GUESSED_RATE
        """Seconds that a snapshot takes of the training."""
        run.close_at_end(self._thread.shutdown)

    def due(self) -> bool:
        """Whether a snapshot is due after the step that was just done."""
        every, ranks = self._run.spec.checkpoint.memory_steps, self._engine.ranks
        if self._run.order.memory_dir is None or every is None:
            return False
        if every != "auto":
            due = self._engine.steps % every == 0
        else:
            due = self._under_way is None and time.monotonic() - self._since >= self._cost / SHARE
        return ranks.any_rank(due and self._memory is not None and ranks.first)  # the first decides

    def save(self, *, lasting: bool) -> None:
        """Take the state of this very moment. `lasting`: it goes to the disk; otherwise it stays in memory, or is left
        out where that has no room. Raises NoSpace with its size, and Diverged in place of keeping what is no good."""
        engine, ranks = self._engine, self._engine.ranks
        began = time.monotonic()
        engine_state.assert_in_sync(engine)
        if ranks.first:
            self._save(began, lasting)
        elif folder := ranks.broadcast(""):
            engine_state.save_rank(engine, Path(folder))
            ranks.barrier()
        ranks.barrier()  # a rank that leaves now leaves its part behind

    def _save(self, began: float, lasting: bool) -> None:
        """The first rank's part; the others put theirs into the same folder before it is complete."""
        self.finish()
        engine, ranks = self._engine, self._engine.ranks
        step, micro, needs = engine.steps, engine.micro_steps, engine_state.checkpoint_bytes(engine)
        if lasting:
            disk.check_room(self._run.folder, needs)
        memory = self._memory if self._memory is not None and self._has_room(self._memory, needs) else None
        if memory is None and not lasting:
            ranks.broadcast("")
            return

        def fill(aside: Path) -> None:
            ranks.broadcast(str(aside))
            engine_state.save(engine, aside)
            ranks.barrier()

        name = name_for(self._root, step, micro)
        if memory is not None:
            staged = name_for(memory, step, micro)
            try:
                aside = store.begin(memory, staged, fill)
            except Exception as error:
                if ranks.world > 1 or not disk.disk_full(error):
                    raise
                self._do_without(f"{memory} is full: {error}")
            else:
                done = self._thread.submit(self._complete, memory, aside, staged, name if lasting else None)
                self._under_way = UnderWay(step, micro, needs, time.monotonic() - began, done)
                return
        if lasting:
            path = self.to_disk(lambda: store.write(self._root, name, fill), needs)
            self._written(path, step, micro)

    def _has_room(self, memory: Path, needs: int) -> bool:
        """Whether the state takes no more than half of what is free. If not, the run goes on without this tier."""
        try:
            memory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._do_without(f"{memory} cannot be made: {error.strerror}")
            return False
        free = min(shutil.disk_usage(memory).free, available_bytes() or 0)
        if needs > free // 2:
            size = (needs >> 20) + 1
            self._do_without(f"a snapshot takes {size} MiB, more than half of the {free >> 20} MiB of free memory")
            return False
        return True

    def _do_without(self, why: str) -> None:
        self._run.notice("no_snapshots", f"{why}: no snapshots are taken, and steps wait for their checkpoints")
        self._memory = None

    def _complete(self, memory: Path, aside: Path, name: str, copy: str | None) -> Done:
        """In the thread: no tensor and no state of the run is touched here."""
        began = time.thread_time()
        snapshot = store.complete(aside, name, lasting=False)
        for old in store.newest_first([memory]):
            if old.path != snapshot:
                store.discard(old.path)
        path = None if copy is None else copy_checkpoint(snapshot, self._root, copy)
        return Done(path, time.thread_time() - began)

    def poll(self) -> None:
        """Tell of the checkpoint under way if it is on the disk. Raises NoSpace where that has no room for it."""
        if self._under_way is not None and self._under_way.done.done():
            self.finish()

    def finish(self) -> None:
        """Wait until no checkpoint is under way."""
        one, self._under_way = self._under_way, None
        if one is None:
            return
        while not wait([one.done], timeout=1.0).done:
            self._run.events.alive()
        done = self.to_disk(one.done.result, one.needs)
        on_cpu = self._engine.device.type == "cpu"  # whose cores compute the steps too
        self._cost = one.blocked + (done.cpu_seconds if on_cpu else 0.0)
        self._since = time.monotonic()
        if done.path is not None:
            self._written(done.path, one.step, one.micro)

    def to_disk(self, write: Callable[[], T], needs: int) -> T:
        """What `write` returns. Raises NoSpace where the disk has no room for so many bytes."""
        try:
            return write()
        except Exception as error:
            if not disk.disk_full(error):
                raise
            raise disk.no_room_for_checkpoint(needs, str(error)) from error
