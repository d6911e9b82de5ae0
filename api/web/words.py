"""How pages say things: numbers, sizes, times, and what a job does now."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from core.spec.differences import differences

NOTHING = "–"
"""Stands where there is no value."""
Figures = tuple[float, float, float]
"""Last, smallest and largest value of a curve."""

PHASES = {
    "loading": "loads the model",
    "compiling": "compiles the model's blocks",
    "preparing": "prepares the data",
    "training": "trains",
    "evaluating": "evaluates",
    "saving": "saves the result",
    "exporting": "writes the export",
    "sampling": "answers the sample prompts",
}
STATES = {
    "queued": "waiting",
    "preparing": "preparing",
    "starting": "starting",
    "running": "running",
    "pausing": "pausing",
    "paused": "paused",
    "stopping": "stopping",
    "succeeded": "done",
    "failed": "failed",
    "cancelled": "cancelled",
}
"""Status → the word on its badge."""
VERBS: dict[str, tuple[str, ...]] = {
    "queued": ("pause", "cancel"),
    "preparing": ("pause", "cancel"),
    "starting": ("pause", "cancel"),
    "running": ("pause", "cancel"),
    "pausing": ("cancel",),
    "paused": ("resume", "cancel"),
    "stopping": (),
    "succeeded": ("delete",),
    "failed": ("retry", "delete"),
    "cancelled": ("retry", "delete"),
}
"""Status → the buttons of a job's page. The API decides; these are those that it would take."""


def moment(text: str | None) -> Markup:
    """A time with its zone: relative for the eye, ISO for the machine. The page's script keeps the first up to date."""
    if not text:
        return Markup('<span class="none">–</span>')
    when = datetime.fromisoformat(text)
    shown = when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    relative = ago((datetime.now(UTC) - when).total_seconds())
    return Markup('<time datetime="{}" title="{}">{}</time>').format(text, shown, relative)


def clock(text: str | None) -> Markup:
    """A time as date and clock, with its zone."""
    if not text:
        return Markup("")
    when = datetime.fromisoformat(text).astimezone(UTC)
    return Markup('<time data-clock datetime="{}">{}</time>').format(text, when.strftime("%Y-%m-%d %H:%M:%S UTC"))


def ago(seconds: float) -> str:
    """`3 min ago`, `in 2 h`."""
    if abs(seconds) < 5:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def duration(seconds: float | None) -> str:
    """One unit while that is exact enough, or two: `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(abs(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest and minutes < 10 else "")
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(hours, 24)
    return f"{days} d" + (f" {hours} h" if hours and days < 10 else "")


def between(begin: str | None, end: str | None) -> str:
    """The time from one ISO moment to another, or until now."""
    if not begin:
        return "–"
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return duration((last - datetime.fromisoformat(begin)).total_seconds())


def number(value: Any, digits: int = 4) -> str:
    """Few significant digits: 4.773, 1.2e-05, 83,751."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(value: float | None) -> str:
    """Bytes in decimal units: 36.3 kB, 24 GB."""
    if value is None:
        return "–"
    amount, unit = float(value), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(amount) < 1000 or unit == "PB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"


def percent(part: float | None, whole: float | None) -> int:
    return round(100 * min(1.0, (part or 0) / whole)) if whole else 0


def state(status: str) -> str:
    return STATES.get(status, status)


def badge(status: str) -> Markup:
    return Markup('<span class="badge s-{}">{}</span>').format(status, state(status))


def short(identity: str | None) -> str:
    """The end of an id, which tells two apart."""
    return "" if identity is None else identity[-6:]


def model_name(model: Mapping[str, Any] | str | None) -> str:
    """The short name of a spec's model."""
    if not isinstance(model, Mapping):
        return str(model or "")
    name = model.get("id") or model.get("path") or model.get("job") or model.get("type") or ""
    return str(name).rstrip("/").rpartition("/")[2]


def now(job: Mapping[str, Any], phase: str | None = None, reward: Figures | None = None) -> str:
    """The sentence at the head of a job's page: what happens now, and what comes next. `reward`: the mean reward of the
    steps of a job that has rewards, whose loss does not say whether it learns."""
    status, reason, progress = job["status"], job["reason"], job["progress"] or {}
    match status:
        case "running":
            return _running(progress, phase, reason, reward)
        case "queued":
            return _waiting(job)
        case "succeeded":
            return _succeeded(job, reward)
        case "failed":
            failure = job["failure"] or {}
            return f"Failed: {failure.get('message') or reason}."
        case "paused":
            step = progress.get("step")
            return "Paused" + (f" at step {step:,}" if step else "") + ". Resume continues from its checkpoint."
        case "cancelled":
            return f"Cancelled: {reason}."
        case _:
            return f"{state(status).capitalize()}: {reason}."


def _running(progress: Mapping[str, Any], phase: str | None, reason: str, reward: Figures | None) -> str:
    step, total, left = progress.get("step"), progress.get("total_steps"), progress.get("seconds_left")
    doing = PHASES.get(phase or "", phase or "trains").capitalize()
    parts = [doing]
    if step:
        parts.append(f"step {step:,}" + (f" of {total:,} ({percent(step, total)} %)" if total else ""))
    if reward is not None:
        parts.append(_rewarded(reward))
    if left is not None and step:
        parts.append(f"about {duration(left)} left")
    return f"{', '.join(parts)}; {reason}."


def _waiting(job: Mapping[str, Any]) -> str:
    place = job.get("queue")
    if not place:
        return f"Waiting: {job['reason']}."
    told = place["position"] is None or " in line" in place["reason"]
    position = "" if told else f", number {place['position']} in line"
    return f"Waiting{position}: {place['reason']}."


def _rewarded(reward: Figures) -> str:
    last, least, most = reward
    return f"reward {number(last)} (of all steps {number(least)} to {number(most)})"


def _succeeded(job: Mapping[str, Any], reward: Figures | None) -> str:
    result = job["result"] or {}
    before, after = result.get("eval_before") or {}, result.get("eval_after") or {}
    took = between(job["started_at"], job["finished_at"])
    for name, said in (("eval_reward", "held-out reward"), ("eval_loss", "eval loss")):
        if name in after:
            first = f" from {number(before[name])}" if name in before else ""
            return f"Done in {took}: {said}{first} to {number(after[name])}."
    if reward is not None:
        return f"Done in {took}: {_rewarded(reward)}."
    if "train_loss" in result:
        return f"Done in {took}: mean training loss {number(result['train_loss'])}."
    return f"Done in {took}."


def figure(job: Mapping[str, Any], reward: Figures | None = None) -> tuple[str, float] | None:
    """The one metric that a list shows of a job: its best, or the last evaluation, or the last reward, or the training
    loss."""
    result = job["result"] or {}
    best = result.get("best") or {}
    if best.get("value") is not None:
        return str(best["metric"]), float(best["value"])
    after = result.get("eval_after") or {}
    for name in ("eval_reward", "eval_loss"):
        if name in after:
            return name, float(after[name])
    if reward is not None:
        return "reward", reward[0]
    return ("train_loss", float(result["train_loss"])) if result.get("train_loss") is not None else None


def changed(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The fields in which specs differ, each with the words for every spec's value; `NOTHING` where it has none."""
    missing = object()
    found = differences(specs, missing)
    return [(path, [NOTHING if value is missing else plain(value) for value in each]) for path, each in found.items()]


def plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return repr(value) if isinstance(value, float) else str(value)


def visible(text: str | None) -> Markup:
    """An answer of a model: what is nothing but blanks is shown as signs, so that it is not taken for no answer."""
    if text is None:
        return Markup('<span class="none">–</span>')
    if not text:
        return Markup('<span class="none">(empty)</span>')
    if text.isspace():
        signs = text.replace("\n", "↵").replace(" ", "␣").replace("\t", "⇥")
        return Markup('<span class="none">{}</span>').format(signs)
    return escape(text)


FILTERS = (
    *("moment", "clock", "duration", "between", "number", "size", "percent", "badge", "short", "model_name", "figure"),
    *("plain", "state", "visible"),
)
"""Functions that templates use as filters."""
