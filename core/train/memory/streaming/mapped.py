"""Tensors of safetensors files, mapped read-only: they take no memory of the process's own.

Format: eight bytes little-endian length, that much JSON, then the data (https://huggingface.co/docs/safetensors). The
library itself maps files privately and writable, which counts as the process's data in full, as if they were loaded
(RLIMIT_DATA, setrlimit(2)).
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ModelError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Where:
    """A tensor in a file."""

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    end: int


class MappedTensors:
    """All tensors of some files, by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        """ModelError when a file is no whole safetensors file."""
        self._maps: list[mmap.mmap] = []
        self._where: dict[str, Where] = {}
        for number, path in enumerate(files):
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            try:
                self._where |= dict(_header(number, self._maps[-1]))
            except (ValueError, KeyError, TypeError, struct.error) as error:
                raise ModelError(f"{path.name} is truncated or damaged: {error!r}", field="model") from error

    def names(self) -> list[str]:
        return list(self._where)

    def where(self, name: str) -> Where:
        return self._where[name]

    def __getitem__(self, name: str) -> Tensor:
        """Read-only, and only as good as the file: copy what is to last."""
        at = self._where[name]
        if at.start == at.end:
            return torch.empty(at.shape, dtype=at.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._maps[at.file], dtype=torch.uint8, offset=at.start, count=at.end - at.start)
        if at.start % at.dtype.itemsize:
            flat = flat.clone()
        return flat.view(at.dtype).view(at.shape)

    def items(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self[name]


def _header(number: int, mapped: mmap.mmap) -> Iterator[tuple[str, Where]]:
    (length,) = struct.unpack("<Q", mapped[:8])
    begin = 8 + length
    if begin > len(mapped):
        raise ValueError("its header is longer than the file")
    for name, about in json.loads(mapped[8:begin]).items():
        if name == "__metadata__":
            continue
        start, end = (begin + int(place) for place in about["data_offsets"])
        if not begin <= start <= end <= len(mapped):
            raise ValueError(f"{name} is not in it")
        yield name, Where(number, DTYPES[about["dtype"]], tuple(map(int, about["shape"])), start, end)
