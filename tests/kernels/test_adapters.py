"""PEFT over packed weights: fused against PEFT's own forward, merge, several adapters, DoRA, checkpointing, compile."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.train.export.merge import write_merged
from core.train.quant.adapters import FusedLoraLinear, fuse_adapters
from core.train.quant.linear import QuantLinear
from core.train.quant.model import load_quantized
from tests.support import small_llama
from tests.support.small_llama import IDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama.save(tmp_path_factory.mktemp("base"), attention_bias=True)


def _model(folder: Path, *, dtype: torch.dtype = torch.float32, fuse: bool = True, **lora: Any) -> Any:
    model = small_llama.adapted(folder, dtype, **lora)
    if fuse:
        fusion = fuse_adapters(model)
        assert (fusion.fused == 14 and fusion.grouped == 10) or lora
    return model


def _gradients(model: Any, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_fused_equals_pefts_own_forward(folder: Path, rslora: bool) -> None:
    plain, fused = _model(folder, fuse=False, use_rslora=rslora), _model(folder, use_rslora=rslora)
    assert isinstance(fused.base_model.model.model.layers[0].mlp.up_proj, FusedLoraLinear)
    assert list(fused.state_dict()) == list(plain.state_dict())
    (logits, grads), (logits2, grads2) = _gradients(plain.train()), _gradients(fused.train())
    torch.testing.assert_close(logits2, logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == grads2.keys() and len(grads) == 28
    for name in grads:
        torch.testing.assert_close(grads2[name], grads[name], rtol=1e-3, atol=1e-6)


def test_dropout_draws_as_pefts_own_forward(folder: Path) -> None:
    plain, fused = _model(folder, fuse=False, lora_dropout=0.2), _model(folder, lora_dropout=0.2)
    torch.manual_seed(5)
    _, grads = _gradients(plain.train())
    torch.manual_seed(5)
    _, grads2 = _gradients(fused.train())
    for name in grads:
        torch.testing.assert_close(grads2[name], grads[name], rtol=1e-3, atol=1e-6)
    fused.eval()
    assert torch.equal(fused(IDS).logits, fused(IDS).logits)


def test_bfloat16_autocast_with_float32_adapters(folder: Path) -> None:
    plain, fused = _model(folder, dtype=torch.bfloat16, fuse=False), _model(folder, dtype=torch.bfloat16)
    results = []
    for model in (plain.train(), fused.train()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(_gradients(model))
    (logits, grads), (logits2, grads2) = results
    assert (logits - logits2).float().norm() / logits.float().norm() < 0.02
    for name, grad in grads2.items():
        assert grad.dtype == torch.float32
        assert (grad - grads[name]).norm() / grads[name].norm() < 0.1


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_bit(folder: Path, reentrant: bool) -> None:
    model = _model(folder, lora_dropout=0.1).train()
    torch.manual_seed(0)
    _, without = _gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.manual_seed(0)
    _, grads = _gradients(model)
    assert grads.keys() == without.keys()
    assert all(torch.equal(grads[name], without[name]) for name in grads)


def test_merge_adds_in_float32_and_unmerge_is_exact(folder: Path) -> None:
    model = _model(folder, dtype=torch.bfloat16).eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    packed = layer.base_layer.packed.clone()
    before = model(IDS).logits
    delta = layer.get_delta_weight("default")
    wanted = (layer.base_layer.dense_weight(torch.float32) + delta.float()).to(torch.bfloat16)
    model.merge_adapter()
    assert torch.equal(layer.base_layer.weight, wanted) and not isinstance(layer.base_layer, QuantLinear)
    merged = model(IDS).logits
    assert (merged - before).float().norm() / before.float().norm() < 0.02
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.packed, packed) and torch.equal(model(IDS).logits, before)
    plain = model.merge_and_unload()
    assert not any(isinstance(m, (QuantLinear, FusedLoraLinear)) for m in plain.modules())
    assert torch.equal(plain(IDS).logits, merged)


def test_merge_that_is_broken_leaves_the_packed_base(folder: Path) -> None:
    model = _model(folder)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="broken"):
        layer.merge(safe_merge=True)
    assert isinstance(layer.base_layer, QuantLinear) and not layer.merged


def test_unfused_merge_is_refused_not_lost(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="packed and cannot be written"):
        _model(folder, fuse=False).merge_and_unload()


def test_several_adapters_switch_fused_and_add_up_unfused(folder: Path) -> None:
    model = _model(folder).eval()
    first = model(IDS).logits
    torch.manual_seed(9)
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"]))
    fuse_adapters(model)
    nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["other"].weight)
    assert torch.equal(model(IDS).logits, first)
    model.set_adapter("other")
    second = model(IDS).logits
    assert not torch.equal(second, first)
    model.base_model.set_adapter(["default", "other"])
    fusion = fuse_adapters(model)
    assert fusion.unfused == {"several active adapters": 2} and fusion.fused == 12
    assert not torch.equal(model(IDS).logits, first)
    with model.disable_adapter():
        base = model(IDS).logits
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, first) and not torch.equal(base, first)


def _magnified(folder: Path, dtype: torch.dtype = torch.float32, fuse: bool = True, **lora: Any) -> Any:
    """With factors that are not zero, and magnitudes that are not the norms."""
    model = _model(folder, dtype=dtype, fuse=False, use_dora=True, **lora)
    draw = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw)
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.rand(parameter.shape, generator=draw)
    if fuse:
        assert fuse_adapters(model).fused == 14
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dora_equals_pefts_own_forward(folder: Path, dropout: float) -> None:
    """Answers and all gradients, of an input too; float32. Dropout draws the same numbers."""
    plain = _magnified(folder, fuse=False, lora_dropout=dropout)
    fused = _magnified(folder, lora_dropout=dropout)
    assert list(fused.state_dict()) == list(plain.state_dict())
    found = []
    for model in (plain, fused):
        torch.manual_seed(5)
        logits, grads = _gradients(model.train())
        layer = model.base_model.model.model.layers[0].mlp.up_proj
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer.eval()(x).square().sum().backward()
        found.append((logits, grads | {"x": x.grad}))
    (logits, grads), (logits2, grads2) = found
    torch.testing.assert_close(logits2, logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == grads2.keys() and sum("magnitude" in name for name in grads) == 14
    for name in grads:
        torch.testing.assert_close(grads2[name], grads[name], rtol=1e-3, atol=1e-5, msg=name)


def test_dora_in_bfloat16_is_nearer_to_float32_than_pefts_own(folder: Path) -> None:
    """Whose norms are rounded; and with factors of zero it begins as the base, to the bit."""
    exact = _magnified(folder).eval()(IDS).logits
    off = []
    for fuse in (True, False):
        model = _magnified(folder, torch.bfloat16, fuse).eval()
        with torch.autocast("cpu", torch.bfloat16):
            off.append(float((model(IDS).logits.float() - exact).norm() / exact.norm()))
    assert off[0] < 0.05 and off[0] < 1.1 * off[1], off
    fresh = _model(folder, dtype=torch.bfloat16, fuse=False, use_dora=True)
    for name, parameter in fresh.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    fuse_adapters(fresh)
    with torch.autocast("cpu", torch.bfloat16):
        with_it = fresh.eval()(IDS).logits
        with fresh.disable_adapter():
            assert torch.equal(fresh(IDS).logits, with_it)


def test_dora_multiplies_no_identity(folder: Path) -> None:
    """Nothing square of a layer's width is made, and the weight is unpacked whole only for its products."""
    model = _magnified(folder).train()
    widths = {m.in_features for m in model.modules() if isinstance(m, FusedLoraLinear)}

    class Seen(TorchDispatchMode):
        eyes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.eyes += func.overloadpacket is torch.ops.aten.eye
            return func(*args, **(kwargs or {}))

    assert widths
    for each, wanted in ((model, 0), (_magnified(folder, fuse=False).train(), 14)):
        with Seen() as seen:
            each(input_ids=IDS, labels=IDS).loss.backward()
        assert seen.eyes == wanted


def test_dora_merges_into_what_it_gives(folder: Path) -> None:
    model = _magnified(folder).eval()
    before = model(IDS).logits
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, before, rtol=1e-3, atol=1e-4)


def test_biases_train_in_the_base_fused_and_in_lora_b_in_pefts_forward(folder: Path) -> None:
    fused = _model(folder, bias="all")
    assert fuse_adapters(fused).fused == 14
    plain = _model(folder, fuse=False, bias="all")
    (_, grads), (_, grads2) = _gradients(plain.train()), _gradients(fused.train())
    assert sum(name.endswith("q_proj.base_layer.bias") for name in grads2) == 2 and grads.keys() == grads2.keys()
    for name in grads:
        torch.testing.assert_close(grads2[name], grads[name], rtol=1e-3, atol=1e-6)
    in_b = _model(folder, lora_bias=True, target_modules=["q_proj", "o_proj"])
    assert fuse_adapters(in_b).unfused == {"bias in lora_B": 4}
    before = in_b.eval()(IDS).logits
    torch.testing.assert_close(in_b.merge_and_unload()(IDS).logits, before, rtol=1e-3, atol=1e-4)


def test_saved_adapter_and_deep_copy(folder: Path, tmp_path: Path) -> None:
    model = _model(folder).eval()
    logits = model(IDS).logits
    assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
    model.save_pretrained(tmp_path)
    base, _ = load_quantized(folder, torch.float32)
    again = PeftModel.from_pretrained(base, tmp_path)
    fuse_adapters(again)
    assert torch.equal(again.eval()(IDS).logits, logits)


def test_several_adapters_merge_into_what_they_give_together(folder: Path) -> None:
    """One over all layers, one over two of them with another rank; each alone, and both."""
    model = _model(folder).eval()
    torch.manual_seed(9)
    more = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", more)
    fuse_adapters(model)
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.05)
    packed = {name: m.packed.clone() for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    for adapters in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(adapters)
        wanted = model(IDS).logits
        model.merge_adapter(adapter_names=adapters)
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
        model.unmerge_adapter()
        assert torch.equal(model(IDS).logits, wanted)
    again = {name: m.packed for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert again.keys() == packed.keys() and all(torch.equal(again[name], packed[name]) for name in packed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_model_with_adapters_moves_to_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Everything but what is packed follows; it computes in the new dtype, and what a copy does stays in the copy."""
    model = _model(folder).eval()
    before = model(IDS).logits
    twin = copy.deepcopy(model).to(dtype)
    logits = twin(IDS).logits
    assert logits.dtype == dtype
    bits = {torch.float64: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}
    assert (logits - before).double().norm() / before.double().norm() < bits[dtype]
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(ours, QuantLinear):
            assert torch.equal(ours.packed, theirs.packed) and ours.absmax.dtype == theirs.absmax.dtype
    assert torch.equal(model(IDS).logits, before)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        twin.base_model.model.model.layers[0].self_attn.q_proj.base_layer.packed.zero_()
    assert layer.base_layer.packed.any() and torch.equal(model(IDS).logits, before)


def test_compiles_whole(folder: Path) -> None:
    model = _model(folder).train()
    layer = model.base_model.model.model.layers[0].mlp
    x = torch.randn(1, 7, 64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, y2 = layer(x), compiled(x)
    torch.testing.assert_close(y2, y)
    trained = [p for p in layer.parameters() if p.requires_grad]
    for a, b in zip(
        torch.autograd.grad(y2.sum(), [x, *trained]), torch.autograd.grad(y.sum(), [x, *trained]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_writing_that_is_broken_off_leaves_no_layer_merged(folder: Path, tmp_path: Path) -> None:
    """Checked while the exception is still held: its frames keep a generator that nobody closed."""
    model = _model(folder).eval()
    before, calls = model(IDS).logits, iter(range(7))

    def stop() -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        write_merged(model, tmp_path / "merged", model_dir=folder, dtype=torch.float32, between=stop)
    assert caught.tb and torch.equal(model(IDS).logits, before)
    assert not any(layer.merged or not isinstance(layer.base_layer, QuantLinear) for layer in _lora_layers(model))


def _lora_layers(model: nn.Module) -> list[FusedLoraLinear]:
    return [module for module in model.modules() if isinstance(module, FusedLoraLinear)]
