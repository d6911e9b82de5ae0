"""What keys do on the screen of `eft watch`: select a job, open it, pause, resume or cancel it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eft.watch.world import World

KEY = re.compile(r"\x1b\[[AB]|\x1bO[AB]|.", re.DOTALL)
UP, DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")
OPEN, BACK = ("\r", "\n"), ("\x1b", "\x7f", "b")
ACTIONS = {"p": "pause", "r": "resume", "c": "cancel"}


class JobControl(Protocol):
    """What keys ask for; watch/look.py does it."""

    def follow(self, job_id: str | None) -> None: ...

    def ask(self, action: str, job_id: str) -> None: ...


@dataclass
class Keys:
    """State of the screen that keys change."""

    control: JobControl
    world: Callable[[], World]
    selected: str | None = None
    """Id of the job that keys are about, in a list of jobs."""
    question: str | None = None
    """Id of the job of which one asks whether it is to be cancelled."""
    opened: bool = False
    """One job is shown that was opened from the list of all."""

    def press(self, pressed: str) -> bool:
        """Do what these keys say; True when one of them leaves the program."""
        return any(self._press(key) for key in KEY.findall(pressed))

    def _press(self, key: str) -> bool:
        if self.question is not None:
            asked, self.question = self.question, None
            if key in ("y", "Y"):
                self.control.ask("cancel", asked)
            return False
        world = self.world()
        if key in ("q", "Q"):
            return True
        if key in BACK and self.opened:
            self.opened = False
            self.control.follow(None)
        elif key in UP or key in DOWN:
            self._move(-1 if key in UP else 1, world)
        elif key in OPEN and world.one is None and self.chosen(world) is not None:
            self.opened = True
            self.control.follow(self.chosen(world))
        elif (action := ACTIONS.get(key)) is not None and (job_id := self.chosen(world)) is not None:
            if action == "cancel":
                self.question = job_id  # nothing undoes it
            else:
                self.control.ask(action, job_id)
        return False

    def chosen(self, world: World) -> str | None:
        """The job that keys are about: the one that is shown, or the selected one while it is in the list."""
        if world.one is not None:
            return world.one
        return self.selected if self.selected in world.listed() else None

    def _move(self, by: int, world: World) -> None:
        listed = world.listed()
        if world.one is not None or not listed:
            return
        here = self.chosen(world)
        self.selected = listed[0 if here is None else max(0, min(len(listed) - 1, listed.index(here) + by))]
