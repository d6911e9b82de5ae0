"""Log-probabilities of the tokens of a prompt, which `echo` with `logprobs` asks for: harnesses score answers so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from core.train.generation.generator import LastLogits

PLACES = 512
"""Positions whose logits are held at a time."""


def prompt_logprobs(
    logits: LastLogits, prompt: Sequence[int], top: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """For each token of the prompt its number, its log-probability after those before it, and the `top` likeliest at
    its place with theirs. None for the first token, before which there is nothing. The model computes without
    gradients, with the adapter that was asked for."""
    yield {"token": prompt[0], "logprob": None, "top": None}
    ids = torch.tensor([list(prompt)], device=device)
    positions = torch.arange(len(prompt), device=device).unsqueeze(0)
    for start in range(0, len(prompt) - 1, PLACES):
        places = torch.arange(start, min(start + PLACES, len(prompt) - 1), device=device)
        found = torch.log_softmax(logits.at(places, ids, positions), dim=-1)
        best = found.topk(top, dim=-1)
        for row, place in enumerate(places.tolist()):
            token = prompt[place + 1]
            likeliest = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            yield {"token": token, "logprob": float(found[row, token]), "top": list(likeliest)}
