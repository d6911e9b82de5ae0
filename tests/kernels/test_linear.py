"""QuantLinear as torch and PEFT see it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from core.train.kernels.ops import dequantize
from core.train.quant.int8 import quantize_int8
from core.train.quant.linear import QuantLinear
from core.train.quant.nf4 import quantize_nf4


def _layer(format: str = "nf4", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(64, 128, generator=generator) * 0.05).to(dtype)
    packed = quantize_nf4(weight) if format == "nf4" else quantize_int8(weight)
    return QuantLinear(packed, torch.randn(64, generator=generator).to(dtype))


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_looks_and_computes_like_a_linear(format: str) -> None:
    layer = _layer(format)
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == (64, 128) and layer.weight.dtype == torch.bfloat16
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer.dense()(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_dtype_moves_leave_the_packed_weight_alone(format: str) -> None:
    layer = _layer(format)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for moved in (layer.float(), layer.half(), layer.to(torch.float64), layer.bfloat16()):
        for name, buffer in moved.named_buffers():
            assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])
    assert layer.bias.dtype == torch.bfloat16
    meta = _layer(format).to("meta")
    assert meta.packed.is_meta and meta.bias.is_meta


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_state_dict_and_copies(format: str) -> None:
    layer, other = _layer(format), _layer(format, seed=1)
    state = layer.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.weight, layer.weight) and torch.equal(other.bias, layer.bias)
    twin = copy.deepcopy(layer)
    twin.packed.zero_()
    assert not torch.equal(twin.weight, layer.weight)
    del state["weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


def test_writing_to_the_weight_is_an_error_not_a_loss() -> None:
    layer = _layer()
    delta = torch.ones(64, 128, dtype=torch.bfloat16)
    for write in (
        lambda: layer.weight.data.add_(delta),
        lambda: layer.weight.add_(delta),
        lambda: layer.weight.copy_(delta),
        lambda: layer.weight.__setitem__(0, 1.0),
        lambda: setattr(layer.weight, "data", delta),
        lambda: setattr(layer, "weight", nn.Parameter(delta)),
        lambda: layer.weight.detach().mul_(2),
    ):
        with pytest.raises(RuntimeError, match="packed and cannot be written"):
            write()
    with pytest.raises(RuntimeError, match="packed"):
        layer.weight.data += delta
    reading = layer.weight.to(torch.float32) + 1  # reading is free
    assert type(reading) is torch.Tensor


def test_a_look_at_the_weight_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT looks many times at every weight that it adapts: a whole model would be unpacked each time."""
    layer, unpacked = _layer(), []
    monkeypatch.setattr(
        "core.train.quant.linear.dequantize", lambda *given: unpacked.append(given) or dequantize(*given)
    )
    model = get_peft_model(nn.Sequential(layer), LoraConfig(r=2, target_modules=["0"]))
    weight = model.base_model.model[0].base_layer.weight
    assert weight.shape == weight.size() == (64, 128) and weight.dtype == torch.bfloat16 and weight.numel() == 64 * 128
    assert weight.device == layer.packed.device and not weight.is_meta and weight.is_floating_point()
    assert unpacked == []
    assert weight.sum().isfinite() and len(unpacked) == 1
    assert torch.equal(weight[3], layer.dense_weight()[3]) and torch.equal(weight.T, layer.dense_weight().T)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    product = torch.nn.functional.linear(x, weight)
    assert type(product) is torch.Tensor and torch.equal(product, x @ layer.dense_weight().T)
