"""`eft watch` of all jobs where no terminal is: a line for whatever happens, and for every tenth of a job's way."""

from __future__ import annotations

import threading
from datetime import datetime

from eft.terminal.output import Output, duration
from eft.terminal.progress import PLAIN_SHARE
from eft.terminal.sanitize import harmless
from eft.watch.look import Look
from eft.watch.world import Line, World


def run(look: Look, changed: threading.Event, output: Output) -> None:
    """Until it is interrupted, or looking has ended: then raises why."""
    told: dict[Line, None] = {}
    shares: dict[str, float] = {}
    while True:
        changed.wait()
        changed.clear()
        world = look.world
        for line in world.lines:
            if line not in told:
                told[line] = None
                _say(output, line.at, line.job, line.words)
        told = {line: None for line in told if line in set(world.lines)}
        _progress(world, shares, output)
        if world.error is not None:
            raise world.error


def _progress(world: World, shares: dict[str, float], output: Output) -> None:
    for one in world.jobs:
        progress = one.job.progress
        if progress is None or not progress.total_steps:
            continue
        share, before = progress.step / progress.total_steps, shares.get(one.job.id, -1.0)
        if share - before >= PLAIN_SHARE or share < before:
            shares[one.job.id] = share
            loss = f"  loss {one.loss[-1]:.3f}" if one.loss and one.loss[-1] is not None else ""
            left = f"  {duration(progress.seconds_left)} left" if progress.seconds_left is not None else ""
            words = f"step {progress.step}/{progress.total_steps}{loss}{left}"
            _say(output, datetime.now().astimezone(), one.job.id, words)


def _say(output: Output, at: datetime, job: str | None, words: str) -> None:
    output.text(f"{at:%H:%M:%S} {f'{job} ' if job else ''}{harmless(' '.join(words.split()))}\n")
