"""The agent of a box: registers it, claims for its free slots, keeps its leases, and leaves in good order.

Kinds of threads: the pool's, each running at most one child (serve); the heartbeat, the one place that renews leases;
the one that takes leave, since a signal handler may not do that itself; housekeeping; and the one that keeps a spare.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from core import __version__
from core.db.engine import Database
from core.hardware.discover import Gpu, discover
from core.hardware.memory import box_bytes
from core.hardware.tables import faults
from core.ids import new_id
from core.jobs.kinds import Kind
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Slot
from core.jobs.policies import nodes
from core.jobs.policies.budget import Budget
from core.settings import Settings
from core.storage.bucket import Bucket
from core.storage.checkpoints import Snapshots
from core.storage.layout import Layout
from core.storage.open import open_store
from worker.agent.claim_loop import ClaimLoop
from worker.agent.leases import Leases
from worker.attempt.context import DATABASE_AWAY, WorkerContext
from worker.attempt.fork_server import ForkServer
from worker.attempt.standby import StandbyTrainers
from worker.environment import child_environment
from worker.gpus.foreign_processes import ForeignProcesses
from worker.gpus.gpu_memory import Quarantine
from worker.gpus.gpu_stats import GpuStats
from worker.gpus.selftest import SelfTests
from worker.gpus.selftest_runner import SelfTestDevice
from worker.preflight import joining, node
from worker.store.local_cache import LocalCache
from worker.upkeep.disk_room import Room
from worker.upkeep.housekeeping import BrokerAway, Housekeeper

log = logging.getLogger("eft.worker")

PREPARE_SLOT = Slot("prepare-0", "prepare")
PREVIEW_SLOT = Slot("preview-0", "preview")
EXPORT_SLOT = Slot("export-0", "export")


class Agent:
    """Raises node.Refused or HardwareError when it may not serve this box."""

    def __init__(self, settings: Settings) -> None:
        box = discover(sysfs=settings.sysfs, gpus=None if settings.gpus is None else list(settings.gpus))
        self.settings = settings
        self.worker = new_id("worker")
        self.notes = list(box.notes)
        for arch in sorted({gpu.arch for gpu in box.gpus}):
            self.notes += [f"{arch}: {change.words}" for change in faults.route(os.environ, arch).changes]
        gpus: dict[str, Gpu] = {gpu.uuid: gpu for gpu in box.gpus}
        labels = frozenset(settings.node_labels)
        host = box_bytes() or 0
        train_slots = [
            Slot(uuid, "gpu", gpu.vendor, gpu.arch, gpu.memory_bytes, labels, host_bytes=host)
            for uuid, gpu in gpus.items()
        ] or cpu_slots(settings, labels, host)
        if gpus and settings.cpu_slots > 1:
            self.notes.append(f"EFT_CPU_SLOTS={settings.cpu_slots} has no effect here: this box trains on its GPUs")
        self.slots = [*train_slots, PREPARE_SLOT, PREVIEW_SLOT, EXPORT_SLOT]
        layout, store = Layout(settings.root), open_store(settings)
        if not settings.database_url:
            layout.create()  # the embedded database lies there
        database = Database(settings.sqlalchemy_url)
        self._lock_file = -1
        try:
            node.check_schema(database)
            self.notes += joining.join(database, store, settings)  # before anything is made in a folder not ours
            layout.create()
            (layout.root / "home").mkdir(mode=0o700, exist_ok=True)
            self._lock_file = node.lock(layout.root, settings.node)
            node.probe(layout, settings.node)
            if isinstance(store, Bucket):
                joining.check_name(database, settings)
        except BaseException:
            database.dispose()
            if self._lock_file >= 0:
                os.close(self._lock_file)
            raise
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // len(train_slots)))
        self.site = WorkerContext(settings, database, layout, settings.node, gpus, threads)
        if settings.snapshots is not None:
            snapshots = Snapshots(settings.snapshots, layout.root)
            if (why_not := snapshots.open()) is None:
                self.site.snapshots = snapshots
            else:
                self.notes.append(f"trainers leave no snapshots in memory: {why_not} (EFT_SNAPSHOTS)")
        if isinstance(store, Bucket):
            self.site.copies = LocalCache(store, layout, settings.work_bytes, settings.min_free_bytes)
        devices = [
            SelfTestDevice(slot.id, gpu, child_environment(Kind.TRAIN, gpu=gpu, threads=threads, root=layout.root))
            for slot in train_slots
            for gpu in [gpus.get(slot.id)]
        ]
        self._selftests = SelfTests(devices, settings.node, layout.cache, settings.selftest_seconds)
        self.site.selftests = self._selftests
        self._train_slots = train_slots
        self._room = Room(database, layout.root, settings.min_free_bytes, Budget.of(settings))
        self.site.room = self._room.left
        self._quarantine = self.site.quarantine = Quarantine(gpus, settings.sysfs)
        self._others = ForeignProcesses(gpus, settings.sysfs)
        self._figures = self.site.figures = GpuStats(gpus, settings.sysfs)
        self._row: tuple[list[str], list[dict[str, object]]] = ([], [])
        """What the node's row says, as far as it changes."""
        self._showing = threading.Lock()
        self._leave: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.claims = ClaimLoop(self.site, self.worker, self.slots, self._room, self._fit)
        self._leases = Leases(self.site, self.worker, self.claims, self._stopped)
        self._housekeeper: Housekeeper | None = None
        self._threads: list[threading.Thread] = []

    def start(self, publish: Callable[[str], None], backlog: Callable[[], int]) -> None:
        """Take the box over. `publish` rings the workers' bell, `backlog` counts rings that nobody has heard yet."""
        database, name = self.site.database, self.settings.node
        node.clear_orphans(
            database, self.site.layout, name, self.worker, node.loss_policy(self.settings), self.site.snapshots
        )
        self._others.look()
        self._figures.look()
        with database.write() as session:
            self._quarantine.restore(nodes.slots(session, name))
            notes, slots = self._changing(), [self._describe(slot) for slot in self.slots]
            labels = self.settings.node_labels
            drained = nodes.register(session, name, self.worker, __version__, slots, self.notes + notes, labels)
            self._row = (notes, slots)
        if self.site.copies is not None:
            joining.remember_worker(self.settings, self.worker)
        if drained:
            log.warning("node %s is drained: it claims nothing until `eft worker undrain %s`", name, name)
        for note in self.notes + self._selftests.notes():
            log.warning("%s", note)
        self._housekeeper = Housekeeper(database, self.settings, self.worker, publish, backlog)
        targets = {
            "leases": self._leases.run,
            "sweep": self._sweep,
            "leave": self._take_leave,
            "housekeeping": self._housekeeper.run,
        }
        if self._selftests.complete:
            self._keep_a_spare()
        else:
            targets["selftest"] = lambda: self._selftests.keep(lambda: self._learned(publish))
        for what, target in targets.items():
            self._begin(what, target)
        log.info("node %s serves %s", name, ", ".join(slot.id for slot in self.slots))
        self._look_first(publish)

    def _begin(self, what: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"eft-{what}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _learned(self, publish: Callable[[str], None]) -> None:
        """The self-test of a device is done: its slot is offered now, or the node's row says why not."""
        try:
            with self._showing:
                if self._selftests.complete:
                    self._keep_a_spare()
            self._show()
            self._look_first(publish)
        except DATABASE_AWAY as error:
            log.warning("cannot record the self-test, database: %s; the next sweep tries again", error)

    def _keep_a_spare(self) -> None:
        """Once it is known with which variables a trainer starts, and whether any may."""
        offered = [slot.id for slot in self._train_slots if self._selftests.offered(slot.id)]
        if not offered or self.site.spares or self.site.forks or self.site.leaving.is_set():
            return
        if self.site.gpus and not self.settings.spare:
            return
        # Of one slot the spare has that slot's own variable; of several it is not known yet which it will get. Where
        # cards differ, or what their self-tests ask for, each job gets its own cold start.
        gpus = self.site.gpus
        arches = {gpu.arch for gpu in gpus.values()}
        cures = [dict(self._selftests.choice(slot).environment) for slot in offered]
        environment = child_environment(
            Kind.TRAIN,
            gpu=gpus.get(offered[0]) if len(self._train_slots) == 1 else None,
            threads=self.site.threads,
            root=self.site.layout.root,
            arch=arches.pop() if len(arches) == 1 else None,
            cure=cures[0] if all(cure == cures[0] for cure in cures) else None,
        )
        if gpus:
            self.site.spares = StandbyTrainers(environment, self.claims.starting)
            self._begin("spares", self.site.spares.run)
        else:
            self.site.forks = ForkServer(environment, self.claims.starting, keep=self.settings.spare)
            self._begin("forks", self.site.forks.run)

    def _look_first(self, publish: Callable[[str], None]) -> None:
        """Wake workers for waiting jobs: the previous housekeeper may have died with the last worker."""
        with self.site.database.read() as session:
            waiting = claims.runnable(session, room=self._room.left())
        if waiting is not None:
            try:
                publish(waiting)
            except BrokerAway as error:
                log.warning("broker: %s; the housekeeper will wake the workers", error)

    def _describe(self, slot: Slot) -> dict[str, object]:
        gpu = self.site.gpus.get(slot.id)
        return (
            {"id": slot.id, "kind": slot.kind}
            | ({"host_bytes": slot.host_bytes} if slot.host_bytes else {})
            | ({"share_bytes": slot.share_bytes} if slot.share_bytes else {})
            | ({} if gpu is None else {"gpu": asdict(gpu) | self._figures.of(gpu)})
            | self._selftests.as_slot(slot.id)
            | ({} if gpu is None else self._quarantine.as_slot(slot.id) | self._others.as_slot(slot.id))
        )

    # -- work

    def serve(self) -> None:
        """Run what this box can run until nothing can be claimed. One call a wake-up."""
        self.claims.serve()

    def _fit(self, slot: Slot) -> bool:
        """Whether its self-test passed, its memory is free, and only eft uses it."""
        if slot.id in self._quarantine or slot.id in self._others:
            return False
        return self._selftests.offered(slot.id)

    def _sweep(self) -> None:
        """What may come back by itself: room on the disk, memory of a GPU. The housekeeper rings while jobs wait."""
        while True:
            try:
                self.claims.clear()
                if self.site.copies is not None:
                    self.site.copies.make_room()
                self._room.tell()
                self.claims.fits()
                for slot in self._quarantine.look():
                    log.warning("slot %s: its memory was freed; in use again", slot)
                self._others.look()
                self._figures.look()
                self._show()
            except DATABASE_AWAY as error:
                log.warning("cannot record free room and slots, database: %s", error)
            except Exception:
                log.exception("sweep")
            if self._stopped.wait(self.settings.sweep_seconds):
                return

    def _show(self) -> None:
        """The node's row says which slots are not offered, and why."""
        with self._showing:
            notes, slots = self._changing(), [self._describe(slot) for slot in self.slots]
            if (notes, slots) == self._row:
                return
            with self.site.database.write() as session:
                nodes.describe(session, self.settings.node, self.worker, slots, self.notes + notes)
            self._row = (notes, slots)

    def _changing(self) -> list[str]:
        """Notes that come and go while this worker serves."""
        unfit = [self.claims.unfit] if self.claims.unfit else []
        return unfit + self._selftests.notes() + self._quarantine.notes()

    # -- leaving

    def leave(self) -> None:
        """Claim nothing more and ask the children to checkpoint. Safe to call from a signal handler."""
        self._leave.put("leave")  # SimpleQueue.put is reentrant; locks of ours are not

    def _take_leave(self) -> None:
        self._leave.get()
        self.site.leaving.set()
        attempts = self.claims.attempts()
        log.info("leaving; %d at work", len(attempts))
        for attempt in attempts:
            attempt.hurry()

    def stop(self) -> None:
        """Leave, wait until every child is gone and every job is handed back, then give up the node."""
        self.leave()
        deadline = time.monotonic() + self.settings.stop_grace_seconds + 30.0
        self.claims.wait_until_idle(deadline)
        self.site.abandon.set()
        self._stopped.set()
        self._selftests.stop()
        for kept in (self.site.spares, self.site.forks):
            if kept is not None:
                kept.stop()
        if self._housekeeper is not None:
            self._housekeeper.stop()
        for thread in self._threads:
            thread.join(5.0)
        for attempt in self.claims.attempts():
            attempt.lose()
        if self.site.snapshots is not None:
            self.site.snapshots.close()
        self.site.database.dispose()
        os.close(self._lock_file)


def cpu_slots(settings: Settings, labels: frozenset[str], host: int) -> list[Slot]:
    """`host`: bytes of memory of the box, which they share; 0: unknown."""
    count = settings.cpu_slots
    names = ["cpu"] if count == 1 else [f"cpu-{number}" for number in range(count)]
    share = settings.cpu_slot_bytes or host // count
    return [Slot(name, "cpu", labels=labels, share_bytes=share, host_bytes=host) for name in names]
