"""Which library reads each kind of quantised folder. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from core.spec.axes.export import AWQ, FP8, GPTQ, MXFP4, PackedExport, TorchAOInt4, TorchAOInt8
from core.tools import ToolSet, pinned


@dataclass(frozen=True, slots=True)
class Reader:
    """A library by which transformers loads a folder (read_program.py)."""

    tools: ToolSet
    """The set of libraries that it is in."""
    library: str

    @property
    def title(self) -> str:
        """The library with its version."""
        return f"{self.library} {pinned(self.tools, self.library)}"


def reader_of(item: PackedExport) -> Reader:
    """The reader of the folders of this kind."""
    match item:
        case FP8() | GPTQ() | AWQ() | MXFP4():
            return Reader("compressed", "compressed-tensors")
        case TorchAOInt8() | TorchAOInt4():
            return Reader("torchao", "torchao")
        case _ as never:
            assert_never(never)
