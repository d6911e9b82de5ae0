"""Norms, gated activations, rotary embedding and dense LoRA in one operator each: the eager formulas within a stated
tolerance, on the models of transformers; whoever computes something else is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from core.train.kernels import interface
from core.train.kernels.fused.modules import FusedParts, fuse_parts
from core.train.kernels.fused.operators import rms_norm, silu_gate, turned
from core.train.quant.adapters import FusedLoraLinear, fuse_adapters
from tests.support import small_llama
from tests.support.small_llama import IDS

CPU = torch.device("cpu")


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_from_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


def near(found: Tensor, wanted: Tensor) -> None:
    """Stated tolerance: 1e-6 of the largest value in float32. In bfloat16 at most a value in a thousand is off, by one
    rounding."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    gap = (found.double() - wanted.double()).abs()
    if found.dtype == torch.float32:
        assert float(gap.max()) <= 1e-6 * float(wanted.abs().max())
        return
    assert float((gap > 0).double().mean()) <= 1e-3
    assert bool((gap <= 2.0**-7 * wanted.double().abs() + 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 63, 200])
def test_operators_are_the_eager_formulas(dtype: torch.dtype, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, y, up = (torch.randn(5, 7, width, generator=draw).mul_(3).to(dtype) for _ in range(3))
    weight = torch.randn(width, generator=draw).to(dtype)
    x, y = x.requires_grad_(), y.requires_grad_()
    pairs = [
        (rms_norm(x, weight, 1e-6, from_one=False), plain_norm(x, weight, 1e-6), (x,)),
        (rms_norm(x, weight, 1e-6, from_one=True), norm_from_one(x, weight, 1e-6), (x,)),
        (silu_gate(x, y), functional.silu(x) * y, (x, y)),
        (silu_gate(x.transpose(0, 1), y.transpose(0, 1)), (functional.silu(x) * y).transpose(0, 1), (x, y)),
    ]
    for found, wanted, leaves in pairs:
        near(found, wanted)
        side = up if found.shape == up.shape else up.transpose(0, 1)
        ours, theirs = torch.autograd.grad(found, leaves, side), torch.autograd.grad(wanted, leaves, side)
        for one, other in zip(ours, theirs, strict=True):
            # a gradient of a norm is the difference of two that may cancel: its error is that of the larger ones
            assert float((one.double() - other.double()).norm()) <= 1e-3 * float(other.double().norm()) + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lines_of_angles", [1, 2])
def test_turned_heads_are_those_of_transformers_to_the_bit(dtype: torch.dtype, lines_of_angles: int) -> None:
    """Also of another layout, and of angles whose halves differ."""
    draw = torch.Generator().manual_seed(1)
    angles = torch.randn(lines_of_angles, 7, 18, generator=draw)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    by_token, by_head, above = (
        torch.randn(2, *shape, 18, generator=draw).to(dtype) for shape in ((7, 3), (3, 7), (3, 7))
    )
    for x in (by_token.transpose(1, 2).requires_grad_(), by_head.requires_grad_()):
        found, (wanted, _) = turned(x, cosine, sine), apply_rotary_pos_emb(x, x, cosine, sine)
        assert torch.equal(found, wanted)
        ours, theirs = (torch.autograd.grad(each, x, above)[0] for each in (found, wanted))
        assert torch.equal(ours, theirs)


def test_each_row_is_computed_by_itself_whatever_the_threads() -> None:
    x, weight = torch.randn(33, 200), torch.randn(200)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = rms_norm(x, weight, 1e-6, from_one=False), silu_gate(x, x)
        torch.set_num_threads(3)
        assert all(map(torch.equal, one, (rms_norm(x, weight, 1e-6, from_one=False), silu_gate(x, x))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rms_norm(x[5:9], weight, 1e-6, from_one=False), one[0][5:9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_a_number_stays_that(dtype: torch.dtype) -> None:
    x, ones = torch.ones(3, 70, dtype=dtype), torch.ones(70, dtype=dtype)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    for found in (rms_norm(x, ones, 1e-6, from_one=False), silu_gate(x, x)):
        assert bool(found[0].isfinite().all()) and bool(found[1, 5].isnan()) and not bool(found[2, 6].isfinite())


MODELS: dict[str, tuple[str, dict[str, Any], FusedParts]] = {
    "llama": ("LlamaConfig", {}, FusedParts("native", 5, 2, rotations=2)),
    "qwen3": ("Qwen3Config", {}, FusedParts("native", 9, 2, rotations=2)),
    "gemma2": ("Gemma2Config", {}, FusedParts("native", 9, 0, rotations=2)),  # 1 + weight; its gate is a GELU
    "phi3": ("Phi3Config", {}, FusedParts("native", 5, 0, rotations=2)),  # gate and up are one layer
    "mixtral": ("MixtralConfig", {"num_local_experts": 2}, FusedParts("native", 5, 0, rotations=2)),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, FusedParts("native", 0, 0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_as_before(name: str) -> None:
    config, more, expected = MODELS[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes | heads | ends | more))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_(False)
    model.eval()
    ids, names = torch.arange(20).view(2, 10), list(model.state_dict())
    embedded = model.get_input_embeddings()(ids).requires_grad_()
    before = model(inputs_embeds=embedded).logits
    grad = torch.autograd.grad(before.square().sum(), embedded)[0]
    assert fuse_parts(model, CPU) == expected
    after = model(inputs_embeds=embedded).logits
    assert list(model.state_dict()) == names
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(after.square().sum(), embedded)[0], grad, rtol=1e-3, atol=1e-3)


class BiasedRMSNorm(nn.Module):
    """An RMS norm that adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8), requires_grad=False), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return plain_norm(x, self.weight, self.eps) + 1.0


def test_another_formula_and_a_veto_leave_modules_alone() -> None:
    model = nn.Sequential(BiasedRMSNorm())
    assert fuse_parts(model, CPU) == FusedParts("native", 0, 0)
    assert type(model[0]) is BiasedRMSNorm
    interface.veto("native", "a self-test found it wrong", "block")
    try:
        assert fuse_parts(model, CPU) == FusedParts("portable")
    finally:
        interface.unveto()


def test_a_trained_weight_is_computed_as_before() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    plain, norm = LlamaRMSNorm(16), nn.Sequential(LlamaRMSNorm(16))
    x = torch.randn(3, 16)
    fuse_parts(norm, CPU)
    assert torch.equal(norm(x), plain(x)) and norm(x).grad_fn is not None
    grad = torch.autograd.grad(norm(x).sum(), norm[0].weight)[0]
    assert torch.equal(grad, torch.autograd.grad(plain(x).sum(), plain.weight)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama.save(tmp_path_factory.mktemp("base"), attention_bias=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_lora_over_dense_layers_equals_pefts_own_forward(folder: Path, dropout: float) -> None:
    """Stated tolerance: 1e-3 of a gradient in float32."""
    results = []
    for fuse in (False, True):
        model = small_llama.adapted(folder, torch.float32, dense=True, lora_dropout=dropout)
        if fuse:
            found = fuse_adapters(model, dense=True)
            assert (found.fused, found.grouped) == (14, 10)
            assert isinstance(model.base_model.model.model.layers[0].mlp.up_proj, FusedLoraLinear)
        torch.manual_seed(5)
        output = model.train()(input_ids=IDS, labels=IDS)
        output.loss.backward()
        results.append((output.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (logits, grads), (logits2, grads2) = results
    torch.testing.assert_close(logits2, logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == grads2.keys() and len(grads) == 28
    for name in grads:
        torch.testing.assert_close(grads2[name], grads[name], rtol=1e-3, atol=1e-6)
