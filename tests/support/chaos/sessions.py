"""A storm over sessions: `python -m tests.support.chaos.sessions --seed 7 --steps 200 --database postgres`.

Recipes run over HTTP while a script of a seed ends things by kill -9: the child that computes, workers, the API, the
broker, PostgreSQL, and all of them at once. A fault comes when a recipe reaches a step, so that a slow machine has as
many of them as a quick one. Every recipe has to end by itself, and all that its caller was told, step by step, has to
be bitwise what a recipe is told that nobody disturbs. The two workers have a slot each: of three recipes, two share a
process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from eft.sync.client import Client
from eft.sync.sessions import TrainingSession

from tests.support import models as tiny_models
from tests.support.chaos import look
from tests.support.chaos.processes import Installation, new_seed, wait_until
from tests.support.chaos.script import Databases

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42, 43], list(range(60, 80))]
METHOD = {"type": "lora", "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.1}
SPEC = {"precision": "fp32", "resources": {"accelerator": "cpu"}, "idle_seconds": 3.0}
FAULTS = ("child", "worker", "api", "broker", "database", "everything")
PATIENCE = 600.0
"""Seconds for which a recipe waits for a server that is away."""
TICK_SECONDS = 0.05

Trace = list[dict[str, Any]]
"""What a recipe was told, a step after another."""


@dataclass(frozen=True, slots=True)
class Storm:
    seed: int
    database: Databases
    recipes: int = 1
    steps: int = 8
    every: int = 1
    """Steps of a recipe from one fault to the next."""


@dataclass(slots=True)
class Outcome:
    traces: dict[str, Trace]
    calm: Trace
    faults: Counter[str]
    left: list[str]
    errors: list[str] = field(default_factory=list)
    joined: int = 0
    """How often a session has joined the process of another one."""

    @property
    def violations(self) -> list[str]:
        """What does not hold, in words."""
        found = list(self.errors) + [f"still there: {one}" for one in self.left]
        for name, trace in self.traces.items():
            if len(trace) != len(self.calm):
                found.append(f"{name} ended after {len(trace)} of {len(self.calm)} steps")
            differ = [at for at, (one, other) in enumerate(zip(trace, self.calm, strict=False)) if one != other]
            if differ:
                found.append(f"{name}: step {differ[0]} came to other bits: {trace[differ[0]]} {self.calm[differ[0]]}")
        return found


def recipe(session: TrainingSession, name: str, steps: int, reached: Any) -> Trace:
    """Steps with windows, saved and loaded weights, samples; `reached` is called at the beginning of each."""
    session.create(name, METHOD, seed=7)
    told: Trace = []
    for step in range(steps):
        reached(step)
        rows = [{"tokens": ROWS[(step + at) % 3]} for at in range(2)]
        losses = [session.forward_backward([row], model=name).loss for row in rows]
        if step % 3 == 2:
            session.zero_grad(model=name)
            losses.append(session.forward_backward(rows, model=name).loss)
        norm = session.step(0.01, max_grad_norm=0.5, model=name).values["grad_norm"]
        if step % 4 == 1:
            folder = session.save(f"{name}-{step}", model=name).values["folder"]
            session.forward_backward(rows, model=name)
            session.load(folder, with_optimizer=True, model=name)
        drawn = session.generate([ROWS[0][:3]], max_tokens=4, seed=step, stop_token_ids=[], model=name)
        scored = session.logprobs([{"tokens": row} for row in ROWS], model=name).arrays["logprobs"]
        told.append(
            {"losses": losses, "norm": norm, "drawn": drawn.arrays["tokens"].tolist(), "scored": scored.tolist()}
        )
    return told


class SessionRun:
    """One storm on an installation of its own. Call `go` from the main thread."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.dice = random.Random(storm.seed)
        self.folder = Path(tempfile.mkdtemp(prefix="eft-chaos-", dir="/tmp"))  # short: sockets lie below it
        self.folder.chmod(0o711)  # PostgreSQL runs as somebody else when we are root
        models = self.folder / "models"
        shutil.copytree(tiny_models.folder(), models)
        self.model = str(models / "tiny")
        self.inst = Installation(
            self.folder, storm.database, models, slots=1, lease=8.0, fence=4.0, renew=1.0, grace=10.0
        )
        self.faults: Counter[str] = Counter()
        self.errors: list[str] = []
        self._due: list[str] = []
        self._lock = threading.Lock()
        self._deck: list[str] = []

    def go(self) -> Outcome:
        try:
            self.inst.up()
            wait_until(self._answers, 60, "the API")
            calm = self._all(["calm"], still=True)["calm"]
            traces = self._all([f"struck-{number}" for number in range(self.storm.recipes)])
            wait_until(self._quiet, 60, "the children of closed sessions to end")
            left = list(self._children().values())
            return Outcome(traces, calm, self.faults, left, self.errors, self._joined())
        finally:
            self.inst.end_all()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self, names: list[str], *, still: bool = False) -> dict[str, Trace]:
        """Run a recipe of each name at once, and strike whenever one reaches a step for it."""
        found: dict[str, Trace] = {}

        def run(name: str) -> None:
            def reached(step: int) -> None:
                if not still and step and step % self.storm.every == 0:
                    with self._lock:
                        self._due.append(name)

            try:
                with (
                    Client(self.inst.url, self.inst.key, patience=PATIENCE) as client,
                    client.session(model=self.model, method=None, patience=PATIENCE, **SPEC) as session,
                ):
                    found[name] = recipe(session, "a", self.storm.steps, reached)
            except Exception as error:
                self.errors.append(f"{name} did not end by itself: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.inst.tick()
            with self._lock:
                due, self._due = self._due, []
            for _ in due:
                self._strike()
            time.sleep(TICK_SECONDS)
        return found

    def _strike(self) -> None:
        if not self._deck:
            self._deck = [kind for kind in FAULTS if kind != "database" or self.inst.postgres is not None]
            self.dice.shuffle(self._deck)
        kind = self._deck.pop()
        time.sleep(self.dice.uniform(0.0, 0.3))  # somewhere within the step
        away = self.dice.uniform(0.1, 3.0)
        children = self._kill_children() if kind in ("child", "everything") else 0
        members = {
            "worker": self.inst.workers,
            "api": [self.inst.api],
            "broker": [self.inst.broker],
            "database": [] if self.inst.postgres is None else [self.inst.postgres.member],
            "everything": self.inst.members,
        }.get(kind, [])
        struck = children + sum(member.kill(away) for member in members)
        self.faults[kind if struck else f"{kind}: nobody there"] += 1
        print(f"{kind}: {'struck' if struck else 'nobody there'}", flush=True)

    def _children(self) -> dict[int, str]:
        return {pid: command for pid, command in self.inst.processes().items() if "core.train.session" in command}

    def _kill_children(self) -> int:
        pids = [*self._children()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def _joined(self) -> int:
        """Attempts of sessions that had no slot of their own."""
        query = (
            "SELECT count(*) FROM attempts LEFT JOIN allocations ON allocations.job_id = attempts.job_id "
            "AND allocations.attempt = attempts.attempt WHERE attempts.kind = 'session' AND allocations.slot IS NULL"
        )
        url = self.inst.postgres.url if self.inst.postgres else f"sqlite:///{self.inst.data}/eft.db"
        with look.tables(url) as tables:
            ((count,),) = tables.rows(query)
        return int(count)

    def _quiet(self) -> bool:
        self.inst.tick()
        return not self._children()

    def _answers(self) -> bool:
        self.inst.tick()
        try:
            return httpx.get(f"{self.inst.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos.sessions", description=__doc__)
    parser.add_argument("--seed", type=int, help="the same seed does the same things (default: a new one)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--recipes", type=int, default=3)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    given = parser.parse_args()
    seed = new_seed() if given.seed is None else given.seed
    outcome = SessionRun(Storm(seed, given.database, given.recipes, given.steps)).go()
    for words in outcome.violations:
        print(words)
    facts = {"seed": seed, "database": given.database, "recipes": given.recipes, "steps": given.steps}
    counts = {"joined": outcome.joined, "violations": len(outcome.violations)}
    print(json.dumps(facts | {"faults": dict(outcome.faults)} | counts))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
