"""Rounding in training against torchao's own: its fake quantisers, and its reader of exported folders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from core.spec.axes.quantization import QAT
from core.train.export.packed.torchao import trained_pieces
from core.train.methods.qat import QATLinear, QATLoraLinear, grid_of, round_adapters, rounded, rounded_inputs

SPECS = [QAT(weights="int8"), QAT(weights="int4", group_size=32), QAT(weights="int4", group_size=64)]
pytestmark = pytest.mark.filterwarnings("ignore")


def hard_weight() -> Tensor:
    """Rows of many sizes, one of zeros, one whose largest number is positive (which int4 cuts off)."""
    torch.manual_seed(0)
    weight = torch.randn(24, 128) * torch.logspace(-4, 2, 24).unsqueeze(1)
    weight[3] = 0
    weight[5, 7] = weight[5].abs().max() * 3
    return weight


def configs(spec: QAT) -> tuple[Any, Any]:
    """torchao's configurations of inputs and weights."""
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig

    share = PerGroup(spec.group_size) if spec.weights == "int4" else PerAxis(0)
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    return inputs, IntxFakeQuantizeConfig(getattr(torch, spec.weights), share)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_and_inputs_are_those_of_torchao_to_the_bit(spec: QAT) -> None:
    from torchao.quantization.qat import FakeQuantizedLinear
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8Tensor,
        _apply_int8_act_asym_per_token_quant_dequant,
    )

    weight, grid = hard_weight(), grid_of(spec)
    theirs: Any = FakeQuantizedLinear(128, 24, False, *configs(spec))
    ours, _ = rounded(weight, grid)
    assert torch.equal(ours, theirs.weight_fake_quantizer(weight))
    pieces = trained_pieces(weight, grid)
    q, scale, zero = (pieces[f"_weight_{name}"] for name in ("qdata", "scale", "zero_point"))
    target, block = getattr(torch, spec.weights), (1, grid.group or 128)
    read = IntxUnpackedToInt8Tensor(q, scale, zero, target, block, torch.float32, None)
    assert torch.equal(read.dequantize(), ours), "what is exported is what was trained"
    assert torch.equal(IntxUnpackedToInt8Tensor.from_hp(weight, block, target).dequantize(), ours)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(3, 5, 128) * torch.logspace(-3, 3, 5).unsqueeze(1)).to(dtype)
        x[0, 0], x[0, 1] = 0, x[0, 1].abs() + 1
        assert torch.equal(rounded_inputs(x)[0], _apply_int8_act_asym_per_token_quant_dequant(x))
        if dtype is torch.float32:
            assert torch.equal(rounded_inputs(x)[0], theirs.activation_fake_quantizer(x))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_layers_output_and_gradients_are_those_of_torchao(spec: QAT) -> None:
    from torchao.quantization.qat import FakeQuantizedLinear

    weight, bias, x = hard_weight(), torch.randn(24), torch.randn(3, 5, 128)
    found = []
    layers: tuple[Any, ...] = (nn.Linear(128, 24), FakeQuantizedLinear(128, 24, True, *configs(spec)))
    for layer in layers:
        layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        if type(layer) is nn.Linear:
            layer.__class__ = QATLinear
            layer.grid, layer.kept_in = grid_of(spec), torch.float32
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        y.square().sum().backward()
        found.append((y.detach(), inputs.grad, layer.weight.grad, layer.bias.grad))
    (y, *ours), (wanted, *theirs) = found
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_an_adapter_is_rounded_with_its_base(spec: QAT, precision: torch.dtype | None) -> None:
    """Against autograd over the sum, with the rounding as if it were not there in the backward."""
    torch.manual_seed(1)
    grid = grid_of(spec)
    base: Any = nn.Sequential(nn.Linear(64, 32))
    base[0].__class__ = QATLinear
    base[0].grid, base[0].kept_in = grid, torch.float32
    model: Any = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["0"]))
    round_adapters(model)
    layer = model.base_model.model[0]
    assert isinstance(layer, QATLoraLinear)
    plainly: Any = layer
    a, b = plainly.lora_A["default"].weight, plainly.lora_B["default"].weight
    nn.init.normal_(b)
    x = torch.randn(2, 6, 64, requires_grad=True)
    weights = (x, a, b)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        y = layer(x)
    ours = torch.autograd.grad(y.float().square().sum(), weights)

    merged = base[0].weight + (b @ a) * 2.0
    on_grid, cut = rounded(merged.detach(), grid)
    through = merged.masked_fill(cut, 0)
    through = through + (on_grid - through).detach()
    cast = x if precision is None else x.to(precision)
    in_steps, beyond = rounded_inputs(cast.detach())
    kept = cast.masked_fill(beyond, 0)
    kept = torch.where(beyond, in_steps, kept + (in_steps - kept).detach())
    plain = functional.linear(kept, through.to(cast.dtype), base[0].bias.to(cast.dtype))
    assert torch.equal(y, plain)
    theirs = torch.autograd.grad(plain.float().square().sum(), weights)
    share = 1e-5 if precision is None else 1e-2
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=share * float(other.abs().max()))

    layer.merge(safe_merge=True)
    assert torch.equal(rounded(base[0].weight.detach(), grid)[0], on_grid), "PEFT merges to the weight that was rounded"
    layer.unmerge()
    with model.disable_adapter():
        assert torch.equal(layer(x), functional.linear(x, base[0].weight, base[0].bias))
