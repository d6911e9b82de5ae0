"""Names of the checkpoint folders in a run folder: `step-00000050`, `step-00000050-micro-0003`, `step-00000050-v2`.

A checkpoint is never replaced in place. When a run writes the same progress again (a stop request right after a
periodic save), the new one gets the next version, and the older versions are removed once it is whole. A crash at any
point therefore leaves at least one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

_NAME = re.compile(r"^step-(\d{8,})(?:-micro-(\d{4,}))?(?:-v(\d+))?$")
BEST = "best-"
"""Prefix of the folders that hold the weights of good evaluations, beside the checkpoints."""
_BEST = re.compile(rf"^{BEST}(\d{{8,}})$")


class Progress(NamedTuple):
    """How far a checkpoint has come. Orders as the run does: a later version counts as further."""

    step: int
    """Optimizer steps done."""
    micro: int
    """Backward passes of the next optimizer step."""
    version: int = 1
    """1 for the first checkpoint of this step and micro-step in its folder."""


def checkpoint_name(progress: Progress) -> str:
    """Folder name of a checkpoint."""
    step, micro, version = progress
    return f"step-{step:08d}" + (f"-micro-{micro:04d}" if micro else "") + (f"-v{version}" if version > 1 else "")


def progress_of(name: str) -> Progress | None:
    """The progress that a folder name states; None for other names."""
    match = _NAME.match(name)
    return None if match is None else Progress(int(match[1]), int(match[2] or 0), int(match[3] or 1))


def best_name(step: int) -> str:
    """Folder name of the weights that did best in the evaluation after `step` optimizer steps."""
    return f"{BEST}{step:08d}"


def best_step(name: str) -> int | None:
    """The step that a folder name made by `best_name` states; None for other names."""
    match = _BEST.match(name)
    return None if match is None else int(match[1])


def superseded(names: Iterable[str]) -> list[str]:
    """The names, in order of progress, of which a later version is among `names`."""
    found = sorted((progress, name) for name in set(names) if (progress := progress_of(name)) is not None)
    return [name for (progress, name), (after, _) in pairwise(found) if progress[:2] == after[:2]]
