"""The load-balancing loss of mixture-of-experts models (Fedus et al. 2021, equations 4 to 6), a sequence at a time.

For a sequence of n tokens, over all L layers with routers together, as transformers adds them up:

    balance = E Σ_e f_e p_e,   f_e: choices of expert e / (n L),   p_e: sum of its router probabilities / (n L)

transformers takes all tokens of a batch for one sequence, so that its value depends on how a step is cut into batches,
and on whether rows are packed. Of a batch of one sequence the two are equal. (DeepSeek-V3 balances each sequence, too.)

f has no gradient. The gradient with respect to the router logits of a layer therefore follows from the choices of all
layers, which are known when the backward begins. It is added to the gradient of those logits there. So a layer may be
computed a second time in the backward (activation checkpoints, streamed blocks), and needs nothing of other layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from core.train.batch import Batch

ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Arguments of transformers' function of this loss. Models that have a function of another form balance otherwise."""


class _Pass:
    """What the routers chose in one forward."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        """Rows are the sequences of the batch; `places` has where each token of theirs is in the flattened input."""
        lengths = torch.tensor(batch.lengths)
        self.rows = len(batch.lengths)
        row_of = torch.repeat_interleave(torch.arange(self.rows), lengths)
        if batch.packed:
            places = torch.arange(batch.tokens)
        else:
            starts = torch.tensor([0, *accumulate(batch.lengths)][:-1])
            places = torch.arange(batch.tokens) - starts[row_of] + row_of * batch.input_ids.shape[1]
        self.lengths, self.row_of = lengths.to(device), row_of.to(device)
        self.places = batch.in_line(places.to(device))
        self.open = True
        """Whether the forward is going on: choices are counted."""
        self.layers = 0
        self.choices: Tensor | None = None
        """float32 [rows, experts], over all layers."""
        self.probabilities: Tensor | None = None
        self.upstream: Tensor | None = None
        """Gradient of the weighted sum over the rows, once the backward has begun."""
        self._by_token: Tensor | None = None

    def count(self, logits: Tensor, top_k: int) -> None:
        """Take the router logits [tokens, experts] of a layer into account."""
        found = torch.softmax(logits.float(), dim=-1)
        chosen = torch.zeros_like(found).scatter_(1, found.topk(top_k, dim=-1).indices, 1.0)
        if self.choices is None or self.probabilities is None:
            self.choices = found.new_zeros(self.rows, found.shape[1])
            self.probabilities = torch.zeros_like(self.choices)
        self.choices.index_add_(0, self.row_of, chosen.index_select(0, self.places))
        self.probabilities.index_add_(0, self.row_of, found.index_select(0, self.places))
        self.layers += 1

    def balance(self) -> Tensor:
        """Sum over the rows, float32."""
        assert self.choices is not None and self.probabilities is not None
        each = (self.choices * self.probabilities).sum(dim=1) / (self.lengths * self.layers).float() ** 2
        return self.choices.shape[1] * each.sum()

    def gradient(self, logits: Tensor) -> Tensor:
        """Gradient with respect to the router logits of a layer."""
        assert self.choices is not None and self.upstream is not None
        if self._by_token is None:
            scale = self.choices.shape[1] / (self.lengths * self.layers).float() ** 2 * self.upstream
            by_row = self.choices * scale.unsqueeze(1)
            self._by_token = torch.zeros_like(logits, dtype=torch.float32)
            self._by_token.index_add_(0, self.places, by_row.index_select(0, self.row_of))
        found = torch.softmax(logits.float(), dim=-1)
        by = self._by_token
        return (found * (by - (found * by).sum(dim=-1, keepdim=True))).to(logits.dtype)


class RouterBalance:
    """The routers of a model, watched."""

    def __init__(self, model: nn.Module) -> None:
        """ValueError, with the reason, where the model has none that this loss is known for."""
        self._routers, self._top_k = _routers(model)
        self._pass: _Pass | None = None
        for router in self._routers:
            router.register_forward_hook(self._after)

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[_Pass]:
        """Watch the forward of a batch within, which is on the model's device."""
        self._pass = found = _Pass(batch, batch.input_ids.device)
        try:
            yield found
        finally:
            found.open = False

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        watched = self._pass
        recomputed = torch._C._current_graph_task_id() != -1  # as torch's own checkpoints ask
        if watched is None or not (watched.open or recomputed):
            return None
        logits = output[0]
        if watched.open:
            watched.count(logits.detach(), self._top_k)
        at = next((at for at, part in enumerate(output) if at and part.is_floating_point()), None)
        if not torch.is_grad_enabled() or at is None or not logits.requires_grad:
            return None
        return (*output[:at], _Routed.apply(output[at], logits, watched), *output[at + 1 :])  # type: ignore[no-untyped-call]


def add_balance(total: Tensor, watched: _Pass, weight: float) -> Tensor:
    """total + weight · (sum over the rows of the pass), with its gradient."""
    found: Tensor = _Added.apply(total, watched.balance() * weight, watched, weight)  # type: ignore[no-untyped-call]
    return found


class _Added(torch.autograd.Function):
    """The sum, whose backward runs before that of any layer since all of them lie behind `total`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, balance: Tensor, watched: _Pass, weight: float) -> Tensor:
        ctx.about = watched, weight
        return total + balance.to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        watched, weight = ctx.about
        watched.upstream = grad.float() * weight
        return grad, None, None, None


class _Routed(torch.autograd.Function):
    """A router's weights of its experts as they are; the backward brings the gradient of the balance beside theirs."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, watched: _Pass) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.watched = watched
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return grad, ctx.watched.gradient(logits), None


def coefficient_of(config: Any) -> float | None:
    """The coefficient that a model's configuration brings for this loss; None where it has none."""
    text = config.get_text_config()
    found = getattr(text, "router_aux_loss_coef", None)
    return None if found is None or not hasattr(text, "output_router_logits") else float(found)


def _routers(model: nn.Module) -> tuple[list[nn.Module], int]:
    """The routers, and how many experts each token is sent to."""
    base = next((part for part in model.modules() if _recorder(part) is not None), None)
    if base is None:
        raise ValueError("it has no routers whose logits transformers records")
    function: Any = getattr(sys.modules[type(base).__module__], "load_balancing_loss_func", None)
    if function is None or tuple(inspect.signature(function).parameters) != ARGUMENTS:
        raise ValueError(f"{type(base).__name__} has its own load balancing")
    recorder = _recorder(base)
    if isinstance(recorder, list) or recorder.index != 0:
        raise ValueError(f"the routers of {type(base).__name__} are of another form")
    wanted = recorder.layer_name or ""
    found = [part for name, part in base.named_modules() if isinstance(part, recorder.target_class) and wanted in name]
    if not found:
        raise ValueError("none of its layers has a router")
    config: Any = base.config
    return found, int(config.get_text_config().num_experts_per_tok)


def _recorder(module: nn.Module) -> Any:
    if not isinstance(module, PreTrainedModel):  # PEFT's wrappers answer for it
        return None
    records: Any = getattr(module, "_can_record_outputs", None)
    return records.get("router_logits") if isinstance(records, Mapping) else None
