"""Linear layers that are trained as they will be quantised (`quantization: qat`; Jacob et al. 2018, arXiv:1712.05877).

    weights   int8 or int4, symmetric, one float32 scale for each output or group
    inputs    int8, asymmetric, one scale and zero point for each token, in the dtype of the product

Each forward rounds the weight (with its adapter added) and the inputs, as the exported folder will have them; gradients
go through the rounding as if it were not there, and stop where a number was cut off. The arithmetic is that of
torchao's fake quantisers and of its reader, `IntxUnpackedToInt8Tensor`, to the bit (tests/oracle/test_qat.py). Rounded
weights are not kept for the backward: it rounds them again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional

from core.errors import ModelError
from core.spec.axes.quantization import QAT
from core.train.quant.linear import compute_dtype
from core.train.quant.targets import QuantOptions, choose_targets

INPUT_LEAST, INPUT_MOST = -128, 127


@dataclass(frozen=True, slots=True)
class RoundingGrid:
    """The numbers that a weight may have."""

    bits: int
    group: int | None
    """Weights that share a scale; None: all of an output."""

    @property
    def least(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def most(self) -> int:
        return (1 << (self.bits - 1)) - 1


def grid_of(spec: QAT) -> RoundingGrid:
    """The grid that a job asks for."""
    return RoundingGrid(4, spec.group_size) if spec.weights == "int4" else RoundingGrid(8, None)


def steps_of(weight: Tensor, grid: RoundingGrid) -> tuple[Tensor, Tensor, Tensor]:
    """(whole numbers [outputs, inputs] in float32, scales [outputs, groups] in float32, which weights were cut off
    [outputs, inputs]) of a float32 weight [outputs, inputs]."""
    outputs, inputs = weight.shape
    groups = weight.view(outputs, -1, grid.group or inputs)
    scales = groups.abs().amax(-1, keepdim=True) / ((grid.most - grid.least) / 2)
    scales = scales.clamp(min=torch.finfo(weight.dtype).smallest_normal)
    steps = (groups * (1.0 / scales)).round()
    cut = (steps < grid.least) | (steps > grid.most)
    steps = steps.clamp(grid.least, grid.most)
    return steps.view(outputs, inputs), scales.squeeze(-1), cut.view(outputs, inputs)


def rounded(weight: Tensor, grid: RoundingGrid) -> tuple[Tensor, Tensor]:
    """(the weight on its grid, which weights were cut off), both [outputs, inputs], of a float32 weight."""
    steps, scales, cut = steps_of(weight, grid)
    outputs, inputs = weight.shape
    return (steps.view(outputs, scales.shape[1], -1) * scales.unsqueeze(-1)).view(outputs, inputs), cut


def rounded_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in 256 steps for each token, which numbers were cut off), both [..., inputs], computed in the dtype of x."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / float(INPUT_MOST - INPUT_LEAST)).clamp(min=torch.finfo(x.dtype).smallest_normal)
    zero = (INPUT_LEAST - (low / scales).round()).clamp(INPUT_LEAST, INPUT_MOST)
    steps = (x * (1.0 / scales)).round() + zero
    cut = (steps < INPUT_LEAST) | (steps > INPUT_MOST)
    return (steps.clamp(INPUT_LEAST, INPUT_MOST) - zero) * scales, cut


def merged_weight(weight: Tensor, a: Tensor | None, b: Tensor | None, scaling: float, kept_in: torch.dtype) -> Tensor:
    """The float32 weight that is rounded, [outputs, inputs]: that of the files, or with an adapter added as PEFT merges
    it. `kept_in`: the dtype in which a trained weight is handed back."""
    if a is None or b is None:
        return weight.to(kept_in).float()
    return weight.float() + (b @ a) * scaling


class _Rounded(torch.autograd.Function):
    """x Wᵀ with both rounded. Saves what it is made of, and nothing as large as a weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        grid: RoundingGrid,
        kept_in: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scaling, ctx.grid, ctx.kept_in, ctx.bias = scaling, grid, kept_in, bias is not None
        with torch.autocast(x.device.type, enabled=False):
            on_grid, _ = rounded(merged_weight(weight, a, b, scaling, kept_in), grid)
            bias = None if bias is None else bias.to(x.dtype)
            return functional.linear(rounded_inputs(x)[0], on_grid.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight, a, b = ctx.saved_tensors
        dx = dw = dbias = da = db = None
        with torch.autocast(x.device.type, enabled=False):
            on_grid, cut = rounded(merged_weight(weight, a, b, ctx.scaling, ctx.kept_in), ctx.grid)
            inputs, cut_inputs = rounded_inputs(x)
            if ctx.needs_input_grad[0]:
                dx = (gradient @ on_grid.to(x.dtype)).masked_fill(cut_inputs, 0)
            del on_grid, cut_inputs
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
                dw = (rows.t() @ inputs.reshape(-1, inputs.shape[-1])).float().masked_fill_(cut, 0)
                if a is not None and b is not None:
                    da, db = (b.t() @ dw) * ctx.scaling, (dw @ a.t()) * ctx.scaling
            if ctx.bias and ctx.needs_input_grad[2]:
                dbias = rows.float().sum(0)
        return dx, dw if ctx.needs_input_grad[1] else None, dbias, da, db, None, None, None


class QATLinear(nn.Linear):
    """A linear layer that computes with its weight and its inputs rounded."""

    grid: RoundingGrid
    kept_in: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(compute_dtype(input))
        found: Tensor = _Rounded.apply(x, self.weight, self.bias, None, None, 1.0, self.grid, self.kept_in)  # type: ignore[no-untyped-call]
        return found


class QATLoraLinear(PeftLinear):
    """PEFT's LoRA layer over a QATLinear: base and adapter are rounded as one weight. Without its adapter it computes
    with the base's weight as it is."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = self.base_layer
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.merged or len(active) != 1 or args or kwargs:
            raise RuntimeError("a layer of `quantization: qat` computes with one adapter that is not merged")
        x = x.to(compute_dtype(x))
        if self.disable_adapters:
            bias = None if base.bias is None else base.bias.to(x.dtype)
            return functional.linear(x, base.weight.to(x.dtype), bias)
        (name,) = active
        a, b, scaling = self.lora_A[name].weight, self.lora_B[name].weight, float(self.scaling[name])
        found: Tensor = _Rounded.apply(x, base.weight, base.bias, a, b, scaling, base.grid, base.kept_in)  # type: ignore[no-untyped-call]
        return found


def choose_layers(model: Any, spec: QAT) -> tuple[set[str], dict[str, str]]:
    """Names of the layers that are rounded; names of other linear layers with the reason. ModelError where there is
    none to round."""
    targets, kept = choose_targets(model, QuantOptions(skip=tuple(spec.skip_modules)))
    group = grid_of(spec).group
    if group is not None:
        odd = {name for name in targets if model.get_submodule(name).in_features % group}
        targets -= odd
        kept |= dict.fromkeys(sorted(odd), f"its inputs are no multiple of {group}")
    if not targets:
        raise ModelError(
            f"no linear layer has a number of inputs that groups of {group} divide; set a smaller "
            "`quantization.group_size`, or take `weights: int8`",
            field="quantization.group_size",
        )
    return targets, kept


def to_qat(model: Any, spec: QAT, kept_in: torch.dtype) -> dict[str, Any]:
    """Let the linear layers of a model compute rounded, in place, but for the output head and those that are skipped;
    what the run record says of it. Call it before adapters are added. ModelError where there is none."""
    targets, kept = choose_layers(model, spec)
    grid = grid_of(spec)
    for name in targets:
        layer = model.get_submodule(name)
        layer.__class__ = QATLinear
        layer.grid, layer.kept_in = grid, kept_in
    return {"format": "qat", "layers": len(targets), "kept": kept, **asdict(grid)}


def round_adapters(model: nn.Module) -> None:
    """Let PEFT's LoRA layers over rounded ones add their adapter before the rounding."""
    for module in model.modules():
        if type(module) is PeftLinear and isinstance(module.get_base_layer(), QATLinear):
            module.__class__ = QATLoraLinear
