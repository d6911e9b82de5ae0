"""Does a model that was written say what the model in memory says? Logits against logits, both computed in float32.

In float32 two forms of one model differ by the rounding of the weights that were written and by nothing else, so that
the tolerance can be close; weights are widened a layer at a time, not all at once. Beside the distance there is the
adapter itself: how much of what it changes about the base's logits is there in the merged ones. A lost adapter is
found that way also when it changes little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from core.train.model.heads import backbone_of, has_head, head_of_model

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Root mean square of the difference over that of the logits (their mean over the vocabulary taken off), by the dtype
that was written."""
LEAST_KEPT = 0.5
"""Share of the adapter's effect that must have survived."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found; part of the job's result."""

    rows: int
    positions: int
    """At each of them all logits are compared."""
    distance: float | None
    """Root mean square of the difference, relative; see TOLERANCE. None where it is no finite number."""
    tolerance: float
    same_choice: float
    """Share of positions with the same most likely token."""
    adapter_effect: float
    """The same distance between base and base with adapter."""
    adapter_kept: float | None
    """How much of that effect the merged model has: 1 is all of it. None where it is too small beside the rounding to
    be told."""

    def fault(self) -> str | None:
        """Why the merged model is not the trained one; None when it is."""
        if self.distance is None:
            return "its logits are not finite numbers"
        if self.distance > self.tolerance:
            return f"its logits are off by {self.distance:.2g} of their spread; {self.tolerance:g} is allowed"
        if self.adapter_kept is not None and not self.adapter_kept >= LEAST_KEPT:
            return f"only {max(self.adapter_kept, 0.0):.0%} of the adapter's effect is left in it"
        return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(with_adapter: Tensor, without: Tensor, merged: Tensor, rows: int, dtype: torch.dtype) -> Comparison:
    """Three times logits [positions, vocabulary], float32; `dtype` is that of the merged model's weights."""
    target, base, here = (_centred(logits) for logits in (with_adapter, without, merged))
    scale = _norm(target)
    gap, effect = _norm(here - target), _norm(target - base)
    kept = None
    if effect > 0 and effect >= gap / 3:
        kept = _dot(here - base, target - base) / _dot(target - base, target - base)
    return Comparison(
        rows=rows,
        positions=len(target),
        distance=gap / max(scale, 1e-30) if math.isfinite(gap) and math.isfinite(scale) else None,
        tolerance=TOLERANCE[dtype],
        same_choice=float((here.argmax(-1) == target.argmax(-1)).float().mean()),
        adapter_effect=effect / max(scale, 1e-30),
        adapter_kept=kept,
    )


def logits_of(model: Any, rows: Sequence[Tensor], between: Callable[[], None]) -> Tensor:
    """[positions of all rows, vocabulary] float32 on the CPU, from one eval-mode pass in float32; for a reward model
    the output of its head at every token. The rows are padded on the right, where causal attention does not look."""
    device, training = next(model.parameters()).device, model.training
    ids = pad_sequence([row.long() for row in rows], batch_first=True)
    real = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    between()
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), in_float32(model):
            if has_head(model):
                states = backbone_of(model)(input_ids=ids.to(device), use_cache=False).last_hidden_state
                logits: Tensor = head_of_model(model)(states)
            else:
                logits = model(input_ids=ids.to(device), use_cache=False).logits
    finally:
        model.train(training)
    return logits[real.to(device)].float().cpu()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within, 16-bit weights are float32 while their layer computes, and so is everything that flows."""
    narrow = (torch.bfloat16, torch.float16)

    def widen_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.float()

    with ExitStack() as stack:
        for module in model.modules():
            # It computes with the weight of a layer that it does not call.
            holder = module.base_layer if isinstance(module, TrainableTokensLayer) else module
            own = [p for p in holder._parameters.values() if p is not None and p.dtype in narrow]
            if not own:
                continue
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(widen_output).remove)
                continue
            wide = _Widened(own)
            stack.callback(wide.narrow)
            stack.callback(module.register_forward_pre_hook(wide.widen).remove)
            stack.callback(module.register_forward_hook(wide.narrow).remove)
        yield


class _Widened:
    """The 16-bit weights of one module, float32 from its forward's start to its end."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.kept: list[Tensor] = []

    def widen(self, *_: Any) -> None:
        self.kept = [p.data for p in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.float()

    def narrow(self, *_: Any) -> None:
        for parameter, data in zip(self.parameters, self.kept, strict=False):
            parameter.data = data
        self.kept = []


def _centred(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 1:  # scores: one number a position
        return logits - logits.mean(dim=0, keepdim=True)
    return logits - logits.mean(dim=-1, keepdim=True)


def _norm(values: Tensor) -> float:
    return math.sqrt(_dot(values, values) / values.numel())


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
