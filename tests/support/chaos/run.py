"""A run: bring everything up, learn what undisturbed jobs give, let the script loose, calm down, look what is left."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.support import models as tiny_models
from tests.support.chaos import history as histories
from tests.support.chaos import look, script, specs
from tests.support.chaos.history import History, Result
from tests.support.chaos.invariants import Check, check_all
from tests.support.chaos.look import Observer, Trainer
from tests.support.chaos.people import WAITING, People
from tests.support.chaos.processes import Installation, Member, wait_until
from tests.support.chaos.script import Action

TICK_SECONDS = 0.05
MOST_OPEN = 12
"""Jobs that are not over; more are not submitted, so that the end comes in a bounded time."""
MOST_KILLS = 4
"""Kills of one job's trainers at most: the wait before its next try doubles with each."""
SILENT = "fell silent"
"""In the reason where a trainer has ended itself, since its worker lost its lease (worker/attempt/outcome.py)."""
CALM_TRIES = 3
"""Jobs that a spec may need until one was undisturbed."""


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    seconds: float
    database: script.Databases
    fault_every: float = 7.0
    wish_every: float = 6.0
    share_every: float = 9.0
    burst: int = 4
    specs: int = 4
    scale: float = 1.0
    slots: int = 2
    lease: float = 8.0
    fence: float = 4.0
    renew: float = 1.0
    grace: float = 30.0
    """For a checkpoint. Who is over by itself so soon is not asked to make room: with a short one more jobs are."""
    drain_seconds: float = 600.0
    enough: int = 0
    patience: float = 0.0
    """Until so many kinds of faults have met somebody, those that have not look for somebody still, and the storm goes
    on for up to `patience` seconds more: a slow machine has as much of a storm as a quick one."""


@dataclass(slots=True)
class Outcome:
    plan: Plan
    history: History
    checks: dict[str, Check]
    counts: dict[str, int]
    log: list[str]
    folder: Path | None
    """Kept, because something did not hold."""
    seconds: dict[str, float] = field(default_factory=dict)
    longest_wait: float = 0.0
    own_ends: dict[str, list[int]] = field(default_factory=dict)

    @property
    def violations(self) -> list[str]:
        return [f"{name}: {words}" for name, check in self.checks.items() for words in check.violations]


class Run:
    """One plan on an installation of its own. Call `go` from the main thread."""

    def __init__(self, plan: Plan, out: TextIO = sys.stdout, *, undisturbed: Sequence[Result] = ()) -> None:
        """`undisturbed` are what the jobs of this plan give, where that is known already."""
        self.plan = plan
        self._known = undisturbed
        self.out = out
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix="eft-chaos-", dir="/tmp"))  # short: sockets lie below it
        self.folder.chmod(0o711)  # PostgreSQL runs as somebody else when we are root
        self._began = time.monotonic()
        self._hits: Counter[str] = Counter()
        self._late: list[Action] = []
        """Faults that have met nobody yet."""
        self._frozen: list[tuple[int, float]] = []
        """Launchers that were stopped (descriptors that the kernel gives to nobody else), and until when."""
        self._next_line = 0.0
        models = self.folder / "models"
        shutil.copytree(tiny_models.folder(), models)
        self.inst = Installation(
            self.folder,
            plan.database,
            models,
            slots=plan.slots,
            lease=plan.lease,
            fence=plan.fence,
            renew=plan.renew,
            grace=plan.grace,
        )

    def go(self) -> Outcome:
        keep = True
        observer: Observer | None = None
        try:
            self.inst.up()
            url = self.inst.postgres.url if self.inst.postgres else f"sqlite:///{self.inst.data}/eft.db"
            observer = Observer(url, self.inst.data)
            people = self._people(observer)
            references = list(self._known) or self._references(people)
            wait_until(lambda: self._settled(people), 60, "the slots of both nodes")
            people.allow_preemption()
            undisturbed = self._elapsed()
            observer.start()
            self._storm(people)
            stormed = self._elapsed()
            self._drain(people, observer)
            drained = self._elapsed()
            observer.stop()
            history = History(people.ledger, references)
            self._gather(history, url, people, observer)
            outcome = Outcome(self.plan, history, check_all(history), dict(self.counts), self.log, None)
            outcome.seconds = {
                "undisturbed": undisturbed,
                "storm": stormed - undisturbed,
                "drain": drained - stormed,
                "all": self._elapsed(),
            }
            outcome.longest_wait = observer.longest_wait
            outcome.own_ends = {member.name: member.own_ends for member in self.inst.members}
            keep = bool(outcome.violations)
            if keep:
                (self.folder / "violations.txt").write_text("\n".join(outcome.violations) + "\n")
            outcome.folder = self.folder if keep else None
            return outcome
        finally:
            if observer is not None and observer._thread.is_alive():
                observer._end.set()
                observer._thread.join()
            self.inst.end_all()
            if keep:
                self.say(f"kept: {self.folder}")
                (self.folder / "actions.log").write_text("\n".join(self.log) + "\n")
            else:
                shutil.rmtree(self.folder)

    # -- before

    def _people(self, observer: Observer) -> People:
        waiting = People(self.inst.url, self.inst.key, [], "", dict)
        wait_until(lambda: self._answers(waiting), 60, "the API")
        paths = asdict(specs.write_rows(self.folder))
        formats = {"judged": "kto"}
        files = specs.Files(
            **{name: waiting.upload(path.read_bytes(), path.name, formats.get(name)) for name, path in paths.items()}
        )
        waiting.close()
        jobs = specs.all_specs(self.folder / "models" / "tiny", files, self.plan.scale)
        run = f"chaos-{self.plan.seed}"
        return People(self.inst.url, self.inst.key, jobs[: self.plan.specs], run, lambda: observer.statuses)

    def _answers(self, people: People) -> bool:
        self.inst.tick()
        try:
            people.get("/jobs")
        except Exception:
            return False
        return True

    def _settled(self, people: People) -> bool:
        self.inst.tick()
        return people.look_around() == 2 * self.plan.slots

    def _references(self, people: People) -> list[Result]:
        """What each spec gives when nobody disturbs it. A busy machine may hold a worker for longer than its lease, and
        a job goes on in another attempt: that is no fault, but no reference either, and another job gives it."""
        found: dict[int, Result] = {}
        for _ in range(CALM_TRIES):
            missing = [number for number in range(len(people.specs)) if number not in found]
            for number, job in zip(missing, self._run_in_calm(people, missing), strict=True):
                page = people.get(f"/jobs/{job['id']}/events", params={"format": "json", "limit": 1000})
                events = page.json()["data"]
                told = [event["data"] for event in events if event["type"] == "status"]
                lost = [one for one in told if one.get("lost") or SILENT in str(one.get("reason"))]
                assert job["attempt"] == 2 + len(lost), f"disturbed: {events}"  # one to prepare, one to train
                if lost:
                    self.say(f"{job['id']} was disturbed: {lost}")
                else:
                    found[number] = histories.result(people, job["id"])
        assert len(found) == len(people.specs), f"jobs lost their workers {CALM_TRIES} times in a calm"
        results = [found[number] for number in sorted(found)]
        assert all(result.weights and not result.faults for result in results), results
        self.say(f"undisturbed: {len(results)} kinds of jobs, {', '.join(f'{len(r.losses)} steps' for r in results)}")
        return results

    def _run_in_calm(self, people: People, numbers: list[int]) -> list[dict[str, Any]]:
        """A job of each of these specs, once all have succeeded."""
        ids = []
        for number in numbers:
            ids.append(people.submit((number + 0.5) / len(people.specs)))
            assert people.ledger.accepted[ids[-1]][1] == number
        deadline = time.monotonic() + self.plan.drain_seconds
        while True:
            self.inst.tick()
            jobs = [people.get(f"/jobs/{job_id}").json() for job_id in ids]
            assert not [job for job in jobs if job["status"] in ("failed", "cancelled")], jobs
            if all(job["status"] == "succeeded" for job in jobs):
                return jobs
            assert time.monotonic() < deadline, f"undisturbed jobs are not done: {jobs}"
            time.sleep(0.2)

    # -- the storm

    def _storm(self, people: People) -> None:
        plan, begun = self.plan, time.monotonic()
        actions = script.write(
            plan.seed,
            plan.seconds,
            plan.database,
            fault_every=plan.fault_every,
            wish_every=plan.wish_every,
            share_every=plan.share_every,
            burst=plan.burst,
        )
        with ThreadPoolExecutor(8) as pool:
            pool.submit(lambda: self.say(f"pipeline {people.pipeline()}"))
            for action in actions:
                while time.monotonic() - begun < action.at:
                    self._tick(people)
                if action.kind in script.FAULTS:
                    self._strike(action)
                else:
                    pool.submit(self._wish, people, action)
            while (passed := time.monotonic() - begun) < plan.seconds + plan.patience:
                if passed >= plan.seconds and not (self._late and self._few()):
                    break
                self._tick(people)
            self._late = []
            self.say("calm")  # nothing is ended any more, and what is down or frozen comes back at its time
            while pool._work_queue.qsize():  # wishes that wait for the API to come back
                self._tick(people)
            threading_end = time.monotonic() + 60
            pool.shutdown(wait=False)
            while any(thread.is_alive() for thread in pool._threads) and time.monotonic() < threading_end:
                self._tick(people)
            people.stopped.set()

    def _wish(self, people: People, action: Action) -> None:
        open_jobs = [status for status in people._statuses().values() if status not in look.WAITING_OR_OVER[2:]]
        if action.kind in ("submit", "urgent") and len(open_jobs) >= MOST_OPEN:
            self._note(action, f"left out, {len(open_jobs)} jobs are open")
            return
        self._note(action, people.wish(action.kind, action.pick))

    def _strike(self, action: Action) -> None:
        """One that meets nobody is tried again at every tick, as long as too few kinds have met any."""
        self._note(action, self._fault(action))
        if self._few() and not self.counts[action.kind]:
            self._late.append(action)

    def _few(self) -> bool:
        return sum(self.counts[kind] > 0 for kind in script.FAULTS) < self.plan.enough

    def _fault(self, action: Action) -> str:
        """Do it; what it met, in words."""
        inst, kind = self.inst, action.kind
        match kind:
            case "kill_api":
                return self._count(kind, inst.api.kill(action.seconds), "the API")
            case "kill_broker":
                return self._count(kind, inst.broker.kill(action.seconds), "the broker")
            case "kill_database":
                assert inst.postgres is not None
                return self._count(kind, inst.postgres.member.kill(action.seconds), "PostgreSQL")
            case "kill_worker":
                worker = self._worker(action)
                return self._count(kind, worker.kill(2 * action.seconds), worker.name)
            case "term_worker":
                worker = self._worker(action)
                return self._count(kind, worker.terminate(), worker.name)
            case "freeze_worker":
                worker, seconds = self._worker(action), inst.lease + action.seconds
                return self._count(kind, worker.freeze(seconds), f"{worker.name} for {seconds:.1f} s")
            case "kill_trainer":
                return self._kill_trainer(action, look.trainers(inst.data), "a trainer")
            case "kill_rank":
                return self._kill_trainer(action, look.ranks(inst.data), "a rank")
            case "freeze_launcher":
                return self._freeze_launcher(action)
            case "flushall":
                return self._count(kind, inst.flushall(), "the broker")
            case "kill_everything":
                dice = random.Random(action.pick)
                killed = [member.name for member in inst.members if member.kill(dice.uniform(0.1, 4.0))]
                for trainer in look.trainers(inst.data):
                    self._kill(trainer.pid)
                    killed.append(f"trainer of {trainer.job_id}")
                return self._count(kind, True, ", ".join(killed))
            case _:
                raise ValueError(kind)

    def _worker(self, action: Action) -> Member:
        """One that is awake, if there is one: a freeze must last until its lease is over."""
        awake = [worker for worker in self.inst.workers if worker.frozen_until is None] or self.inst.workers
        return awake[int(action.pick * len(awake))]

    def _kill_trainer(self, action: Action, processes: Sequence[Trainer], what: str) -> str:
        there = sorted(
            (one for one in processes if self._hits[one.job_id] < MOST_KILLS),
            key=lambda one: (one.job_id, one.attempt, one.pid),
        )
        if not there:
            return self._count(action.kind, False, what)
        one = there[int(action.pick * len(there))]
        self._hits[one.job_id] += 1
        self._kill(one.pid)
        return self._count(action.kind, True, f"{what} {one.pid} of {one.job_id}, attempt {one.attempt}")

    def _freeze_launcher(self, action: Action) -> str:
        """Stop a gang's launcher until its ranks must have ended: they hear nothing, though the lease is renewed."""
        there = look.launchers(self.inst.data)
        if not there:
            return self._count(action.kind, False, "a launcher")
        one, seconds = there[int(action.pick * len(there))], self.inst.lease + action.seconds
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(one.pid)
            signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
            self._frozen.append((descriptor, time.monotonic() + seconds))
        return self._count(action.kind, True, f"{one.pid} of {one.job_id}, attempt {one.attempt}, for {seconds:.1f} s")

    def _thaw(self) -> None:
        for one in [one for one in self._frozen if time.monotonic() >= one[1]]:
            self._frozen.remove(one)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one[0], signal.SIGCONT)
            os.close(one[0])

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was quicker
            os.kill(pid, signal.SIGKILL)

    def _count(self, kind: str, done: bool, whom: str) -> str:
        self.counts[kind if done else f"{kind}: nobody there"] += 1
        return whom if done else f"{whom}: not there"

    # -- after

    def _drain(self, people: People, observer: Observer) -> None:
        """Everything that was not cancelled must come to its end now, without help: what people took from one another
        is given back."""
        people.stopped.clear()
        with ThreadPoolExecutor(1) as pool:
            given_back = pool.submit(people.open_all)
            while not given_back.done():
                self._tick(people)
            given_back.result()
        deadline = time.monotonic() + self.plan.drain_seconds
        while time.monotonic() < deadline:
            self._tick(people)
            statuses = dict(observer.statuses)
            for job_id in [job_id for job_id, status in statuses.items() if status == "paused"]:
                people.resume(job_id)
            unknown = set(people.ledger.accepted) - set(statuses)
            quiet = all(status in ("succeeded", "failed", "cancelled") for status in statuses.values())
            if not unknown and quiet and not people.pipelines_run():
                break
        else:
            self.say(f"not drained: { {j: s for j, s in observer.statuses.items() if s in (*WAITING, 'paused')} }")
        if self.inst.postgres is not None:
            wait_until(self.inst.postgres.answers, 30, "PostgreSQL")
        wait_until(lambda: self._answers(people), 60, "the API")
        time.sleep(2.5)  # for the housekeeper to publish what is in the outbox

    def _gather(self, history: History, url: str, people: People, observer: Observer) -> None:
        with look.tables(url) as tables:
            histories.gather(history, tables, people, self.inst.data)
        people.close()
        history.seen = observer.seen
        history.observed = list(dict.fromkeys(observer.faults))
        history.samples = observer.counts["samples"]
        self.counts.update({f"observed: {name}": count for name, count in observer.counts.items()})
        history.left += self.inst.down()
        history.left += [f"still running: {pid} {command}" for pid, command in self._processes().items()]
        self.inst.end_database()
        histories.gather_files(history, self.inst.data)

    def _processes(self) -> dict[int, str]:
        database = self.inst.postgres.member.process if self.inst.postgres else None
        return {
            pid: command for pid, command in self.inst.processes().items() if database is None or pid != database.pid
        }

    # -- words

    def _tick(self, people: People) -> None:
        self.inst.tick()
        self._thaw()
        time.sleep(TICK_SECONDS)
        self._late = [action for action in self._late if self._few() and not self._again(action)]
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + (30 if self.plan.seconds > 120 else 5)
            states = Counter(people._statuses().values())
            faults = sum(self.counts[kind] for kind in script.FAULTS)
            self.say(f"{faults} faults; jobs: {', '.join(f'{n} {s}' for s, n in sorted(states.items()))}")

    def _again(self, action: Action) -> bool:
        words = self._fault(action)
        if self.counts[action.kind]:
            self._note(action, f"{words}, late")
        return self.counts[action.kind] > 0

    def _note(self, action: Action, words: str) -> None:
        self.log.append(f"{self._elapsed():8.2f}  {action.kind:<17} {words}")

    def say(self, words: str) -> None:
        self.log.append(f"{self._elapsed():8.2f}  -- {words}")
        print(f"[{self._elapsed():7.1f} s] {words}", file=self.out, flush=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def _slots_of_attempts(history: History) -> dict[tuple[str, int], int]:
    return Counter((span.job_id, span.attempt) for span in history.allocations)


def facts(outcome: Outcome) -> dict[str, Any]:
    """Everything of a run that is a number, for its report."""
    history = outcome.history
    changes = [event for events in history.events.values() for event in events if event.type == "status"]
    return {
        "seed": outcome.plan.seed,
        "database": outcome.plan.database,
        "seconds": {name: round(value, 1) for name, value in outcome.seconds.items()},
        "jobs": dict(Counter(row.status for row in history.jobs.values())),
        "faults": {kind: outcome.counts.get(kind, 0) for kind in script.FAULTS},
        "faults that met nobody": {
            kind: outcome.counts[f"{kind}: nobody there"]
            for kind in script.FAULTS
            if outcome.counts.get(f"{kind}: nobody there")
        },
        "people": dict(sorted(history.ledger.counts.items())),
        "attempts": len(history.attempts),
        "most attempts of a job": max((row.attempt for row in history.jobs.values()), default=0),
        "resumed from a checkpoint": sum(e.type == "resumed" for events in history.events.values() for e in events),
        "attempts of gangs": sum(slots > 1 for slots in _slots_of_attempts(history).values()),
        "slots and nodes taken away": dict(Counter(one.what for one in history.closed)),
        "quotas set": len(history.quotas),
        "made room for others": sum(str(event.data.get("reason")).startswith("made room") for event in changes),
        "leases lost": sum("lost" in event.data for event in changes),
        "of these by running out": sum("silent for longer" in str(event.data.get("reason")) for event in changes),
        "state changes": len(changes),
        "events": sum(len(events) for events in history.events.values()),
        "longest wait in the queue, s": round(outcome.longest_wait, 1),
        "ends of members that were not ours": {
            name: dict(Counter(map(str, codes))) for name, codes in outcome.own_ends.items() if codes
        },
        "samples": history.samples,
        "checks": {name: check.looked for name, check in outcome.checks.items()},
        "violations": len(outcome.violations),
    }
