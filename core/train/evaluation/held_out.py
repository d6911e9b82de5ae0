"""What is measured on held-out rows: the figures of the stage, and answers to read. Training does not notice it:
weights, gradients and random numbers are afterwards what they were before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from core.errors import SpecError
from core.plan.memory.passes import training_pass
from core.spec.axes.runtime import HeldOut
from core.train.base.stop import StopRequested
from core.train.batch import Batch
from core.train.data.dataset import TokenDataset, eval_batches
from core.train.engine import Diverged, Engine
from core.train.evaluation.samples import Answering, Sample, Sampler
from core.train.evaluation.scored import AnswerScorer, ScoredAnswer, means
from core.train.feed import RunData
from core.train.policy import PolicyModel
from core.train.run import Run
from core.train.stage import Stage, Totals, joined, nothing


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank found."""

    sums: Mapping[str, float]
    """Sums of the stage over the rank's rows."""
    samples: Mapping[int, Sample]
    """Samples by the number of their prompt."""
    answers: Mapping[int, ScoredAnswer]
    """Scored answers by the number of their prompt."""


@dataclass(frozen=True, slots=True)
class Found:
    """What all ranks found together."""

    figures: dict[str, float]
    samples: list[Sample]
    """The model's answers in the order of the prompts, none when none are wanted."""
    answers: list[ScoredAnswer]
    """Scored answers in the order of the rows, none when none are wanted."""


class HeldOutMeasure(Protocol):
    """What measures held-out rows, as the loop calls it."""

    def totals(self) -> Totals:
        """The totals of all held-out examples, as if they were one step. Collective."""
        ...

    def share(self, totals: Totals) -> Share:
        """Work on this rank's rows; may raise StopRequested."""
        ...

    def together(self, share: Share, totals: Totals) -> Found:
        """Put the shares of all ranks together. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Held-out figures and samples of a run, any number of times."""

    engine: Engine
    stage: Stage
    dataset: TokenDataset
    sampler: Sampler
    scorer: AnswerScorer
    batch_size: int
    """Rows of one pass at most."""
    most_tokens: int
    """Tokens of one pass at most, padding counted; a longer row is a pass by itself."""
    between: Callable[[], None]
    """Called before each batch; may raise to stop."""

    def totals(self) -> Totals:
        """The totals of all held-out examples, as if they were one step. Collective; StopRequested on all ranks when
        one of them was asked to stop."""
        totals: Counter[str] = Counter()
        for row in range(len(self.dataset)):
            totals.update(self.stage.shares(*self.dataset.counts(row)))
        if not (only := self.stage.prelude_sequences):
            return totals
        return {**totals, **prelude(self.engine, self.stage, self._batches(only), totals, self.between)}

    def share(self, totals: Totals) -> Share:
        """Work on this rank's batches and prompts; a run of one rank has them all."""
        found = measure(self.engine, self.stage, self._batches(), totals, between=self.between)
        return Share(found, self.sampler.answers(), self.scorer.answers())

    def _batches(self, only: tuple[int, ...] | None = None) -> Iterator[Batch]:
        ranks = self.engine.ranks
        return eval_batches(
            self.dataset,
            self.batch_size,
            self.engine.pad_token_id,
            most_tokens=self.most_tokens,
            rank=ranks.rank,
            world=ranks.world,
            only=only,
        )

    def together(self, share: Share, totals: Totals) -> Found:
        """Put the shares of all ranks together. Collective."""
        shares = self.engine.ranks.all_gather(
            (dict(share.sums), list(share.samples.items()), list(share.answers.items()))
        )
        sums: dict[str, float] = {}
        for part, _, _ in shares:
            sums = _plus(sums, part)
        samples = {at: sample for _, found, _ in shares for at, sample in found}
        answers = {at: answer for _, _, found in shares for at, answer in found}
        values, scored = figures(self.engine, self.stage, sums, totals), [answers[at] for at in sorted(answers)]
        if scored:
            values |= means(scored)
        return Found(values, [samples[at] for at in sorted(samples)], scored)


def build_evaluator(run: Run, engine: Engine, stage: Stage, tokenizer: Any, data: RunData) -> Evaluator | None:
    """Build the evaluator that the job asks for, if it asks for one. SpecError when it has nothing to work on."""
    spec = run.spec.evaluation
    if not isinstance(spec, HeldOut):
        return None
    if data.eval is None:
        raise SpecError("evaluation `held_out` needs `data.eval`", field="data.eval")
    measured = spec.measured(stage.held_out_metrics)
    if (metric := spec.metric_for_best_model) not in measured:
        raise SpecError(
            f"this job does not measure {metric}, only {', '.join(measured)} (exact match needs a loss on "
            "completions); choose another metric",
            field="evaluation.metric_for_best_model",
        )
    size, (tokens, _) = spec.per_device_eval_batch_size, training_pass(run.spec, data.longest)
    answering = Answering(engine, tokenizer, size, tokens, run.check_stop)
    sampler = Sampler(answering, data.eval, spec.samples, data.options)
    scorer = AnswerScorer(answering, data.eval, spec.generation)
    if (why := sampler.without_slots() or scorer.without_slots()) is not None:
        run.notice("generation_in_batches", describe_batches(why))
    return Evaluator(engine, stage, data.eval, sampler, scorer, size, tokens, run.check_stop)


def describe_batches(why: str) -> str:
    """Compose the notice of a run whose answers are not generated in slots."""
    return (
        f"answers are generated in batches that wait for their longest answer, since {why}; the answers are the same, "
        "and take longer"
    )


def evaluate(
    engine: Engine, stage: Stage, batches: Iterable[Batch], totals: Totals = MappingProxyType({})
) -> dict[str, float]:
    """Compute the stage's figures over held-out batches."""
    return figures(engine, stage, measure(engine, stage, batches, totals), totals)


def prelude(
    engine: Engine, stage: Stage, batches: Iterable[Batch], totals: Totals, between: Callable[[], None]
) -> dict[str, float]:
    """Compute what joins the totals of a step (or of an evaluation) beforehand; `batches` are this rank's. Collective.
    StopRequested, which `between` may raise, is raised on all ranks together."""
    sums: dict[str, float] | None = {}
    try:
        for batch in batches:
            between()
            found = engine.evaluate(batch, stage.prelude)
            sums = _plus(sums or {}, {name: float(value) for name, value in found.items()})
    except StopRequested:
        sums = None
    whole: dict[str, float] = {}
    for part in engine.ranks.all_gather(sums):
        if part is None:
            raise StopRequested
        whole = _plus(whole, part)
    return dict(stage.totals(whole, totals))


def measure(
    engine: Engine,
    stage: Stage,
    batches: Iterable[Batch],
    totals: Totals = MappingProxyType({}),
    *,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Compute the stage's sums over held-out batches; the training state is left alone. `between` runs before each
    batch and may raise to stop."""
    sums: dict[str, float] = {}
    for batch in batches:
        between()
        sums = _plus(sums, engine.evaluate(batch, partial(_evaluated, stage, totals)))
    return sums


def _evaluated(stage: Stage, totals: Totals, policy: PolicyModel, batch: Batch) -> Mapping[str, float]:
    return stage.evaluate(policy, batch, totals)


def figures(engine: Engine, stage: Stage, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
    """Compute the stage's figures from its sums. Diverged when the loss is no finite number."""
    found = stage.held_out_figures(sums, totals)
    if not math.isfinite(loss := found["eval_loss"]):
        raise Diverged(f"the held-out loss is {loss} after step {engine.steps}", field="optimizer.learning_rate")
    return found


def _plus(sums: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {
        name: joined(name, sums.get(name, nothing(name)), more.get(name, nothing(name))) for name in {**sums, **more}
    }
