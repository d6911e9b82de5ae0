"""Rows of stepwise supervision: `{"prompt": "…", "completions": ["…", "…"], "labels": [true, false]}`, as TRL has them
(https://huggingface.co/docs/trl/dataset_formats#stepwise-supervision)."""

from __future__ import annotations

from typing import Any

from core.data.faults import Faults, kind, text
from core.data.formats.chat import tool_definitions
from core.data.formats.judged import judgement, prompt_of
from core.data.rows import Stepwise


def read_stepwise(value: dict[str, Any], faults: Faults) -> Stepwise | None:
    steps, labels = value["completions"], value["labels"]
    tools = tool_definitions(value, faults)
    prompt = prompt_of(value, "prompt", faults)
    read = _steps(steps, faults)
    judged = _labels(labels, faults)
    if read is not None and judged is not None and len(read) != len(judged):
        words = f"{len(judged)} labels for {len(read)} steps; each string of `completions` has one label, in order"
        faults.add("label_count", words, "labels")
        return None
    if prompt is None or read is None or judged is None:
        return None
    return Stepwise(prompt, read, judged, tools)


def _steps(value: Any, faults: Faults) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        words = f"expected a list of strings, one a step, not {kind(value)}"
        if isinstance(value, str):
            words += "; split the text at its separator, and leave the separator out: the stage writes it"
        faults.add("invalid_type", words, "completions")
        return None
    if not value:
        faults.add("empty", "a solution has at least one step", "completions")
        return None
    return tuple(text(step, f"completions[{at}]", faults, filled=True) for at, step in enumerate(value))


def _labels(value: Any, faults: Faults) -> tuple[bool, ...] | None:
    if not isinstance(value, list):
        words = f"expected a list of booleans, one for each step, not {kind(value)}"
        faults.add("invalid_type", words, "labels")
        return None
    found = [judgement(label, f"labels[{at}]", faults) for at, label in enumerate(value)]
    return tuple(bool(label) for label in found)
