"""What a model answers to prompts from held-out rows and from the spec: samples for people to read."""

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


class Sampler:
    """Answers the prompts of a run, any number of times."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        dataset: TokenDataset,
        wanted: NoSamples | Greedy | Sampling,
        options: RenderOptions,
        *,
        batch_size: int,
        most_tokens: int,
        between: Callable[[], None],
    ) -> None:
        """`options` are those of the training rows. `most_tokens` bounds the tokens of one pass, padding counted."""
        self.engine, self.tokenizer, self.wanted = engine, tokenizer, wanted
        self.batch_size, self.most_tokens, self.between = batch_size, most_tokens, between
        self.prompts: list[Prompt] = []
        if not isinstance(wanted, NoSamples):
            self.prompts = choose_prompts(dataset, wanted, tokenizer, options)
        self._stops = stop_tokens(engine.model, tokenizer, self.prompts)

    def without_slots(self) -> str | None:
        """Why the answers are not generated in slots (Engine.without_slots); None: they are, or none are wanted."""
        if isinstance(self.wanted, NoSamples) or not self.prompts:
            return None
        return self.engine.without_slots(max(len(one.ids) for one in self.prompts) + self.wanted.max_new_tokens)

    def answers(self) -> dict[int, Sample]:
        """Generate this rank's samples, by the number of their prompt."""
        wanted = self.wanted
        if isinstance(wanted, NoSamples):
            return {}
        drawn: dict[str, Any] = {}
        if isinstance(wanted, Sampling):
            drawn = {"temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
        order = sorted(range(len(self.prompts)), key=lambda at: len(self.prompts[at].ids))  # like lengths: less padding
        found: dict[int, Sample] = {}
        size, ranks = self.batch_size, self.engine.ranks
        lengths = [len(self.prompts[at].ids) + wanted.max_new_tokens for at in order]
        for start, end in spans(lengths, size, self.most_tokens)[ranks.rank :: ranks.world]:
            places = order[start:end]
            answers = self.engine.generate(
                [self.prompts[at].ids for at in places],
                numbers=places,
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


def choose_prompts(dataset: TokenDataset, wanted: Generated, tokenizer: Any, options: RenderOptions) -> list[Prompt]:
    """Choose rows spread evenly over the file, then the prompts of the spec. The prompt of a row is what comes before
    its last completion, token for token what the model sees in training; those of the spec are rendered as rows are."""
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
    """Find the ids that end an answer: EOS, what the model's own configuration ends on, and the special token that
    completions of these rows end with (a chat template's end of turn)."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    special = set(tokenizer.all_special_ids)
    found |= {prompt.reference[-1] for prompt in prompts if prompt.reference and prompt.reference[-1] in special}
    return sorted(token for token in found if token is not None)


def _shown(text: str, *, end: bool = False) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    return "…" + text[-SHOWN_CHARS:] if end else text[:SHOWN_CHARS] + "…"
