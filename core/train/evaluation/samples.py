"""What a model answers to prompts from held-out rows and from the spec: samples for people to read. Answers that are
scored (scored.py) are made in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from core.spec.axes.runtime import Generated, Greedy, NoSamples, Sampling
from core.train.data.dataset import TokenDataset, spans
from core.train.engine import Engine
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer

BEGINNING = 16
"""Tokens of a row without a prompt that are given to the model; at most half of it."""
SHOWN_CHARS = 4000
"""Characters of a prompt or a reference in the job's samples."""

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
    continued: bool = False
    """The row has no prompt: its beginning stands for one."""


@dataclass(frozen=True, slots=True)
class Answering:
    """How a run answers prompts."""

    engine: Engine
    tokenizer: Any
    batch_size: int
    """Answers in the making at once at most."""
    most_tokens: int
    """Tokens of them at most, prompts counted; a longer answer is made by itself."""
    between: Callable[[], None]
    """Called before each pass; may raise to stop."""

    def without_slots(self, prompts: Sequence[Prompt], max_new_tokens: int) -> str | None:
        """Why the answers are not generated in slots (Engine.without_slots); None: they are."""
        return self.engine.without_slots(max(len(one.ids) for one in prompts) + max_new_tokens)

    def answer(
        self, prompts: Sequence[Prompt], stops: Sequence[int], max_new_tokens: int, **drawn: Any
    ) -> dict[int, list[int]]:
        """Generate this rank's answers, by the number of their prompt. `drawn`: as in Engine.generate."""
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at].ids))  # like lengths: less padding
        found: dict[int, list[int]] = {}
        ranks = self.engine.ranks
        lengths = [len(prompts[at].ids) + max_new_tokens for at in order]
        for start, end in spans(lengths, self.batch_size, self.most_tokens)[ranks.rank :: ranks.world]:
            places = order[start:end]
            answers = self.engine.generate(
                [prompts[at].ids for at in places],
                numbers=places,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stops,
                between=self.between,
                **drawn,
            )
            found |= dict(zip(places, answers, strict=True))
        return found

    def stops(self, prompts: Iterable[Prompt]) -> list[int]:
        """Find the ids that end an answer (`stop_tokens`)."""
        return stop_tokens(self.engine.model, self.tokenizer, prompts)

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Sampler:
    """Answers the prompts of a run's samples, any number of times."""

    def __init__(
        self,
        answering: Answering,
        dataset: TokenDataset,
        wanted: NoSamples | Greedy | Sampling,
        options: RenderOptions,
    ) -> None:
        """`options` are those of the training rows."""
        self.answering, self.wanted = answering, wanted
        self.prompts: list[Prompt] = []
        if not isinstance(wanted, NoSamples):
            self.prompts = choose_prompts(dataset, wanted, answering.tokenizer, options)
        self._stops = answering.stops(self.prompts)

    def without_slots(self) -> str | None:
        """Why the answers are not generated in slots; None: they are, or none are wanted."""
        if isinstance(self.wanted, NoSamples) or not self.prompts:
            return None
        return self.answering.without_slots(self.prompts, self.wanted.max_new_tokens)

    def answers(self) -> dict[int, Sample]:
        """Generate this rank's samples, by the number of their prompt."""
        wanted = self.wanted
        if isinstance(wanted, NoSamples):
            return {}
        drawn: dict[str, Any] = {}
        if isinstance(wanted, Sampling):
            drawn = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
        found = self.answering.answer(self.prompts, self._stops, wanted.max_new_tokens, **drawn)
        return {at: self._sample(self.prompts[at], answer, wanted.max_new_tokens) for at, answer in found.items()}

    def _sample(self, prompt: Prompt, answer: list[int], most: int) -> Sample:
        text = self.answering.text
        reference = [token for token in prompt.reference if token not in self._stops]
        return {
            "row": prompt.row,
            "prompt": shown(text(prompt.ids), end=True),
            "reference": shown(text(reference)) if reference else None,
            "completion": text(answer),
            "new_tokens": len(answer),
            "finished": len(answer) < most,
        }


def choose_prompts(dataset: TokenDataset, wanted: Generated, tokenizer: Any, options: RenderOptions) -> list[Prompt]:
    """Choose rows spread evenly over the file, then the prompts of the spec. The prompt of a row is what comes before
    its last completion, token for token what the model sees in training; those of the spec are rendered as rows are."""
    found = [prompt_of(dataset, row) for row in spread(wanted.rows, len(dataset))]
    if wanted.prompts:
        renderer = Renderer(tokenizer, options)
        found += [_of_text(text, renderer) for text in wanted.prompts]
    return found


def spread(count: int | None, rows: int) -> list[int]:
    """So many rows, evenly over the file; None: all of them."""
    count = rows if count is None else min(count, rows)
    return [index * rows // count for index in range(count)]


def prompt_of(dataset: TokenDataset, row: int) -> Prompt:
    """The prompt of a row: what comes before its last completion, or its beginning where it has no prompt."""
    ids, learned = (tensor.tolist() for tensor in dataset[row])
    end = len(learned) - learned[::-1].index(True)  # rows with nothing learned are not in a data set
    start = end
    while start > 0 and learned[start - 1]:
        start -= 1
    if continued := start <= 1 and all(learned[1:end]):  # everything is learned: there is no prompt
        start = min(BEGINNING, max(1, end // 2))
    return Prompt(ids[:start], row, ids[start:end], continued)


def _of_text(text: str, renderer: Renderer) -> Prompt:
    return Prompt(renderer.render_asked(text, 0).ids, None, [])


def stop_tokens(model: Any, tokenizer: Any, prompts: Iterable[Prompt]) -> list[int]:
    """Find the ids that end an answer: EOS, what the model's own configuration ends on, and the special token that
    completions of these rows end with (a chat template's end of turn)."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    special = set(tokenizer.all_special_ids)
    found |= {prompt.reference[-1] for prompt in prompts if prompt.reference and prompt.reference[-1] in special}
    return sorted(token for token in found if token is not None)


def shown(text: str, *, end: bool = False) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    return "…" + text[-SHOWN_CHARS:] if end else text[:SHOWN_CHARS] + "…"
