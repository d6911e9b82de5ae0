"""Siblings over one input: grouped against one by one, in the operator and in a model."""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from core.train.kernels import autograd
from core.train.kernels.autograd import Member, lora_linear, lora_linears
from core.train.quant.adapters import FusedLoraLinear, fuse_adapters
from core.train.quant.nf4 import quantize_nf4
from tests.support import small_llama
from tests.support.small_llama import IDS

# --- the operator ----------------------------------------------------------------------------------


def _members(dtype: torch.dtype, dropped: list[Tensor | None], bias: bool) -> list[Member]:
    torch.manual_seed(1)
    members = []
    for out, r, drop in zip((96, 32, 32), (4, 4, 8), dropped, strict=True):
        weight = quantize_nf4(torch.randn(out, 128) * 0.05)
        members.append(
            Member(
                weight.packed, weight.scales, "nf4", 64,
                torch.randn(out).requires_grad_() if bias else None,
                (torch.randn(r, 128) * 0.1).requires_grad_(), (torch.randn(out, r) * 0.1).requires_grad_(), 1.5, drop,
            )
        )  # fmt: skip
    return members


@pytest.mark.parametrize("case", ["plain", "dropout", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_gives_what_its_members_give_alone(dtype: torch.dtype, case: str) -> None:
    """Stated tolerance: 1e-5 in float32; 2 % of the norm in bfloat16, where the gradients of x are rounded once in
    place of once a member."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    masks = [
        None if case == "plain" or (case == "mixed" and i == 1) else (torch.rand(2, 5, 128) > 0.3) for i in range(3)
    ]
    dropped = [None if mask is None else x * mask.to(dtype) / 0.7 for mask in masks]
    members = _members(dtype, dropped, bias=case == "mixed")
    leaves = [x, *(t for m in members for t in (m.a, m.b, m.bias) if t is not None)]
    together, alone = lora_linears(x, members), [lora_linear(x, member) for member in members]
    upstream = [torch.randn_like(y) for y in alone]
    got = torch.autograd.grad(together, leaves, upstream, retain_graph=True)
    wanted = torch.autograd.grad(alone, leaves, upstream)
    for ours, theirs in zip([*together, *got], [*alone, *wanted], strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_member_that_nobody_uses_costs_no_gradient() -> None:
    x = torch.randn(3, 128, requires_grad=True)
    members = _members(torch.float32, [None] * 3, bias=False)
    q, _, v = lora_linears(x, members)
    (q.sum() + v.sum()).backward()
    assert members[1].a.grad is None and members[1].b.grad is None and members[2].a.grad is not None
    grad = x.grad.clone()  # type: ignore[union-attr]
    x.grad = None
    (lora_linear(x, members[0]).sum() + lora_linear(x, members[2]).sum()).backward()
    torch.testing.assert_close(grad, x.grad)


def test_one_member_is_the_registered_operator_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 128).bfloat16().requires_grad_()
    (member, *_) = _members(torch.bfloat16, [None] * 3, bias=False)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        y = lora_linear(x, member)
        results.append([y, *torch.autograd.grad(y, [x, member.a, member.b], torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_x_is_kept_once_for_the_whole_group() -> None:
    x = torch.randn(40, 128, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linears(x, _members(torch.float32, [None] * 3, bias=False))
    assert [t.shape for t in kept if t.shape[0] == 40] == [(40, 16), (40, 128)]
    assert not [t for t in kept if t.numel() >= 32 * 128 and t.shape[0] != 40]


# --- in a model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama.save(tmp_path_factory.mktemp("base"))


def _model(folder: Path, **lora: Any) -> Any:
    return small_llama.adapted(folder, **lora).train()


def _layers(model: nn.Module) -> list[FusedLoraLinear]:
    return [m for m in model.modules() if isinstance(m, FusedLoraLinear)]


def _gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return [output.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "lora",
    [{}, {"lora_dropout": 0.2}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}],
    ids=["all", "dropout", "some"],
)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_a_grouped_model_is_the_ungrouped_one(folder: Path, lora: dict[str, Any], checkpointing: bool | None) -> None:
    """Stated tolerance: 1e-4, float32. With dropout the masks are the same."""
    model = _model(folder, **lora)
    assert fuse_adapters(model).grouped == (4 if "target_modules" in lora else 10)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    grouped = _gradients(model)
    for layer in _layers(model):
        layer.shared = None
    for ours, theirs in zip(grouped, _gradients(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_recomputation_skips_the_last_product_of_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(folder)
    fuse_adapters(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    widths: list[int] = []
    real = autograd._products

    def count(x: Tensor, members: Any, xa: Tensor) -> list[Tensor]:
        widths.extend(m.a.shape[1] for m in members)
        return real(x, members, xa)

    monkeypatch.setattr(autograd, "_products", count)
    _gradients(model)
    assert widths.count(128) == 2  # down_proj of two layers: in the forward alone
    assert widths.count(64) == 2 * 2 * 6


def test_members_that_cannot_take_part_leave_the_others_right(folder: Path) -> None:
    model = _model(folder).eval()
    fuse_adapters(model)
    attention = model.base_model.model.model.layers[0].self_attn
    before = model(IDS).logits
    attention.k_proj.merge()
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-3, atol=1e-4)
    attention.k_proj.unmerge()
    assert torch.equal(model(IDS).logits, before)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"]))
    attention.v_proj.set_adapter("other")
    mixed = model(IDS).logits
    for layer in _layers(model):
        layer.shared = None
    torch.testing.assert_close(model(IDS).logits, mixed, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        base = model(IDS).logits
    assert not torch.equal(base, before)


def test_siblings_with_different_inputs_run_apart(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model(folder)
    fuse_adapters(model)
    attention = model.base_model.model.model.layers[0].self_attn
    x, other = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    with caplog.at_level(logging.WARNING):
        attention.q_proj(x)
        k = attention.k_proj(other)
    assert "different inputs" in caplog.text and attention.q_proj.shared.dissolved
    assert torch.equal(k, attention.k_proj.alone(other, "default"))
    v = attention.v_proj(x)  # without its turn, alone
    assert torch.equal(v, attention.v_proj.alone(x, "default"))


def test_a_copy_has_groups_of_its_own(folder: Path) -> None:
    model = _model(folder).eval()
    fuse_adapters(model)
    twin = copy.deepcopy(model)
    theirs = _layers(twin)
    assert {id(m) for layer in theirs if layer.shared for m in layer.shared.members} <= {id(m) for m in theirs}
    logits = model(IDS).logits
    assert torch.equal(twin(IDS).logits, logits)
    with torch.no_grad():
        for layer in theirs:
            layer.lora_B["default"].weight.zero_()
    assert torch.equal(model(IDS).logits, logits) and not torch.equal(twin(IDS).logits, logits)


def test_a_forward_that_was_broken_off_leaves_nothing_to_copies_or_to_the_next_step(folder: Path) -> None:
    model, calm = _model(folder), _model(folder)
    for each in (model, calm):
        fuse_adapters(each)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.base_model.model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    handle.remove()
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    wanted = _gradients(calm)
    for each in (model, copy.deepcopy(model), torch.load(kept, weights_only=False)):
        assert all(torch.equal(a, b) for a, b in zip(_gradients(each), wanted, strict=True))
