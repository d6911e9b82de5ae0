"""What is measured on held-out rows: loss, perplexity, exact match, and answers to read. Training does not notice it:
weights, gradients and random numbers are afterwards what they were before."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, assert_never

import torch

from core.errors import SpecError
from core.plan.memory import training_pass
from core.spec.axes.runtime import Generated, Greedy, HeldOut, NoSamples, Sampling
from core.train.batch import Batch
from core.train.data.dataset import TokenDataset, eval_batches, spans
from core.train.engine import Diverged, Engine
from core.train.feed import RunData
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.run import Run

BEGINNING = 16
"""Tokens of a row without a prompt that are given to the model; at most half of it."""
SHOWN_CHARS = 4000
"""Of a prompt or a reference, in the job's samples."""

Sample = dict[str, Any]
"""{"row": number of the held-out row or null, "prompt", "reference": str | null, "completion", "new_tokens",
"finished": the model ended by itself}."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    row: int | None
    """Index of the held-out row; None for a prompt of the spec."""
    reference: list[int]
    """What the row says; empty when there is nothing to compare with."""


def build_evaluator(run: Run, engine: Engine, tokenizer: Any, data: RunData) -> Evaluator | None:
    """The evaluator that the job asks for, or None. SpecError when it has nothing to work on."""
    spec = run.spec.evaluation
    if not isinstance(spec, HeldOut):
        return None
    tokens, _ = training_pass(run.spec, data.longest)
    return Evaluator(
        engine, tokenizer, data.eval, spec, options=data.options, most_tokens=tokens, between=run.check_stop
    )


class Evaluator:
    """Held-out figures and samples of a run, any number of times."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        dataset: TokenDataset | None,
        spec: HeldOut,
        *,
        options: RenderOptions,
        most_tokens: int,
        between: Callable[[], None],
    ) -> None:
        """`options` are those of the training rows. `most_tokens`: of one pass, padding counted; that of training has
        as many. `between` runs before each batch and each new token, and may raise to stop. SpecError when the
        evaluation has nothing to work on."""
        completions = options.loss_on != "all"
        if dataset is None:
            raise SpecError("evaluation `held_out` needs `data.eval`", field="data.eval")
        if spec.metric_for_best_model == "eval_exact_match" and not completions:
            raise SpecError(
                "exact match is measured only where the loss is on completions; choose another metric",
                field="evaluation.metric_for_best_model",
            )
        self.engine, self.tokenizer, self.dataset, self.spec = engine, tokenizer, dataset, spec
        self.completions, self.most_tokens, self.between = completions, most_tokens, between
        match spec.samples:
            case NoSamples():
                self.prompts: list[Prompt] = []
            case Greedy() | Sampling() as wanted:
                self.prompts = choose_prompts(dataset, wanted, tokenizer, options)
            case _ as never:
                assert_never(never)
        self._stops = stop_tokens(engine.model, tokenizer, self.prompts)

    def share(self) -> Share:
        """This rank's batches and prompts now; a run of one has them all."""
        ranks, size = self.engine.ranks, self.spec.per_device_eval_batch_size
        batches = eval_batches(
            self.dataset,
            size,
            self.engine.pad_token_id,
            most_tokens=self.most_tokens,
            rank=ranks.rank,
            world=ranks.world,
        )
        return Share(measure(self.engine, batches, between=self.between), self._answers())

    def together(self, share: Share) -> tuple[dict[str, float], list[Sample]]:
        """Of all ranks: the figures (see `evaluate`), and the model's answers in the order of the prompts, none when
        none are wanted. Collective."""
        shares: list[dict[str, Any]] = self.engine.ranks.gather(
            {"sums": asdict(share.sums), "samples": list(share.samples.items())}
        )
        sums = functools.reduce(Sums.plus, (Sums(**one["sums"]) for one in shares))
        found = {at: sample for one in shares for at, sample in one["samples"]}
        return figures(self.engine, sums, exact_match=self.completions), [found[at] for at in sorted(found)]

    def _answers(self) -> dict[int, Sample]:
        """This rank's samples by the number of their prompt."""
        wanted = self.spec.samples
        if isinstance(wanted, NoSamples):
            return {}
        drawn: dict[str, Any] = {}
        if isinstance(wanted, Sampling):
            drawn = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
        order = sorted(range(len(self.prompts)), key=lambda at: len(self.prompts[at].ids))  # like lengths: less padding
        found: dict[int, Sample] = {}
        size, ranks = self.spec.per_device_eval_batch_size, self.engine.ranks
        lengths = [len(self.prompts[at].ids) + wanted.max_new_tokens for at in order]
        for start, end in spans(lengths, size, self.most_tokens)[ranks.rank :: ranks.world]:
            places = order[start:end]
            answers = self.engine.generate(
                [self.prompts[at].ids for at in places],
                max_new_tokens=wanted.max_new_tokens,
                stop_token_ids=self._stops,
                between=self.between,
                **drawn,
            )
            for at, answer in zip(places, answers, strict=True):
                found[at] = self._sample(self.prompts[at], answer, wanted.max_new_tokens)
        return found

    def _sample(self, prompt: Prompt, answer: list[int], most: int) -> Sample:
        def text(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

        reference = [token for token in prompt.reference if token not in self._stops]
        return {
            "row": prompt.row,
            "prompt": _shown(text(prompt.ids), end=True),
            "reference": _shown(text(reference)) if reference else None,
            "completion": text(answer),
            "new_tokens": len(answer),
            "finished": len(answer) < most,
        }


def evaluate(
    engine: Engine, batches: Iterable[Batch], *, exact_match: bool, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Held-out figures; the training state is left alone. `between` runs before each batch and may raise to stop.

    eval_loss: mean over all labelled tokens. eval_perplexity: its exponential. eval_exact_match: share of rows whose
    every labelled token is the most likely one given the row so far. For a row with one completion that is exactly
    the share that greedy decoding would write token for token, its end token included.
    """
    return figures(engine, measure(engine, batches, between=between), exact_match=exact_match)


@dataclass(frozen=True, slots=True)
class Sums:
    """Over held-out rows: of the losses of their labelled tokens, and counts."""

    loss: float = 0.0
    tokens: int = 0
    matched: int = 0
    rows: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(
            self.loss + other.loss,
            self.tokens + other.tokens,
            self.matched + other.matched,
            self.rows + other.rows,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank found."""

    sums: Sums
    samples: dict[int, Sample]


def measure(engine: Engine, batches: Iterable[Batch], *, between: Callable[[], None] = lambda: None) -> Sums:
    """See `evaluate`."""
    total, tokens, matched, rows = 0.0, 0, 0, 0
    for batch in batches:
        between()
        found = engine.figures(batch)
        total += float(found.losses.double().sum())
        matched += sum(bool(part.all()) for part in torch.split(found.right, batch.label_counts()))
        tokens += batch.label_tokens
        rows += len(batch.lengths)
    return Sums(total, tokens, matched, rows)


def figures(engine: Engine, sums: Sums, *, exact_match: bool) -> dict[str, float]:
    """See `evaluate`. Raises Diverged when they are no numbers."""
    loss = sums.loss / sums.tokens
    if not math.isfinite(loss):
        raise Diverged(f"the held-out loss is {loss} after step {engine.steps}", field="optimizer.learning_rate")
    values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
    if exact_match:
        values["eval_exact_match"] = sums.matched / sums.rows
    return values


# --- prompts ---------------------------------------------------------------------------------------------


def choose_prompts(dataset: TokenDataset, wanted: Generated, tokenizer: Any, options: RenderOptions) -> list[Prompt]:
    """Of rows spread evenly over the file, then those of the spec. The prompt of a row is what comes before its last
    completion, token for token what the model sees in training; those of the spec are rendered as the rows are."""
    count = min(wanted.rows, len(dataset))
    rows = [index * len(dataset) // count for index in range(count)]
    found = [_of_row(dataset, row) for row in rows]
    if wanted.prompts:
        renderer = Renderer(tokenizer, options)
        found += [_of_text(text, renderer) for text in wanted.prompts]
    return found


def _of_row(dataset: TokenDataset, row: int) -> Prompt:
    ids, learned = (tensor.tolist() for tensor in dataset[row])
    end = len(learned) - learned[::-1].index(True)  # rows with nothing learned are not in a data set
    start = end
    while start > 0 and learned[start - 1]:
        start -= 1
    if start <= 1 and all(learned[1:end]):  # everything is learned: there is no prompt
        start = min(BEGINNING, max(1, end // 2))
    return Prompt(ids[:start], row, ids[start:end])


def _of_text(text: str, renderer: Renderer) -> Prompt:
    return Prompt(renderer.render_asked(text, 0).ids, None, [])


def stop_tokens(model: Any, tokenizer: Any, prompts: Iterable[Prompt]) -> list[int]:
    """Ids that end an answer: EOS, what the model's own configuration ends on, and the special token that completions
    of these rows end with (a chat template's end of turn)."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    special = set(tokenizer.all_special_ids)
    found |= {prompt.reference[-1] for prompt in prompts if prompt.reference and prompt.reference[-1] in special}
    return sorted(token for token in found if token is not None)


def _shown(text: str, *, end: bool = False) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    return "…" + text[-SHOWN_CHARS:] if end else text[:SHOWN_CHARS] + "…"
