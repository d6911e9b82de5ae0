"""What a job needs and what is free, for `core.plan.stream.settle`: from config.json and the headers of the model's
files, before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch

from core.plan.headers import INDEX_FILE, Tensor, read_header, read_json, unpacked, weight_files
from core.plan.stream import Decision, Free, Need, settle
from core.spec.job import JobSpec
from core.spec.runtime import AutoStream
from core.spec.training import NF4, Full, Int8, LoRA, NoQuantization, QLoRA
from core.train.limits import largest_pass
from core.train.load import packed_as
from core.train.memory.available import available_bytes
from core.train.placement import Placement

OF_BLOCK = re.compile(r"^(?P<list>.*?)\.(?P<number>\d+)\.")
LOGITS_BYTES = 1 << 30
"""The loss works on chunks of logits: never more than about this."""
PER_TRAINED = 16
"""Bytes of a trained float32 with its gradient and AdamW's two moments."""


def choose_stream(
    spec: JobSpec, folder: Path, placement: Placement, longest: int, memory_bytes: int | None = None
) -> Decision:
    """How this run holds its blocks. `longest`: tokens of its longest row. `memory_bytes`: what it may count on where
    device and host are one memory; None: what is free."""
    need = None
    if isinstance(spec.memory.stream, AutoStream) and not isinstance(spec.method, Full):
        need = measure(spec, folder, placement.weights, longest)
    return settle(spec.memory.stream, need, _free(placement.device, memory_bytes))


def _free(device: torch.device, most: int | None) -> Free:
    host = available_bytes()
    if device.type == "cuda":
        return Free(device=torch.cuda.mem_get_info(device)[0], host=host, one_memory=False)
    known = [count for count in (host, most) if count is not None]
    return Free(device=min(known, default=None), host=host, one_memory=True)


@dataclass(slots=True)
class _Sizes:
    blocks: dict[int, float]
    """Bytes of each."""
    outside: float
    sides: int
    """Rows and columns of the blocks' matrices, all added up: r times as many numbers are trained beside them."""


def measure(spec: JobSpec, folder: Path, dtype: torch.dtype, longest: int) -> Need | None:
    """An estimate; None where the files have no numbered blocks."""
    config = read_json(folder / "config.json", field="model")
    sizes = _sizes(_tensors(folder), 8 * dtype.itemsize, _packed_bits(spec, folder))
    if sizes is None:
        return None
    text = config.get("text_config") or config
    hidden, inner = _number(text, "hidden_size", "n_embd"), _number(text, "intermediate_size", "n_inner")
    tokens, _ = largest_pass(spec, longest)
    inside = tokens * (12 * hidden + 4 * (inner or 4 * hidden)) * max(2, dtype.itemsize)
    inputs = tokens * hidden * max(2, dtype.itemsize) * len(sizes.blocks)
    logits = min(LOGITS_BYTES, tokens * _number(text, "vocab_size") * 8)
    kept = inputs + inside + logits
    rank = spec.method.r if isinstance(spec.method, LoRA | QLoRA) else 0
    return Need(
        blocks=round(sum(sizes.blocks.values())),
        largest_block=round(max(sizes.blocks.values())),
        outside=round(sizes.outside),
        trained=sizes.sides * rank * PER_TRAINED,
        working=kept if spec.memory.gradient_checkpointing else inside * len(sizes.blocks) + logits,
        working_streamed=kept,
        of=len(sizes.blocks),
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    names = [path.name for path in folder.iterdir()]
    index = json.loads((folder / INDEX_FILE).read_bytes()) if INDEX_FILE in names else None
    found: dict[str, Tensor] = {}
    for shard in weight_files(names, index, field="model"):
        found |= read_header(folder / shard, field="model")
    return unpacked(found)


def _packed_bits(spec: JobSpec, folder: Path) -> float | None:
    """Of an element of a packed weight; None where nothing is packed."""
    match spec.quantization:
        case NF4(double=double):
            return 4.127 if double else 4.5
        case Int8(block_size=block):
            return 8 + 32 / block
        case None | NoQuantization():
            return None if packed_as(folder) is None else 4.5
        case _ as never:
            assert_never(never)


def _sizes(tensors: dict[str, Tensor], dense_bits: float, packed_bits: float | None) -> _Sizes | None:
    """The blocks are those of the list with most parameters."""
    lists: dict[str, int] = {}
    for name, tensor in tensors.items():
        if (found := OF_BLOCK.match(name)) is not None:
            lists[found["list"]] = lists.get(found["list"], 0) + tensor.numel
    if not lists:
        return None
    blocks: dict[int, float] = {}
    outside, sides = 0.0, 0
    main = max(lists, key=lambda name: lists[name])
    for name, tensor in tensors.items():
        found = OF_BLOCK.match(name)
        matrix = len(tensor.shape) >= 2 or tensor.dtype == "NF4"
        if found is None or found["list"] != main or not matrix:
            outside += tensor.numel * dense_bits / 8
            continue
        number = int(found["number"])
        blocks[number] = blocks.get(number, 0.0) + tensor.numel * (packed_bits or dense_bits) / 8
        sides += sum(tensor.shape[-2:]) if len(tensor.shape) >= 2 else 2 * round(tensor.numel**0.5)
    return _Sizes(blocks, outside, sides)


def _number(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
