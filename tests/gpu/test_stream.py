"""Streamed blocks on a GPU: what the allocator has out at once, copies that run while blocks compute, equal weights."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from core.train.kernels.scratch import clear_scratch
from core.train.memory.streaming.block_image import load_from_disk
from core.train.memory.streaming.block_source import HostBlocks
from core.train.memory.streaming.blocks import lay_out
from core.train.memory.streaming.stream import StreamedModel, stream_from_files, stream_from_host
from core.train.quant.targets import QuantOptions
from tests.support import blocks as support
from tests.support.small_llama import save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and the allocator are a GPU's")
BLOCKS = 16
ROWS, TOKENS = 8, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 50 MB in bfloat16."""
    return save(
        tmp_path_factory.mktemp("llama"), torch.bfloat16, hidden_size=1024, intermediate_size=4096,
        num_hidden_layers=BLOCKS, num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip


def streams(
    folder: Path, cache: Path, options: Any, how: str, slots: int, device: torch.device
) -> tuple[Any, StreamedModel]:
    if how == "host":
        model = support.resident(folder, options)
        return model, stream_from_host(model, device, slots=slots)
    model, _, found, files = load_from_disk(folder, torch.bfloat16, options, cache)
    model = support.adapt(model, options is not None)
    return model, stream_from_files(model, found, files, device, slots=slots)


def step(model: Any, device: torch.device) -> None:
    ids = torch.randint(0, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5)).to(device)
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH):  # the others' backward adds up in no fixed order
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [None, QuantOptions("nf4")], ids=["bf16", "nf4"])
@pytest.mark.parametrize("how", ["host", "disk"])
def test_gradients_are_those_of_the_resident_model(
    folder: Path, tmp_path: Path, device: torch.device, options: Any, how: str
) -> None:
    plain = support.resident(folder, options).to(device)
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step(plain, device)
    wanted = gradients(plain)
    del plain
    for slots in (1, 2, 3):
        model, stream = streams(folder, tmp_path, options, how, slots, device)
        for _ in range(2):  # the second finds slots as the first has left them
            model.zero_grad()
            step(model, device)
            found = gradients(model)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        stream.close()


@pytest.mark.parametrize("options", [None, QuantOptions("nf4")], ids=["bf16", "nf4"])
def test_the_allocators_peak_is_within_the_bound(
    folder: Path, tmp_path: Path, device: torch.device, options: Any
) -> None:
    """What stays, the slots, what a resident run with checkpoints makes, and the allocator's rounding."""
    plain = support.resident(folder, options)
    blocks = lay_out(plain)
    all_blocks, largest = sum(b.nbytes for b in blocks), max(b.nbytes for b in blocks)
    del blocks  # they hold the model
    plain.to(device)
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    resident = _peak(plain, device)
    del plain
    for slots in (1, 2):
        model, stream = streams(folder, tmp_path, options, "host", slots, device)
        streamed = _peak(model, device)
        assert streamed <= resident - all_blocks + slots * largest + (64 << 20)
        assert streamed < resident - all_blocks / 2
        stream.close()
        del model, stream


def _peak(model: Any, device: torch.device) -> int:
    gc.collect()
    clear_scratch()  # it holds what the last model unpacked
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step(model, device)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def test_copies_run_while_blocks_compute(folder: Path, tmp_path: Path, device: torch.device) -> None:
    """By the profiler's account of one step: of the time that copies to the device take, most lies within kernels."""
    model, stream = streams(folder, tmp_path, None, "host", 2, device)
    assert isinstance(stream.source, HostBlocks) and stream.source.pinned
    step(model, device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step(model, device)
        torch.cuda.synchronize(device)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            copy = "memcpy htod" in event.name.lower() or "copyhosttodevice" in event.name.lower()
            spans[copy].append((event.time_range.start, event.time_range.end))
    copies = [span for span in spans[True] if span[1] - span[0] > 100]  # µs: a block, not a batch
    assert len(copies) >= BLOCKS
    together = sum(_within(span, spans[False]) for span in copies)
    assert together > 0.5 * sum(end - start for start, end in copies)
    stream.close()


def _within(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span lies within others, which do not overlap one another (one stream computes)."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def test_the_host_does_not_wait_for_copies_from_its_memory(folder: Path, tmp_path: Path, device: torch.device) -> None:
    model, stream = streams(folder, tmp_path, None, "host", 2, device)
    step(model, device)
    torch.cuda.synchronize(device)
    before, began = stream.counts.waited, time.perf_counter()
    step(model, device)
    torch.cuda.synchronize(device)
    assert stream.counts.waited - before < 0.1 * (time.perf_counter() - began)
    stream.close()
