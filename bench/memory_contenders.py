"""Who takes part in bench/memory.py: one model with LoRA r 16 on all linear layers, held in different ways.

resident      all weights on the device
checkpointed  the same with torch's non-reentrant checkpoints, block by block
host          frozen blocks in host memory, streamed through slots
disk          frozen blocks in files, streamed through slots
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.train.batch import IGNORE_INDEX, Batch
from core.train.engine import Engine, build_engine
from core.train.memory.streaming.block_image import load_from_disk
from core.train.memory.streaming.stream import StreamedModel, stream_from_files, stream_from_host
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions
from core.train.stages.sft import SupervisedFineTuning

WAYS = ("resident", "checkpointed", "host", "disk")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Contender:
    engine: Engine
    streamed: StreamedModel | None
    held: int = 0
    """Bytes on a GPU that its weights, adapters and slots take."""

    def step(self, ids: Tensor) -> tuple[float, float]:
        """(seconds, loss before it) of forward, backward and AdamW."""
        rows, length = ids.shape
        labels = ids.clone()
        labels[:, 0] = IGNORE_INDEX
        batch = Batch(ids, labels, (length,) * rows, rows * (length - 1))
        device = self.engine.device
        wait(device)
        began = time.perf_counter()
        loss = self.forward(batch)
        self.engine.backward(loss)
        self.engine.step()
        wait(device)
        return time.perf_counter() - began, float(loss.detach())

    def forward(self, batch: Batch) -> Tensor:
        """Mean loss of the label tokens of a batch."""
        return self.engine.forward(batch, SupervisedFineTuning().loss, {"label_tokens": batch.label_tokens}).total

    def resident_share(self) -> dict[str, float]:
        """Of the frozen bytes of all blocks, those that are on the device: the slots as they were allocated, and what
        of a block is not streamed (norms)."""
        assert self.streamed is not None
        slots = sum(slot.buffer.untyped_storage().nbytes() for slot in self.streamed.cache.slots)
        moved = {place.tensor.data_ptr() for block in self.streamed.blocks for place in block.places}
        staying = {
            tensor.data_ptr(): tensor.nbytes  # a table that all packed layers share counts once
            for block in self.streamed.blocks
            for tensor in [*block.module.parameters(), *block.module.buffers()]
            if tensor.data_ptr() not in moved and not tensor.requires_grad
        }
        stays = sum(staying.values())
        blocks = sum(block.nbytes for block in self.streamed.blocks) + stays
        return {"slot_bytes": slots, "stays_bytes": stays, "block_bytes": blocks, "share": (slots + stays) / blocks}


def contender(
    how: str, folder: Path, device: torch.device, options: QuantOptions | None, cache: Path, *, slots: int, r: int = 16
) -> Contender:
    """`options` None: bf16. `cache`: where images of blocks and packed weights go."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    files: tuple[Any, Any] | None = None
    model: Any
    if how == "disk":
        model, _, *found = load_from_disk(folder, torch.bfloat16, options, cache)
        files = found[0], found[1]
    elif options is None:
        model = load_model(folder, torch.bfloat16)
    else:
        model, _ = load_quantized(folder, torch.bfloat16, options, cache)
    torch.manual_seed(0)
    model = adapt_lora(model, LoRA(r=r, lora_alpha=2.0 * r), autocast=True)
    if options is not None:
        fuse_adapters(model)
    streamed = None
    match how:
        case "host":
            streamed = stream_from_host(model, device, slots=slots)
        case "disk":
            assert files is not None
            streamed = stream_from_files(model, *files, device, slots=slots)
        case "resident" | "checkpointed":
            model.to(device)
        case _:
            raise ValueError(how)
    if how == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = build_engine(model, AdamW(learning_rate=1e-4), device=device, autocast=torch.bfloat16)
    held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    return Contender(engine, streamed, held)
