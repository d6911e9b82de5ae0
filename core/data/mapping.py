"""How a mapping of columns is written: messages that propose one say it for a job and for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mapped(columns: Mapping[str, str]) -> str:
    """`columns: {prompt: question}`, or `--column prompt=question` on the command line."""
    pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    options = " ".join(f"--column {ours}={theirs}" for ours, theirs in columns.items())
    return f"`columns: {{{pairs}}}`, or `{options}` on the command line"


def proposed(names: Sequence[str]) -> str:
    """`mapped`, for the first columns of a file whose names are those of no format."""
    return mapped(dict(zip(("prompt", "completion"), (name[:40] for name in names), strict=False)))
