"""The log of a run as people read it: one line for each event that is worth one, at most some 200 for the steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any

from core.spec.run.events import EventType

STEP_LINES = 100
"""Lines for the steps of a run whose number is known; the first step and the last one have a line of their own."""
STEP_SECONDS = 10.0
"""Seconds between lines for the steps of a run whose number of steps is unknown."""
DOWNLOAD_SECONDS = 10.0


class LogLines:
    """Writes what `EventWriter` tells. A log that cannot be written ends no run, since events.jsonl has all of it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._total: int | None = None
        self._next_step = 0
        self._last = float("-inf")
        """When the last line about a step or a download was written."""

    def tell(self, type: EventType, payload: Mapping[str, Any]) -> None:
        words = self._words(type, payload)
        if words is None:
            return
        moment = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        try:
            self._stream.write(f"{moment} {words}\n")
            self._stream.flush()
        except OSError:
            return

    def _words(self, type: EventType, data: Mapping[str, Any]) -> str | None:
        match type:
            case "phase":
                self._last = float("-inf")
                return str(data["phase"])
            case "run_record":
                return self._begins(data["record"])
            case "progress":
                return self._progress(data)
            case "metrics":
                return self._step(data["step"], data["values"])
            case "evaluation":
                return f"evaluation at step {data['step']}: {_figures(data['values'])}"
            case "checkpoint":
                return f"checkpoint at step {data['step']}"
            case "resumed":
                return f"resumed from the checkpoint of step {data['step']}"
            case "notice":
                return f"notice {data['code']}: {data['message']}"
            case "result":
                return _ends(data)
            case "error":
                return f"error {data['code']} ({data['failure']}): {data['message']}"
            case "samples" | "alive":
                return None

    def _begins(self, record: Mapping[str, Any]) -> str | None:
        self._total = record.get("total_steps")
        parameters = record.get("parameters")
        if self._total is None or parameters is None:
            return None
        trained, total = parameters["trained"], parameters["total"]
        return f"{self._total} steps; {trained:,} trained parameters of {total:,} in the model"

    def _step(self, step: int, values: Mapping[str, Any]) -> str | None:
        now = time.monotonic()
        if self._total is None:
            if step > 1 and now - self._last < STEP_SECONDS:
                return None
        elif step < self._next_step and step != self._total:
            return None
        else:
            each = -(-self._total // STEP_LINES)
            self._next_step = (step // each + 1) * each
        self._last = now
        of = "" if self._total is None else f"/{self._total}"
        shown = {name: values[name] for name in ("loss", "learning_rate", "tokens_per_second") if name in values}
        return f"step {step}{of}: {_figures(shown)}"

    def _progress(self, data: Mapping[str, Any]) -> str | None:
        """Bytes and rows: of steps the metrics tell."""
        unit = next((unit for unit in ("bytes", "rows") if unit in data), None)
        done, total = (None, None) if unit is None else (data[unit], data.get(f"total_{unit}"))
        now = time.monotonic()
        if done is None or (done != total and now - self._last < DOWNLOAD_SECONDS):
            return None
        self._last = now
        return f"{done:,} of {total:,} {unit}" if total is not None else f"{done:,} {unit}"


def _figures(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in values.items())


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ends(data: Mapping[str, Any]) -> str:
    result = data["result"]
    if "train_loss" not in result:
        return "done"
    held_out = [result.get("eval_before"), result.get("eval_after")]
    words = f"done: {result['steps']} steps, train_loss {_figure(result['train_loss'])}"
    for name in ("eval_loss", "eval_reward"):
        found = [f"{one[name]:.4g}" for one in held_out if one and one.get(name) is not None]
        words += f", {name} {' to '.join(found)}" if found else ""
    return words
