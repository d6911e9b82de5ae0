"""Optimizer offload on a GPU: what the allocator has out at once, an update that runs beside the next forward, equal
gradients, and weights equal up to the rounding of two kernels."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from core.spec.axes.optimizer import AdamW
from core.train.batch import Batch
from core.train.checkpoint import engine_state
from core.train.engine import Engine, build_engine
from core.train.memory.offload.optimizer import OptimizerOffload
from tests.support.losses import summed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and the allocator are a GPU's")
BLOCKS = 12
RATE = 1e-3
ROWS, TOKENS = 4, 512


def engine(device: torch.device, offload: bool, autocast: torch.dtype | None, pinned: bool = True) -> Engine:
    """Blocks of 17 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=BLOCKS, num_attention_heads=16,
        num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).float().requires_grad_(True)
    held = OptimizerOffload(model, device, narrow=autocast, pinned=pinned) if offload else None
    model.to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return build_engine(
        model, AdamW(learning_rate=RATE, weight_decay=0.01), device=device, autocast=autocast, updates=held
    )


def batch(seed: int) -> Batch:
    ids = torch.randint(0, 4096, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids, labels, (TOKENS,) * ROWS, ROWS * (TOKENS - 1))


def window(one: Engine, number: int) -> list[float]:
    losses = []
    for micro in range(2):
        here = batch(2 * number + micro)
        with sdpa_kernel(SDPBackend.MATH):  # the others' backward adds up in no fixed order
            loss = summed(one, here)
            one.backward(loss.total / here.label_tokens / 2)
        losses.append(loss.total.item())
    return losses


def close(one: Engine) -> None:
    assert isinstance(one.updates, OptimizerOffload)
    one.updates.close()


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("pinned", [True, False])
def test_gradients_are_the_residents_and_weights_are_after_a_step_but_for_rounding(
    device: torch.device, autocast: torch.dtype | None, pinned: bool
) -> None:
    resident, offloaded = engine(device, False, autocast), engine(device, True, autocast, pinned)
    assert window(resident, 0) == window(offloaded, 0)
    offloaded.updates.synchronize()
    for name, master in offloaded.trained_parameters.items():
        assert master.grad is not None and torch.equal(master.grad, resident.trained_parameters[name].grad.cpu()), name
    assert all(p.grad is None for p in offloaded.model.parameters())
    norms = [float(each.step().grad_norm) for each in (resident, offloaded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    offloaded.updates.synchronize()
    shown = dict(offloaded.model.named_parameters())
    for name, master in offloaded.trained_parameters.items():
        wanted = resident.trained_parameters[name].detach().cpu()
        assert bool(((master.detach() - wanted).abs() <= 1e-6 * wanted.abs() + 1e-4 * RATE).all()), name
        assert torch.equal(shown[name].cpu(), master.detach().to(shown[name].dtype)), name
    later = [window(each, 1) for each in (resident, offloaded)]
    assert later[0] == pytest.approx(later[1], rel=1e-3)
    close(offloaded)


def test_the_allocators_peak_is_weights_one_blocks_gradients_and_activations(device: torch.device) -> None:
    peaks, starts, weights, narrowed, block = {}, {}, 0, 0, 0
    for off in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        here = engine(device, off, torch.bfloat16)
        weights = sum(p.numel() for p in here.model.parameters())
        starts[off] = torch.cuda.memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        for number in range(2):
            window(here, number)
            if off:  # a resident step would add AdamW's state: it may have all of that for itself
                here.step()
        here.updates.synchronize()
        torch.cuda.synchronize(device)
        peaks[off] = torch.cuda.max_memory_allocated(device) - before
        if off:
            assert isinstance(here.updates, OptimizerOffload)
            narrowed = here.updates.narrowed
            block = max(p.numel() for p in here.model.parameters()) * 4 + here.updates._at_once
            assert torch.cuda.memory_allocated(device) - before <= starts[off] + (16 << 20)
            close(here)
        del here
    made = peaks[False] - starts[False] - 4 * weights
    assert starts[True] <= starts[False] - 2 * narrowed + (16 << 20)
    assert peaks[True] <= starts[True] + made + block + (32 << 20)
    assert peaks[True] < 0.5 * peaks[False]


def test_the_update_runs_beside_the_next_forward(device: torch.device) -> None:
    """When the first block begins to compute, the host has not yet updated the last."""
    here = engine(device, True, torch.bfloat16)
    held = here.updates
    assert isinstance(held, OptimizerOffload) and len(held.units) == BLOCKS + 2
    window(here, 0)
    here.step()
    here.updates.synchronize()  # the optimizer's state is made in the first step
    window(here, 1)
    undone: list[bool] = []

    def look(*_: Any) -> None:
        undone.append(held.units[-1].update is not None and not held.units[-1].update.done())

    hook = held._model.model.layers[0].register_forward_hook(look)  # type: ignore[union-attr,index]
    here.step()
    began = time.perf_counter()
    window(here, 2)
    hook.remove()
    assert undone[0], f"all was updated before the first block computed ({time.perf_counter() - began:.2f} s)"
    close(here)


def test_a_checkpoint_in_mid_window_is_gone_on_with_to_the_bit(device: torch.device, tmp_path: Any) -> None:
    whole = engine(device, True, torch.bfloat16)
    window(whole, 0)
    whole.step()
    window(whole, 1)
    engine_state.save(whole, tmp_path)
    again = engine(device, True, torch.bfloat16)
    engine_state.load(again, tmp_path)
    for each in (whole, again):
        each.step()
        window(each, 2)
        each.updates.synchronize()
    for name, master in whole.trained_parameters.items():
        other = again.trained_parameters[name]
        assert torch.equal(master, other) and torch.equal(master.grad, other.grad), name  # type: ignore[arg-type]
    close(whole)
    close(again)
