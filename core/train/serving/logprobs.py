"""Log-probabilities as replies tell them: of a token that was drawn, and of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from core.train.generation.generator import LastLogits

PLACES = 512
"""Positions whose logits are held at a time."""


def likeliest(logprobs: Tensor, token: int, top: int) -> dict[str, Any]:
    """A token, its log-probability, and the `top` likeliest at its place with theirs. `logprobs`: float32
    [vocabulary]."""
    best = logprobs.topk(top)
    return {
        "token": token,
        "logprob": float(logprobs[token]),
        "top": list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    }


def prompt_logprobs(
    logits: LastLogits, prompt: Sequence[int], top: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Each token of a prompt as `likeliest` tells it, after those before it: what `echo` with `logprobs` asks for, and
    evaluation harnesses score answers by. The first token has neither, since nothing is before it. The model computes
    without gradients, with the adapter that was asked for."""
    yield {"token": prompt[0], "logprob": None, "top": None}
    ids = torch.tensor([list(prompt)], device=device)
    positions = torch.arange(len(prompt), device=device).unsqueeze(0)
    for start in range(0, len(prompt) - 1, PLACES):
        places = torch.arange(start, min(start + PLACES, len(prompt) - 1), device=device)
        found = torch.log_softmax(logits.at(places, ids, positions), dim=-1)
        for row, place in enumerate(places.tolist()):
            yield likeliest(found[row], prompt[place + 1], top)
