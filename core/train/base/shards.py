"""Weights of a model in safetensors files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 * 2**30
LARGE_BYTES = 2**18
"""Bytes from which a tensor waits for its shard on the disk."""
INDEX_FILE = "model.safetensors.index.json"


def write_shards(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    between: Callable[[], None],
    shard_bytes: int = SHARD_BYTES,
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write tensors as `model.safetensors`, or as several such files with their index. `between` runs before each
    tensor and may raise. `metadata`: what the header of every file says beside. Whatever `shard_bytes` is, memory holds
    one large tensor at a time."""
    shard: dict[str, Tensor] = {}
    names: list[list[str]] = []
    size = total = 0

    def close() -> None:
        save_file(shard, folder / f"shard-{len(names)}", metadata={"format": "pt", **metadata})
        names.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        between()
        if shard and size + tensor.nbytes > shard_bytes:
            close()
            size = 0
        shard[name] = _on_disk(tensor, folder) if tensor.nbytes >= LARGE_BYTES else tensor
        size += tensor.nbytes
        total += tensor.nbytes
    close()
    if len(names) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, here in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(here, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """The same numbers in a file below `folder` that goes with the tensor. The kernel may drop its pages at any time,
    and no limit on a process counts them. Written before it is mapped: a full disk is an OSError, and no SIGBUS."""
    path = folder / ".waiting"
    try:
        with path.open("wb", buffering=0) as file:
            left = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            while left:
                left = left[file.write(left) :]
        mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        path.unlink(missing_ok=True)
    return mapped.view(tensor.shape)
