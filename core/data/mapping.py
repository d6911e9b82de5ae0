"""How a mapping of columns is written: messages that propose one say it for a job and for the command line."""

from __future__ import annotations

from collections.abc import Mapping


def mapped(columns: Mapping[str, str]) -> str:
    """`columns: {prompt: question}`, or `--column prompt=question` on the command line."""
    pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    options = " ".join(f"--column {ours}={theirs}" for ours, theirs in columns.items())
    return f"`columns: {{{pairs}}}`, or `{options}` on the command line"
