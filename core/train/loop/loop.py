"""The loop of a batch run: steps of micro-steps, figures, evaluations, checkpoints, and leaving when asked."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from core.base import collector
from core.spec.axes.runtime import HeldOut, NoEvaluation
from core.spec.run.checkpoint_names import best_name
from core.spec.run.folder import CHECKPOINTS
from core.train.base import disk
from core.train.base.async_metrics import Timestamp, seconds_between, timestamp
from core.train.base.stop import StopRequested
from core.train.checkpoint import engine_state, store
from core.train.checkpoint.saving import Saver
from core.train.data.loaders import StepBatches, StepLoader
from core.train.engine import REMEDY, Diverged, Engine
from core.train.evaluation.curvature import estimate_curvature
from core.train.evaluation.early_stopping import EarlyStoppingState, best_steps, early_stopping, needed, worse
from core.train.evaluation.held_out import HeldOutMeasure, Share, prelude
from core.train.evaluation.schedule import EvaluationSchedule
from core.train.loop.report import StepRecord, StepReport, finite
from core.train.run import Run
from core.train.stage import MAXIMUM, Stage, Totals, joined, nothing
from core.train.state import TrainerState


@dataclass(slots=True)
class PartialStep:
    """What this process has done of the step at hand: of several ranks each has its own part."""

    sums: dict[str, Tensor]
    """Sums of the stage; float64 on the device. Sums of float32 are exact in it, however a step is cut."""
    tokens: int = 0
    slots: int = 0


def keep_and_tell(run: Run, state: TrainerState, stage: Stage, path: Path, step: int, micro: int) -> None:
    """A checkpoint is on the disk: drop those that are too old, and tell."""
    root, keep, evaluation = path.parent, run.spec.checkpoint, run.evaluation
    best = best_steps(state.evaluations, evaluation, stage)
    store.prune(root, keep.keep_last, best, keep.keep_best, keep.keep_hourly)
    if isinstance(evaluation, HeldOut):
        kept = [found.step for found in store.newest_first([root])]
        store.prune_best(root, needed(state.evaluations, evaluation, stage, kept))
    run.events.write("checkpoint", step=step, micro_step=micro, path=f"{CHECKPOINTS}/{path.name}")


@dataclass
class Loop:
    run: Run
    engine: Engine
    stage: Stage
    loader: StepLoader
    total_steps: int
    evaluator: HeldOutMeasure | None
    """May raise StopRequested; None with NoEvaluation."""
    state: TrainerState
    _told_bound: bool = field(default=False, init=False)
    _schedule: EvaluationSchedule = field(init=False)
    _report: StepReport = field(init=False)
    _saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        self._schedule = EvaluationSchedule(self.evaluation, self.total_steps)
        self._report = StepReport(self.run, self.stage, self.loader, self._schedule, self.state, self.engine.device)
        # No method of the loop: in a circle with it the saver would keep the rows' files open until the collector runs.
        self._saver = Saver(self.run, self.engine, partial(keep_and_tell, self.run, self.state, self.stage))

    @property
    def evaluation(self) -> HeldOut | NoEvaluation:
        return self.run.evaluation

    def train(self) -> None:
        """Train to the last step. StopRequested after a checkpoint, when asked to leave. Diverged when no step had a
        loss."""
        with collector.standing():  # to walk the models' objects again and again is 3 % of a step on a CPU
            self._train()
        steps = self.engine.steps
        if 0 < steps == self.state.lost_losses:  # fewer than the scaler has patience with
            raise Diverged(
                f"in none of {steps} step(s) the loss was a finite number; {REMEDY}", field="training.precision"
            )

    def _train(self) -> None:
        engine = self.engine
        try:
            if engine.micro_steps == 0:
                self._maybe_evaluate()  # the untrained model; or the one that the attempt before could not finish
            self.run.phase("training")
            while engine.steps < self.total_steps and not self.stopped_early:
                self._step()
                if engine.steps < self.total_steps:
                    self._maybe_save()
                self._maybe_evaluate()
            self._report.settle()
            self._saver.finish()
            self._tell_end()
        except StopRequested:
            self.save()
            raise

    @property
    def _asked(self) -> bool:
        """Whether at least one rank was asked to stop: all of them leave at the same micro-step."""
        return self.engine.ranks.any_rank(self.run.stop.requested)

    @property
    def _early_stopping(self) -> EarlyStoppingState:
        return early_stopping(self.state.evaluations, self.evaluation, self.stage)

    @property
    def stopped_early(self) -> bool:
        return (
            self.engine.steps < self.total_steps
            and early_stopping(self.state.evaluations, self.evaluation, self.stage).stop
        )

    def _out_of_bounds(self) -> bool:
        """Whether the last evaluation is worse than `checkpoint.metric_bound`. The first time is reported."""
        bound, evaluation = self.run.spec.checkpoint.metric_bound, self.evaluation
        if bound is None or isinstance(evaluation, NoEvaluation) or not self.state.evaluations:
            return False
        last = self.state.evaluations[-1]
        if not worse(last, bound, evaluation, self.stage):
            return False
        if not self._told_bound:
            self._told_bound = True
            metric = evaluation.metric_for_best_model
            words = f"{metric} was {last[metric]:.4g} after step {last['step']:.0f}, worse than {bound:g}"
            self.run.notice("checkpoint_withheld", f"{words}: no checkpoint is written until it is better again")
        return True

    def _maybe_save(self) -> None:
        """A checkpoint, or a snapshot in memory, where one is due after this step."""
        self._saver.poll()
        lasting = self.engine.steps % self.run.spec.checkpoint.save_steps == 0
        if (self._saver.due() or lasting) and not self._out_of_bounds():
            self._report.settle()
            self._saver.save(lasting=lasting)

    def save(self) -> None:
        """Write a checkpoint of this very moment, and wait until it is on the disk. Raises NoSpace with its size, and
        Diverged in place of keeping what is no good."""
        self._report.settle()
        self._saver.save(lasting=True)
        self._saver.finish()

    # --- one optimizer step --------------------------------------------------------------------------

    def _step(self) -> None:
        """All micro-steps of a step that are still to be done, and the update.

        The loss of every micro-batch is divided by the totals of the whole step, so that the update does not depend on
        how the step is cut.
        """
        engine, state = self.engine, self.state
        work = self.loader.batches(engine.steps)
        started = timestamp(engine.device)
        totals = self._totals(work)
        part = PartialStep({"loss": torch.zeros((), dtype=torch.float64, device=engine.device)})
        for batch_of in work.batches[engine.micro_steps :]:
            if self._asked:
                self._leave(part, started)
            self.run.events.alive()
            self._saver.poll()
            batch = batch_of()
            estimate_curvature(engine, batch)
            loss = engine.forward(batch, self.stage.loss, totals)
            if loss.totals:  # of a step that is this one batch
                state.window_totals = dict(loss.totals)
                totals = {**totals, **loss.totals}
            engine.backward(loss.total)
            for name, value in loss.sums.items():
                part.sums[name] = joined(name, part.sums[name], value) if name in part.sums else value
            part.tokens += batch.tokens if batch.label_tokens else 0  # a rank without rows computes on some others'
            part.slots += batch.slots
        if self._asked:
            self._leave(part, started)
        figures = self._figures(part)
        result = engine.step(watch=figures["loss"] + state.window_loss)
        closed = StepRecord(
            step=engine.steps,
            totals=totals,
            before=state.window_sums
            | {"loss": state.window_loss}
            | {"tokens": state.window_tokens, "slots": state.window_slots},
            seconds=state.window_seconds,
            started=started,
            ended=timestamp(engine.device),
            learning_rate=result.learning_rate,
            memory_bytes=memory_bytes(engine.device),
            skipped=result.skipped,
            scaling={}
            if engine.scaler is None
            else {"loss_scale": engine.scaler.scale, "skipped_steps": float(engine.scaler.skipped)},
        )
        state.drop_window()
        self._report.put(closed, figures | {"grad_norm": result.grad_norm})

    def _totals(self, work: StepBatches) -> Totals:
        """The totals of a step with those that its stage computes beforehand. A checkpoint in mid-step has them."""
        if not self.stage.prelude_sequences:
            return work.totals
        if self.engine.micro_steps == 0 and not work.continued:
            batches = (batch_of() for batch_of in work.prelude)
            self.state.window_totals = prelude(self.engine, self.stage, batches, work.totals, self.run.check_stop)
        return {**work.totals, **self.state.window_totals}

    def _figures(self, part: PartialStep) -> dict[str, Tensor]:
        """Sum what the ranks have done of a step, on the device; with several ranks, the memory of each too."""
        ranks, device = self.engine.ranks, self.engine.device
        if ranks.world == 1:
            self.state.window_tokens += part.tokens
            self.state.window_slots += part.slots
            return part.sums
        memory = [0.0] * ranks.world
        memory[ranks.rank] = float(memory_bytes(device))
        host = torch.tensor([part.tokens, part.slots, *memory], dtype=torch.float64).to(device)
        names = [*part.sums, "tokens", "slots", *(f"memory_bytes_rank_{rank}" for rank in range(ranks.world))]
        total = ranks.all_reduce(torch.cat([torch.stack(list(part.sums.values())), host]))
        found = dict(zip(names, total.unbind(), strict=True))
        if largest := [name for name in part.sums if name.startswith(MAXIMUM)]:
            most = ranks.all_maximum(torch.stack([part.sums[name] for name in largest]))
            found |= dict(zip(largest, most.unbind(), strict=True))
        return found

    def _leave(self, part: PartialStep, started: Timestamp) -> NoReturn:
        """Raise StopRequested, with the figures of the unfinished step in the state."""
        self._report.settle()
        state, figures = self.state, {name: float(value) for name, value in self._figures(part).items()}
        if self.engine.scaler is None:
            finite(figures["loss"], "loss", self.engine.steps + 1)
        state.window_loss += figures["loss"]
        for name in part.sums.keys() - {"loss"}:
            state.window_sums[name] = joined(name, state.window_sums.get(name, nothing(name)), figures[name])
        if self.engine.ranks.world > 1:
            state.window_tokens += int(figures["tokens"])
            state.window_slots += int(figures["slots"])
        state.window_seconds += seconds_between(started, timestamp(self.engine.device))
        raise StopRequested

    # --- evaluation ----------------------------------------------------------------------------------

    def _maybe_evaluate(self) -> None:
        step = self.engine.steps
        if not self._schedule.due(step) or self.state.evaluated(step) is not None:
            return
        self._report.settle()
        self.run.phase("evaluating")
        started = time.monotonic()
        assert self.evaluator is not None
        share: Share | None = None
        totals = self.evaluator.totals()
        with suppress(StopRequested):
            share = self.evaluator.share(totals)
        if self.engine.ranks.any_rank(share is None):
            raise StopRequested
        assert share is not None
        found = self.evaluator.together(share, totals)
        self._report.evaluation_seconds = time.monotonic() - started
        self.state.evaluations.append({"step": step, **found.figures})
        self.run.events.write("evaluation", step=step, values=found.figures)
        if found.samples:
            self.state.keep_samples(step, found.samples)
            self.run.events.write("samples", step=step, samples=found.samples)
        if found.answers:
            self.state.keep_answers(step, found.answers)
        self._keep_best()
        if 0 < step < self.total_steps:
            self.run.phase("training")

    def _keep_best(self) -> None:
        """Write the weights of the best evaluation so far. Older ones go when no checkpoint would have them as the best
        any more (`save`)."""
        engine = self.engine
        if isinstance(self.evaluation, NoEvaluation) or not self.evaluation.load_best_model_at_end:
            return
        best = self._early_stopping.best
        if best is not None and best["step"] == engine.steps < self.total_steps and engine.ranks.first:
            name = best_name(engine.steps)
            if (left := self.run.folder / CHECKPOINTS / name).exists():  # by a process that died before its checkpoint
                store.discard(left)
            needs = engine_state.weight_bytes(engine)
            disk.check_room(self.run.folder, needs)
            fill = partial(engine_state.save_weights, engine)
            self._saver.to_disk(lambda: store.write(self.run.folder / CHECKPOINTS, name, fill), needs)

    def _tell_end(self) -> None:
        if isinstance(self.evaluation, NoEvaluation) or not self.stopped_early:
            return
        verdict, metric = (
            early_stopping(self.state.evaluations, self.evaluation, self.stage),
            self.evaluation.metric_for_best_model,
        )
        assert verdict.best is not None
        best, step = verdict.best[metric], verdict.best["step"]
        message = (
            f"ended after step {self.engine.steps} of {self.total_steps}: {metric} was no better in "
            f"{verdict.waited} evaluations in a row; the best is {best:.4g} after step {step:.0f}"
        )
        self.run.notice("early_stopping", message)


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; on a CPU the resident set of this process now, bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
