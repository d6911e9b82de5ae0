"""Logits where they are needed, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.train.attention.exact import Exact
from core.train.attention.packed import rows_apart
from core.train.batch import Batch
from core.train.loss.head import OutputHead, hidden_states
from core.train.loss.linear_cross_entropy import TokenFigures, token_figures, token_logprobs
from core.train.model.heads import backbone_of, has_head, head_of_model


def label_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [label tokens, vocabulary] that predict the labels, and the labels [label tokens], row after row.

    The head runs on the positions before a label only: with masked prompts that is a small share of all, and the
    head is the widest product of a small model.
    """
    positions, targets = _labelled(batch)
    with head_at(model, batch.in_line(positions)):
        return all_logits(model, batch)[0], targets


def label_hidden(head: OutputHead, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the head would make these logits from, [label tokens, hidden], and the labels [label tokens]."""
    positions, targets = _labelled(batch)
    with rows_apart(batch):
        states = hidden_states(head, **batch.inputs())
    return states.flatten(0, 1).index_select(0, batch.in_line(positions)), targets


def label_figures(model: nn.Module, head: OutputHead | str, batch: Batch) -> TokenFigures:
    """Loss and rightness of each label, row after row, chunk by chunk; from whole logits where the head is none that
    the chunked loss knows. No gradients."""
    if isinstance(head, OutputHead):
        hidden, targets = label_hidden(head, batch)
        return token_figures(hidden, head.weight, targets, bias=head.bias, options=head.options)
    logits, targets = label_logits(model, batch)
    right = logits.argmax(dim=-1) == targets
    return TokenFigures(functional.cross_entropy(logits.float(), targets, reduction="none"), right)


def label_logprobs(
    model: nn.Module, head: OutputHead | str, batch: Batch, temperature: float = 1.0, exact: Exact | None = None
) -> Tensor:
    """Log-probability of each label at a temperature, float32 [label tokens], row after row: of logits that were never
    rounded to 16 bits, unless the head is none that the chunked loss knows, or caps the logits that are divided.
    `exact`: the arithmetic that the model is in."""
    return label_logprobs_and_hidden(model, head, batch, temperature, exact)[0]


def label_logprobs_and_hidden(
    model: nn.Module, head: OutputHead | str, batch: Batch, temperature: float = 1.0, exact: Exact | None = None
) -> tuple[Tensor, Tensor]:
    """`label_logprobs`, and the hidden states [label tokens, hidden] that the output head is applied to."""
    if isinstance(head, OutputHead) and divides(head, temperature):
        hidden, targets = label_hidden(head, batch)
        if exact is not None:
            return exact.logprobs(hidden, head, targets, temperature), hidden
        options = replace(head.options, scale=head.options.scale / temperature)
        return token_logprobs(hidden, head.weight, targets, bias=head.bias, options=options), hidden
    positions, targets = _labelled(batch)
    with head_at(model, batch.in_line(positions)) as fed:
        logits = all_logits(model, batch)[0] / temperature
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return logprobs, fed[0]


def divides(head: OutputHead, temperature: float) -> bool:
    """Whether logits are divided by a temperature as a part of the head's scale."""
    return temperature == 1.0 or (head.options.softcap is None and head.bias is None)


def scores_at(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """Output of a reward model's head at these positions of the flattened batch, float32 [positions, numbers of the
    head]. The product is in float32 under autocast, too."""
    with rows_apart(batch):
        states = backbone_of(model)(**batch.inputs(), use_cache=False).last_hidden_state
    chosen, head = states.flatten(0, 1).index_select(0, batch.in_line(positions)), head_of_model(model)
    with torch.autocast(chosen.device.type, enabled=False):
        found: Tensor = head(chosen.to(head.weight.dtype)).float()
    return found


def all_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits [rows, tokens, vocabulary] (packed: [1, tokens, vocabulary]) of the whole batch; the hidden states for
    a model with another head."""
    with rows_apart(batch):
        if has_head(model):
            states: Tensor = backbone_of(model)(**batch.inputs(), use_cache=False).last_hidden_state
            return states
        logits: Tensor = model(**batch.inputs(), use_cache=False).logits
    return logits


def _labelled(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions before a label, in the flattened batch, and the labels; row after row."""
    positions = batch.label_positions()
    return positions, batch.labels.flatten().index_select(0, positions + 1)


@contextmanager
def head_at(model: nn.Module, positions: Tensor) -> Iterator[list[Tensor]]:
    """Within, the output head sees only these positions of the flattened batch, as one row. Whatever the model does
    to its logits afterwards (a scale, a soft cap) is elementwise and so stays exact. The list has what the head saw in
    each pass, [positions, hidden]."""
    fed: list[Tensor] = []

    def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fed.append(args[0].flatten(0, 1).index_select(0, positions))
        return (fed[-1].unsqueeze(0), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)  # type: ignore[operator]
    try:
        yield fed
    finally:
        handle.remove()
