"""NF4 against the real bitsandbytes, bit for bit, and what is refused."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch

from core.errors import ModelError
from core.train.quant.int8 import int8_from_state, quantize_int8
from core.train.quant.layout import dynamic_map, nf4_from_state, nf4_map
from core.train.quant.nf4 import quantize_nf4
from tests.support.dequantize import dequantize
from tests.support.selection import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (576, 192), (3, 64 * 257), (50, 100), (7, 9), (1, 1), (130, 64))


def _weight(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 0.02) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    if weight.numel() > 256:
        weight.view(-1)[64:192] = 0.0  # whole blocks of zeros
        weight.view(-1)[5] = 50 * scale  # an outlier
    return weight.to(dtype)


def test_tables_are_those_of_bitsandbytes() -> None:
    assert torch.equal(dynamic_map(torch.device("cpu")), bnb.create_dynamic_map())
    assert torch.equal(nf4_map(torch.device("cpu")), bnb.get_4bit_type("nf4", device="cpu"))


@pytest.mark.parametrize(("shape", "double", "dtype"), pairwise(SHAPES, [True, False], DTYPES))
def test_equal_to_bitsandbytes(shape: tuple[int, int], double: bool, dtype: torch.dtype) -> None:
    weight = _weight(shape, dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    ours = quantize_nf4(weight, 64, double)
    assert torch.equal(ours.packed, packed)
    assert torch.equal(ours.absmax, state.absmax)
    if double:
        assert ours.nested_absmax is not None and ours.offset is not None
        assert torch.equal(ours.nested_absmax, state.state2.absmax)
        assert torch.equal(ours.offset, state.offset)
    assert torch.equal(dequantize(ours), bnb.dequantize_4bit(packed, state).reshape(shape))


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_file_tensors_are_those_of_bitsandbytes_and_read_back(double: bool) -> None:
    weight = _weight((96, 128), torch.bfloat16)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    theirs = {"weight": packed} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    ours = quantize_nf4(weight, 64, double).state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert torch.equal(dequantize(nf4_from_state(theirs)), bnb.dequantize_4bit(packed, state))
    again = bnb.QuantState.from_dict({k.removeprefix("weight."): v for k, v in ours.items() if k != "weight"}, "cpu")
    assert torch.equal(bnb.dequantize_4bit(ours["weight"], again), dequantize(nf4_from_state(ours)))


def test_a_width_that_is_no_multiple_of_the_block_keeps_its_accuracy() -> None:
    """bitsandbytes 0.50 on AVX-512 reads the scales of such rows from the wrong blocks: 28 to 94 % error."""
    for shape in ((96, 96), (64, 160), (64, 48)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        error = (dequantize(quantize_nf4(weight)) - weight).norm() / weight.norm()
        assert error < 0.1


def test_pieces_of_a_large_weight_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight((100, 100), torch.float32)
    whole, whole8 = quantize_nf4(weight), quantize_int8(weight)
    monkeypatch.setattr("core.train.quant.nf4._CHUNK", 1024)
    monkeypatch.setattr("core.train.quant.int8._CHUNK", 1024)
    assert torch.equal(quantize_nf4(weight).packed, whole.packed)
    assert torch.equal(quantize_int8(weight).packed, whole8.packed)


@pytest.mark.parametrize("quantise", [quantize_nf4, quantize_int8])
def test_what_cannot_be_quantised_is_refused(quantise: object) -> None:
    assert callable(quantise)
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(4, 64)
        weight[2, 3] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantise(weight)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        quantise(torch.ones(4, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match="empty"):
        quantise(torch.ones(0, 64))


def test_scales_whose_mean_is_past_float32_are_refused() -> None:
    with pytest.raises(ValueError, match="past float32's range"):
        quantize_nf4(torch.full((128, 64), 3e38))


def test_damaged_tensors_are_refused_by_name() -> None:
    state = quantize_nf4(torch.randn(64, 64)).state()
    for change, words in (
        ({"weight.absmax": state["weight.absmax"][:-1]}, "absmax has 63"),
        ({"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}, "not a readable NF4"),
        ({"weight.quant_map": torch.linspace(-1, 1, 16)}, "a table of its own"),
        ({"weight": state["weight"].to(torch.float32)}, "not NF4 in bytes"),
    ):
        with pytest.raises(ModelError, match=words):
            nf4_from_state({**state, **change}, "model.q_proj.weight")
    with pytest.raises(ModelError, match="FP4"):
        nf4_from_state({"weight.quant_state.bitsandbytes__fp4": state["weight"]})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_within_half_a_step_and_reads_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _weight(shape, dtype)
    ours = quantize_int8(weight)
    dense = dequantize(ours, torch.float32)
    flat = torch.nn.functional.pad(weight.float().reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    step = (flat.abs().amax(1, keepdim=True) / 127).expand(-1, 64).reshape(-1)[: weight.numel()].view(shape)
    assert ((dense - weight.float()).abs() <= step * 0.5001 + 1e-12).all()
    assert torch.equal(dequantize(int8_from_state(ours.state())), dequantize(ours))
