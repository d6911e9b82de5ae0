"""What a run tells of its steps: figures once the device has them, remarks, and the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.plan.advice import of_training_losses
from core.train.base.async_metrics import AsyncMetrics, Timestamp, seconds_between
from core.train.data.loaders import StepLoader
from core.train.engine import REMEDY, Diverged
from core.train.evaluation.schedule import EvaluationSchedule
from core.train.run import Run
from core.train.stage import Stage, Totals, joined, nothing
from core.train.state import TrainerState

PROGRESS_SECONDS = 0.3
RECENT_STEPS = 20
"""Steps that the estimate of the time left is made from."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was done, as far as the host knows it before the device answers."""

    step: int
    totals: Totals
    before: Mapping[str, float]
    """Sums, tokens and slots of the part of the step that an attempt before has done."""
    seconds: float
    """Seconds that this part took."""
    started: Timestamp
    ended: Timestamp
    learning_rate: float
    memory_bytes: int
    skipped: bool
    scaling: dict[str, float]
    """The loss scale of a run in fp16 from then on, and the steps skipped so far."""


@dataclass
class StepReport:
    """Reports steps in their order, each as soon as its figures have come from the device."""

    run: Run
    stage: Stage
    loader: StepLoader
    schedule: EvaluationSchedule
    state: TrainerState
    device: torch.device
    evaluation_seconds: float = field(default=0.0, init=False)
    """Seconds that the last evaluation took."""
    _progress_at: float = field(default=0.0, init=False)
    _told_skip: bool = field(default=False, init=False)
    _remarked: set[str] = field(default_factory=set, init=False)
    _recent: list[float] = field(default_factory=list, init=False)
    _metrics: AsyncMetrics[StepRecord] = field(init=False)

    def __post_init__(self) -> None:
        self._metrics = AsyncMetrics(self.device)

    def put(self, closed: StepRecord, figures: Mapping[str, Tensor]) -> None:
        """Take a step with its figures on the device, and report those steps whose figures have arrived."""
        self._metrics.put(closed, figures)
        for about, arrived in self._metrics.ready():
            self._report(about, arrived)

    def settle(self) -> None:
        """Report every step that was done, before anything is written or decided that rests on it."""
        for about, figures in self._metrics.all():
            self._report(about, figures)

    def _report(self, closed: StepRecord, figures: dict[str, float]) -> None:
        """Report a step. Raises Diverged if its figures are not finite; steps queued behind it have changed no weight
        (`Engine.step`)."""
        state = self.state
        before, names = closed.before, {**figures, **closed.before}
        sums = {name: joined(name, before.get(name, nothing(name)), figures.get(name, nothing(name))) for name in names}
        found = self.stage.figures(sums, closed.totals)
        loss = found["loss"]
        lost = closed.skipped and not math.isfinite(loss)
        told = {} if lost else found | {"loss": finite(loss, "loss", closed.step)}  # first: a gradient breaks by it
        norm = {} if closed.skipped else {"grad_norm": finite(figures["grad_norm"], "gradient", closed.step)}
        seconds = closed.seconds + seconds_between(closed.started, closed.ended)
        tokens, slots = sums["tokens"], sums["slots"]
        memory = {name: figure for name, figure in figures.items() if name.startswith("memory_bytes")}
        values = {
            **told,
            "learning_rate": closed.learning_rate,
            **norm,
            **closed.scaling,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "total_tokens": float(state.tokens + int(tokens)),
            "padding_share": 1.0 - tokens / slots,
            "memory_bytes": max(memory.values(), default=float(closed.memory_bytes)),
            **memory,
            "epoch": self.loader.epochs_after(closed.step),
        }
        if not lost:
            self._report_remark(found)
        self._recent = [*self._recent[-RECENT_STEPS + 1 :], seconds]
        state.loss_sum += 0.0 if lost else loss
        state.lost_losses += lost
        state.tokens += int(tokens)
        state.seconds += seconds
        state.metrics.append({"step": closed.step, **values})
        self.run.events.write("metrics", step=closed.step, values=values)
        if not state.loss_rose and (rose := of_training_losses(state.metrics)) is not None:
            state.loss_rose = True
            self.run.notice(rose.code, rose.message)
        if closed.skipped:
            self._report_skip(closed)
        self._report_progress(closed.step)

    def _report_remark(self, figures: Mapping[str, float]) -> None:
        """Report what the stage remarks on a step, each code once an attempt."""
        remark = self.stage.remark(figures)
        if remark is not None and remark.code not in self._remarked:
            self._remarked.add(remark.code)
            self.run.notice(remark.code, remark.message)

    def _report_skip(self, closed: StepRecord) -> None:
        """Report the first skipped step of an attempt; the metrics have all of them."""
        if self._told_skip:
            return
        self._told_skip = True
        message = (
            f"loss or gradients overflowed fp16 at step {closed.step}: such a step changes no weight, the schedule "
            f"waits, and the loss scale is halved (now {closed.scaling['loss_scale']:g}); the figures loss_scale and "
            "skipped_steps tell of further ones"
        )
        self.run.notice("step_skipped", message)

    def _report_progress(self, step: int) -> None:
        now, left = time.monotonic(), self.schedule.total_steps - step
        if left and now - self._progress_at < PROGRESS_SECONDS:
            return
        self._progress_at = now
        seconds_left = left * sum(self._recent) / len(self._recent) + self.schedule.left(step) * self.evaluation_seconds
        self.run.events.write(
            "progress",
            step=step,
            total_steps=self.schedule.total_steps,
            epoch=self.loader.epochs_after(step),
            seconds_left=round(seconds_left, 1),
        )


def finite(value: float, what: str, step: int) -> float:
    """`value`. Raises Diverged where it is no finite number."""
    if not math.isfinite(value):
        raise Diverged(f"the {what} became {value} at step {step}; {REMEDY}", field="optimizer.learning_rate")
    return value
