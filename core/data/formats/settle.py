"""Which format a row has, by its keys alone.

A row that fits two formats is told so and never guessed at. One exception is a definition and no guess: where both
`chosen` and `rejected` stand, the row is a preference, since every other reading would lose one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.spec.axes.data import RowFormat

REQUIRED: dict[RowFormat, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "prompt_completion": (("prompt", "completion"),),
    "instruction": (("instruction", "output"),),
    "text": (("text",),),
    "preference": (("chosen", "rejected"), ("input", "preferred_output", "non_preferred_output")),
    "kto": (("prompt", "completion", "label"), ("messages", "label")),
    "stepwise": (("prompt", "completions", "labels"),),
    "prompt": (("prompt", "reference"), ("messages", "reference")),
}
"""Keys that make a row fit a format: all of one of the groups."""
SHAPES = (
    "`messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, `text`, `chosen` and "
    "`rejected`, `prompt`, `completions` and `labels`, or `prompt` and `reference`"
)
KNOWN = frozenset(key for groups in REQUIRED.values() for group in groups for key in group) | {"tools", "system"}

READ: dict[RowFormat, frozenset[str] | None] = {
    "messages": frozenset({"messages", "tools"}),
    "sharegpt": frozenset({"conversations", "system", "tools"}),
    "prompt_completion": frozenset({"prompt", "completion", "tools"}),
    "instruction": frozenset({"instruction", "input", "output"}),
    "text": frozenset({"text"}),
    "preference": frozenset({"prompt", "messages", "conversations", "chosen", "rejected", "tools", "system"})
    | {"input", "preferred_output", "non_preferred_output", "margin"},
    "kto": frozenset({"prompt", "completion", "messages", "label", "tools"}),
    "stepwise": frozenset({"prompt", "completions", "labels", "tools"}),
    "prompt": None,
}
"""Keys that are read of a row of each format; None: all of them, since a reward may."""


def fits(value: Mapping[str, Any]) -> list[RowFormat]:
    """Every format whose keys are there."""
    found: list[RowFormat] = [
        name for name, groups in REQUIRED.items() if any(all(key in value for key in group) for group in groups)
    ]
    if "kto" in found and not isinstance(value["label"], bool):
        found.remove("kto")  # a label of another kind is a class name or number beside the text
    if "preference" in found:
        return ["preference"]
    return found


def missing(value: Mapping[str, Any], name: RowFormat) -> str | None:
    """The key that a row of this format lacks; None when it has all. `prompt` rows need no `reference` once they are
    declared."""
    if name == "prompt":
        return None if "prompt" in value or "messages" in value else "prompt"
    lacking = [[key for key in group if key not in value] for group in REQUIRED[name]]
    best = min(lacking, key=len)
    return best[0] if best else None


def nearest(value: Mapping[str, Any]) -> tuple[RowFormat, str] | None:
    """For a row that fits nothing: the format that most of its keys are of, and the key that it lacks of that."""
    best: tuple[RowFormat, str] | None = None
    most = 0
    for name, groups in REQUIRED.items():
        read = len(value.keys() & (READ[name] or ()))
        for group in groups:
            lacking = [key for key in group if key not in value]
            if len(lacking) < len(group) and max(read, 1) > most:
                best, most = (name, lacking[0]), max(read, 1)
    return best
