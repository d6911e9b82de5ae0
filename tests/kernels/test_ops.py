"""The operators: numbers and gradients against dense torch, registration (opcheck), compile, scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from core.train.kernels import autograd, ops
from core.train.kernels.scratch import Scratch, clear_scratch, scratch_for
from core.train.quant.int8 import quantize_int8
from core.train.quant.nf4 import quantize_nf4

N, K, R = 96, 128, 4


def _parts(format: str) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(N, K) * 0.05
    packed = quantize_nf4(weight) if format == "nf4" else quantize_int8(weight)
    return {
        "x": torch.randn(2, 5, K),
        "dense": ops.dequantize(packed.packed, packed.scales, format, 64, [N, K], torch.float32),
        "packed": packed.packed,
        "scales": packed.scales,
        "bias": torch.randn(N),
        "a": torch.randn(R, K) * 0.1,
        "b": torch.randn(N, R) * 0.1,
    }


def _member(p: dict[str, Any], format: Any, bias: Any, scaling: float, dropped: Any = None) -> autograd.Member:
    return autograd.Member(p["packed"], p["scales"], format, 64, bias, p["a"], p["b"], scaling, dropped)


@pytest.mark.parametrize("compiled", [False, True], ids=["autograd", "operator"])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_lora_linear_is_base_plus_adapter(
    format: str, dropout: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _parts(format)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    leaves = [p["x"].requires_grad_(), p["a"].requires_grad_(), p["b"].requires_grad_(), p["bias"].requires_grad_()]
    mask = (torch.rand_like(p["x"]) > 0.5) * 2.0
    dropped = p["x"] * mask if dropout else None
    y = autograd.lora_linear(p["x"], _member(p, format, p["bias"], 1.7, dropped))
    source = p["x"] * mask if dropout else p["x"]
    wanted = functional.linear(p["x"], p["dense"], p["bias"]) + 1.7 * (source @ p["a"].t() @ p["b"].t())
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_linear_equals_dense_linear_exactly(format: str) -> None:
    p = _parts(format)
    x = p["x"].requires_grad_()
    y = autograd.linear(x, p["packed"], p["scales"], format, 64, N, p["bias"])  # type: ignore[arg-type]
    wanted = functional.linear(x, p["dense"], p["bias"])
    assert torch.equal(y, wanted)
    upstream = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, upstream), torch.autograd.grad(wanted, x, upstream))


def test_only_packed_weight_x_and_xa_are_kept() -> None:
    p = _parts("nf4")
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        p["a"].requires_grad_(), p["b"].requires_grad_()
        autograd.lora_linear(p["x"].requires_grad_(), _member(p, "nf4", None, 1.0))
    floats = sum(t.numel() for t in kept if t.is_floating_point())
    small = sum(s.numel() for s in p["scales"])
    assert floats <= p["x"].numel() + 10 * R + p["a"].numel() + p["b"].numel() + small
    assert N * K not in [t.numel() for t in kept]


def test_first_layer_dequantises_nothing_in_the_backward() -> None:
    p = _parts("nf4")
    p["a"].requires_grad_()
    y = autograd.lora_linear(p["x"], _member(p, "nf4", None, 1.0))
    clear_scratch()
    scratch = scratch_for(torch.device("cpu"))
    before = scratch.misses
    y.sum().backward()
    assert scratch.misses == before and p["a"].grad is not None


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_opcheck(dropout: bool) -> None:
    p = _parts("nf4")
    x, a, b = p["x"].requires_grad_(), p["a"].requires_grad_(), p["b"].requires_grad_()
    dropped = (p["x"].detach() * 2).requires_grad_() if dropout else None
    torch.library.opcheck(ops.lora_linear, (x, dropped, p["packed"], p["scales"], "nf4", 64, p["bias"], a, b, 2.0))
    if not dropout:
        torch.library.opcheck(ops.quant_linear, (x, p["packed"], p["scales"], "nf4", 64, N, p["bias"].requires_grad_()))
        torch.library.opcheck(ops.dequantize, (p["packed"], p["scales"], "nf4", 64, [N, K], torch.bfloat16))


def test_scratch_reuses_what_is_there_and_notices_changes() -> None:
    scratch = Scratch(budget=3 * 400)
    packed = [torch.zeros(10, dtype=torch.uint8) for _ in range(4)]
    fills: list[int] = []

    def dense(at: int, n: int = 100) -> torch.Tensor:
        return scratch.dense(packed[at], n, torch.float32, lambda out: (fills.append(at), out.fill_(at))[1])

    first = dense(0)
    assert dense(0) is first and fills == [0]
    dense(1), dense(2), dense(0)
    assert fills == [0, 1, 2]
    assert dense(3).data_ptr() and fills == [0, 1, 2, 3] and scratch.nbytes <= 1200  # 1 was least recently used
    dense(0)
    assert fills == [0, 1, 2, 3]
    packed[0].add_(1)  # written in place: what was made of it is stale
    dense(0)
    assert fills == [0, 1, 2, 3, 0]
    dense(1, n=1000)
    assert scratch.nbytes == 4000 and dense(1, n=1000).numel() == 1000  # larger than the budget: alone
    dense(2)
    assert scratch.nbytes <= 1200
    scratch.clear()
    assert scratch.nbytes == 0
