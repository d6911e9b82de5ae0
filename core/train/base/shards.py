"""Weights of a model in safetensors files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 * 2**30
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
    tensor and may raise. `metadata`: what the header of every file says beside."""
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
        shard[name] = tensor
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
