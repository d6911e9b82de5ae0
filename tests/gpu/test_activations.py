"""What blocks keep on a GPU: the allocator's peak falls from way to way, copies overlap, gradients are the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from core.plan.constants import INPUTS_IN_FLIGHT
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.policy import checkpoint_blocks
from core.train.memory.offload.activations import ActivationOffload
from core.train.memory.streaming.stream import stream_from_host
from core.train.quant.targets import QuantOptions
from tests.support import blocks as support
from tests.support.small_llama import save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and the allocator are a GPU's")
BLOCKS, HIDDEN = 16, 1024
ROWS, TOKENS = 8, 512
INPUT = ROWS * TOKENS * HIDDEN * 2
OPTIONS = pytest.mark.parametrize("options", [None, QuantOptions("nf4")], ids=["bf16", "nf4"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("llama"), torch.bfloat16, hidden_size=HIDDEN, intermediate_size=4096,
        num_hidden_layers=BLOCKS, num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip


def forward(model: Any, device: torch.device) -> torch.Tensor:
    ids = torch.randint(0, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5)).to(device)
    torch.manual_seed(7)
    with torch.autocast("cuda", torch.bfloat16):
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):  # the others' backward adds up in no fixed order
        forward(model, device).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@OPTIONS
def test_gradients_are_those_of_the_whole_graph(folder: Path, device: torch.device, options: Any) -> None:
    plain = support.resident(folder, options).to(device)
    wanted = gradients(plain, device)
    unpinned = ActivationOffload(device, pinned=False)
    for policy in (
        CheckpointPolicy(selective=True),
        CheckpointPolicy(inputs=ActivationOffload(device)),
        CheckpointPolicy(selective=True, inputs=unpinned),
    ):
        model = support.resident(folder, options).to(device)
        checkpoint_blocks(model, policy)
        for _ in range(2):  # the second finds host memory as the first has left it
            found = gradients(model, device)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        if policy.inputs is not None:
            assert policy.inputs.counts.late == 0
            policy.inputs.close()


@OPTIONS
def test_streamed_blocks_keep_as_little(folder: Path, device: torch.device, options: Any) -> None:
    wanted = gradients(support.resident(folder, options).to(device), device)
    inputs = ActivationOffload(device)
    model = support.resident(folder, options)
    stream = stream_from_host(model, device, slots=2, policy=CheckpointPolicy(selective=True, inputs=inputs))
    for _ in range(2):
        found = gradients(model, device)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    stream.close()
    inputs.close()


@OPTIONS
def test_the_allocators_peak_falls_from_way_to_way(folder: Path, device: torch.device, options: Any) -> None:
    """none > selective > whole > offloaded, by what is accounted for at least."""
    away = ActivationOffload(device)
    ways = {
        "none": None,
        "selective": CheckpointPolicy(selective=True),
        "whole": CheckpointPolicy(),
        "offloaded": CheckpointPolicy(inputs=away),
    }
    kept: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for name, policy in ways.items():
        model = support.resident(folder, options).to(device)
        if policy is not None:
            checkpoint_blocks(model, policy)
        forward(model, device).backward()  # what is made once is there
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = forward(model, device)
        torch.cuda.synchronize(device)
        kept[name] = torch.cuda.memory_allocated(device) - before
        loss.backward()
        torch.cuda.synchronize(device)
        peaks[name] = torch.cuda.max_memory_allocated(device) - before
        del model, loss
    assert peaks["none"] > peaks["selective"] > peaks["whole"] > peaks["offloaded"], peaks
    gone = (BLOCKS - INPUTS_IN_FLIGHT - 1) * INPUT  # the first is a leaf of the graph, which holds it (PEFT)
    assert kept["whole"] - kept["offloaded"] == pytest.approx(gone, rel=0.05)
    assert peaks["whole"] - peaks["offloaded"] > 0.7 * gone
    away.close()


def test_copies_run_while_blocks_compute(folder: Path, device: torch.device) -> None:
    """By the profiler's account of one step: of the time that copies take, most lies within kernels."""
    model, inputs = support.resident(folder, None).to(device), ActivationOffload(device)
    checkpoint_blocks(model, CheckpointPolicy(inputs=inputs))
    forward(model, device).backward()
    assert inputs.pool.pinned
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        forward(model, device).backward()
        torch.cuda.synchronize(device)
    spans: dict[str, list[tuple[float, float]]] = {"out": [], "back": [], "kernel": []}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            out = "memcpy dtoh" in name or "copydevicetohost" in name
            back = "memcpy htod" in name or "copyhosttodevice" in name
            spans["out" if out else "back" if back else "kernel"].append((event.time_range.start, event.time_range.end))
    for way, least in (("out", BLOCKS), ("back", BLOCKS - INPUTS_IN_FLIGHT)):
        copies = [span for span in spans[way] if span[1] - span[0] > 50]  # µs: an input, not a number
        assert len(copies) >= least
        together = sum(_within(span, spans["kernel"]) for span in copies)
        assert together > 0.5 * sum(end - start for start, end in copies)
    inputs.close()


def _within(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span lies within others, which do not overlap one another (one stream computes)."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def test_a_backward_that_breaks_leaves_the_next_one_right(folder: Path, device: torch.device) -> None:
    wanted = gradients(support.resident(folder, None).to(device), device)
    model, inputs = support.resident(folder, None).to(device), ActivationOffload(device)
    checkpoint_blocks(model, CheckpointPolicy(inputs=inputs))
    weight = dict(model.named_parameters())["base_model.model.model.layers.7.mlp.up_proj.lora_A.default.weight"]

    def broken(grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook = weight.register_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        gradients(model, device)
    hook.remove()
    gc.collect()
    found = gradients(model, device)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    inputs.close()
