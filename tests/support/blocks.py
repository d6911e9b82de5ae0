"""A small Llama of several blocks with adapters that do something, and a few backward passes through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from core.spec.axes.method import LoRA
from core.train.memory.streaming.block_image import load_from_disk
from core.train.memory.streaming.stream import StreamedModel, stream_from_files, stream_from_host
from core.train.methods.lora import adapt_lora
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(3))


def adapt(model: Any, packed: bool, **lora: Any) -> Any:
    torch.manual_seed(1)
    spec = LoRA(**{"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.1, **lora})
    adapted = adapt_lora(model, spec, autocast=True)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if packed:
        fuse_adapters(adapted)
    return adapted.train()


def resident(folder: Path, options: QuantOptions | None, **lora: Any) -> Any:
    if options is None:
        return adapt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), False, **lora)
    return adapt(load_quantized(folder, torch.bfloat16, options)[0], True, **lora)


def from_host(folder: Path, options: QuantOptions | None, slots: int, **lora: Any) -> tuple[Any, StreamedModel]:
    model = resident(folder, options, **lora)
    return model, stream_from_host(model, CPU, slots=slots)


def from_disk(
    folder: Path, cache: Path, options: QuantOptions | None, slots: int, **lora: Any
) -> tuple[Any, StreamedModel]:
    model, _, blocks, files = load_from_disk(folder, torch.bfloat16, options, cache)
    model = adapt(model, options is not None, **lora)
    return model, stream_from_files(model, blocks, files, CPU, slots=slots)


def backwards(model: Any, times: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the gradients they add up to, with the same dropout every time it is called."""
    model.zero_grad()
    torch.manual_seed(7)
    losses = []
    for _ in range(times):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    """To the bit."""
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )
