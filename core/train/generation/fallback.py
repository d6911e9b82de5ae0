"""Answers by transformers' own generate, for models whose attention has no form for slots: state-space and hybrid
models, windows shorter than the answer. The draws are those of the slots; batches are padded on the left, and each goes
on until its last answer has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from core.train.generation.sampling import Completion, Key, Likeliest, SamplingParams, Stops, choose, likeliest_of


class _Chooser(LogitsProcessor):
    """Chooses a token for each row and leaves it as the only one."""

    def __init__(self, keys: Sequence[Key], params: SamplingParams) -> None:
        self.keys, self.params = keys, params
        self.logprobs: list[list[float]] = []
        self.likeliest: list[list[Likeliest]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = [len(self.logprobs)] * len(self.keys)
        tokens, logprobs = choose(scores, self.keys, positions, self.params)
        self.logprobs.append(logprobs.tolist())
        if self.params.likeliest:
            self.likeliest.append(likeliest_of(scores, self.params))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens.unsqueeze(1), 0.0)


def complete(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[Key]],
    params: SamplingParams,
    stops: Stops,
    *,
    slots: int,
    pad_token_id: int,
    device: torch.device,
    between: Callable[[], None],
) -> list[list[Completion]]:
    """As SlotGenerator.complete, `slots` answers at a time. The model's own generation_config is ignored."""
    flat = [(at, key) for at, mine in enumerate(keys) for key in mine]
    found: list[list[Completion]] = [[] for _ in prompts]
    for start in range(0, len(flat), slots):
        some = flat[start : start + slots]
        asked = [prompts[at] for at, _ in some]
        answers = _batch(model, asked, [key for _, key in some], params, stops, pad_token_id, device, between)
        for (at, _), answer in zip(some, answers, strict=True):
            found[at].append(answer)
    return found


def _batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Key],
    params: SamplingParams,
    stops: Stops,
    pad_token_id: int,
    device: torch.device,
    between: Callable[[], None],
) -> list[Completion]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # left-padded: every row continues at the same position
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    wanted = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=params.max_new_tokens, pad_token_id=pad_token_id, use_cache=True
    )
    chooser = _Chooser(keys, params)
    ended: list[int | None] = [None] * len(prompts)

    def look(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        between()
        for row, tokens in enumerate(input_ids[:, width:].tolist()):
            if ended[row] is None and stops.ended(tokens):
                ended[row] = len(tokens)
        return torch.tensor([end is not None for end in ended], device=input_ids.device)

    with _without_generation_config(model):
        output = model.generate(  # type: ignore[operator]
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=wanted,
            logits_processor=[chooser],
            stopping_criteria=[look],
        )
    answers = []
    for row, tokens in enumerate(output[:, width:].tolist()):
        end = ended[row]
        count = len(tokens) if end is None else end
        logprobs = [step[row] for step in chooser.logprobs[:count]]
        likeliest = [step[row] for step in chooser.likeliest[:count]]
        answers.append(Completion(tokens[:count], logprobs, end is not None, likeliest))
    return answers


@contextmanager
def _without_generation_config(model: nn.Module) -> Iterator[None]:
    """The model as if it had come without a generation_config: transformers fills from it whatever a call leaves open,
    and PEFT copies its own into the model it wraps."""
    kept = {module: module.generation_config for module in model.modules() if "generation_config" in vars(module)}
    for module in kept:
        module.generation_config = GenerationConfig()  # type: ignore[assignment,no-untyped-call]
    try:
        yield
    finally:
        for module, config in kept.items():
            module.generation_config = config
