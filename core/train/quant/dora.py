"""DoRA over a packed weight (Liu et al. 2024, arXiv:2402.09353), with the norm taken apart.

    y = (m / ‖W + s·BA‖) · (W + s·BA) x + bias

‖·‖ is that of each row and, as in the paper's section 4.3 and in PEFT, a constant for the gradient. PEFT makes s·BA,
from an identity that it sends through A and B, unpacks W beside it and takes the norm of the sum in the weight's dtype,
in every forward. Here the base and the adapter are the operator that LoRA has, and the norm is

    ‖w + s·bA‖² = ‖w‖² + 2s · b·(A wᵀ) + s² · b (AAᵀ) bᵀ

for a row w of W and b of B, in float32: ‖w‖² is kept from the first time, and A·Wᵀ is a product of r rows.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from core.train.kernels.autograd import Member, linear, lora_linear
from core.train.kernels.padded import PLAIN, operand
from core.train.kernels.row_split import RowSplit
from core.train.quant.linear import QuantLinear, compute_dtype


def is_dora(layer: PeftLinear, adapter: str) -> bool:
    """Whether `forward` covers this adapter of this layer."""
    return (
        isinstance(layer.base_layer, QuantLinear)
        and type(layer.lora_variant.get(adapter)) is DoraLinearVariant
        and not layer.lora_bias[adapter]
        and type(layer.lora_A[adapter]) in PLAIN
        and type(layer.lora_B[adapter]) in PLAIN
    )


def begin(layer: PeftLinear, adapter: str) -> None:
    """Give an adapter that has learned nothing the magnitudes of its base, not rounded to the base's dtype as PEFT has
    them: then the layer begins as its base."""
    base, b = _base(layer), layer.lora_B[adapter].weight
    assert isinstance(b, Tensor)
    if base.packed.is_meta or b.is_meta or bool(b.any()):
        return
    magnitude = _magnitude(layer, adapter)
    magnitude.data.copy_(base.row_squares().sqrt())


def forward(layer: PeftLinear, x: Tensor, adapter: str, split: RowSplit | None) -> Tensor:
    """The layer's answer; `split`: how many rows at once, where the card has a limit. Draws the adapter's dropout."""
    x = x.to(compute_dtype(x))
    base, a, b = _base(layer), operand(layer.lora_A[adapter]), operand(layer.lora_B[adapter])
    scaling = float(layer.scaling[adapter])
    member = Member(base.packed, base.scales, base.format, base.block, None, a, b, scaling)
    dropout = layer.lora_dropout[adapter]
    drops = layer.training and not isinstance(dropout, nn.Identity)
    dropped: Tensor = dropout(x) if drops else x
    both = lora_linear(dropped, member) if split is None else split.lora(dropped, [member])[0]
    gain = _magnitude(layer, adapter) / norms(base, a, b, scaling, x.dtype)
    y = (both * gain).to(x.dtype)  # multiplied in float32
    if drops:  # the base sees its input whole
        left: Any = x - dropped
        y = y + (_plain(base, left) if split is None else split.call(lambda rows: _plain(base, rows), left))
    return y if base.bias is None else y + base.bias.to(y.dtype)


@torch.no_grad()
def norms(base: QuantLinear, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """‖w + scaling · bA‖ of each row, float32 [N]; the product with the packed weight is made in `dtype`."""
    with torch.autocast(a.device.type, enabled=False):
        wa = _plain(base, a.to(dtype)).float()  # [r, N]
        columns, wide = b.float().t(), a.float()
        squares = (wide @ wide.t() @ columns * columns).sum(0)
        total = base.row_squares() + 2 * scaling * (wa * columns).sum(0) + scaling**2 * squares
        return total.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def _plain(base: QuantLinear, x: Tensor) -> Tensor:
    return linear(x, base.packed, base.scales, base.format, base.block, base.out_features, None)


def _base(layer: PeftLinear) -> QuantLinear:
    base = layer.base_layer
    assert isinstance(base, QuantLinear)  # is_dora has looked
    return base


def _magnitude(layer: PeftLinear, adapter: str) -> Tensor:
    weight = layer.lora_magnitude_vector[adapter].weight
    assert isinstance(weight, Tensor)
    return weight
