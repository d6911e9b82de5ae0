"""The lineage of a model as a drawing: its base, the jobs between, the model, and the models that were made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, HEIGHT, ACROSS, DOWN = 200, 52, 248, 68
"""Size of a box, and the distances from one box to the next, in pixels."""
WORDS = 26
"""Characters of a line that a box has room for."""


@dataclass(slots=True)
class Relative:
    """One box."""

    key: str
    title: str
    about: str
    parent: str | None = None
    link: str | None = None
    """Path of its page below `ui/`; None: there is none."""
    here: bool = False
    """The model that the page shows."""
    x: int = 0
    y: int = 0
    children: list[Relative] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and lines with their places."""

    members: Sequence[Relative]
    lines: Sequence[tuple[int, int, int, int]]
    """From the right edge of a box to the left edge of another: x, y, x, y."""
    width: int
    height: int


def draw(
    base: str, lineage: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]], known: Mapping[str, str]
) -> Drawing:
    """`base`: name of the first model. `lineage`: generations as `GET /models/{id}/lineage` lists them. `made`: those
    that came after it, oldest first, each with job, name, stage, method and parent (a job). `known`: model of each job
    that has one."""
    root = Relative("base", _cut(base), "base model")
    members = {root.key: root}
    for place, one in enumerate(reversed(lineage)):
        spec = one["model"]["spec"]
        parent = spec.get("id") if spec.get("type") == "job" else None
        _enter(members, one, parent, known, here=place == len(lineage) - 1)
    for one in made:
        _enter(members, one, one["parent"], known)
    rows = _place(root, 0, 0)
    lines = [
        (one.x + WIDTH, one.y + HEIGHT // 2, child.x, child.y + HEIGHT // 2)
        for one in members.values()
        for child in one.children
    ]
    width = max(one.x for one in members.values()) + WIDTH + 2
    return Drawing(list(members.values()), lines, width, rows * DOWN - (DOWN - HEIGHT) + 2)


def _enter(
    members: dict[str, Relative],
    one: Mapping[str, Any],
    parent: str | None,
    known: Mapping[str, str],
    *,
    here: bool = False,
) -> None:
    job = one["job"]
    above = members.get(parent or "base", members["base"])
    link = f"models/{known[job]}" if job in known else None
    member = Relative(job, _cut(one["name"] or job), f"{one['stage']}, {one['method']}", above.key, link, here)
    members[job] = member
    above.children.append(member)


def _place(member: Relative, depth: int, row: int) -> int:
    """Give a member and all below it their places; the first row after them."""
    member.x, member.y = 1 + depth * ACROSS, 1 + row * DOWN
    for child in member.children:
        row = _place(child, depth + 1, row)
    return row if member.children else row + 1


def _cut(text: str) -> str:
    return text if len(text) <= WORDS else f"{text[: WORDS - 1]}…"
