"""A Triton driver whose GPU is the machine: our launches as they are, compiled for an AMD target and executed here.

Only a child process uses it (tests/support/machine_process.py): Triton is imported here, from the folder that
`make test` puts it in. Compiled code is kept in `~/.cache/eft/machine`, in Triton's own cache and under its key.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from core.train.kernels.triton.compiled import record
from tests.support.machine import assembly
from tests.support.machine.assembly import Program
from tests.support.machine.launch import launch
from tests.support.machine.memory import Memory

FORMATS = {
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}


@dataclass
class Launches:
    """What was executed, and how the next launches are to be."""

    target: str
    programs: Callable[[int], list[int]] = lambda grid: list(range(grid))
    """Of a grid of this size, the workgroups to run."""
    change: Callable[[str], str] = str
    """Applied to the assembly, to see whether a mistake in it would be found."""
    preload: bool = True
    executed: Counter[str] = field(default_factory=Counter)
    """Instructions by name."""
    codes: list[tuple[str, str]] = field(default_factory=list)
    """Name and `instructions` of each kernel executed."""


def instructions(program: Program) -> str:
    """All that the program executes, without the paths and line numbers of its source."""
    return "\n".join(instruction.text for instruction in program.instructions)


class _Unwritten(TorchDispatchMode):
    """Which storages nothing has written to: made by `torch.empty`, and in no other operation since."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = str(function.overloadpacket)
        if name in ("aten.empty", "aten.empty_strided", "aten.empty_like"):
            self.storages.add(found.untyped_storage().data_ptr())
        elif name not in ("aten.view", "aten.detach", "aten.slice", "aten.as_strided"):
            for value in [*args, *(kwargs or {}).values(), found]:
                if isinstance(value, Tensor):
                    self.storages.discard(value.untyped_storage().data_ptr())
        return found


class _Machine:
    """What Triton asks of a driver."""

    def __init__(self, launches: Launches, unwritten: _Unwritten) -> None:
        self.launches, self.unwritten = launches, unwritten
        self._target = record.gpu_target(launches.target)
        self._device = f"machine-{launches.target}"
        self.utils = self

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self._device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": 65536}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: str) -> tuple[Any, ...]:
        return None, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        text = Path(get_cache_manager(metadata.hash).get_file(f"{metadata.name}.amdgcn") or "").read_text()
        programs: dict[str, Program] = {}

        def run(
            x: int,
            y: int,
            z: int,
            stream: int,
            function: Any,
            packed: Any,
            about: Any,
            enter: Any,
            leave: Any,
            *given: Any,
        ) -> None:
            assert (y, z) == (1, 1), "a grid of one dimension"
            now = driver.active.launches
            changed = now.change(text)
            if changed not in programs:
                programs[changed] = assembly.read(changed)
            program = programs[changed]
            module = source.fn.module.rpartition(".")[2] if hasattr(source.fn, "module") else ""
            now.codes.append((f"{module}.{metadata.name.lstrip('_')}", instructions(program)))
            memory = Memory()
            values = [
                (value, kind)
                for value, kind in zip(given, source.signature.values(), strict=True)
                if kind != "constexpr"
            ]
            arguments = _pack(program, memory, values, driver.active.unwritten)
            threads = metadata.num_warps * metadata.warp_size
            now.executed += launch(program, memory, arguments, threads, metadata.shared, now.programs(x), now.preload)

        return run


def _pack(program: Program, memory: Memory, values: list[tuple[Any, str]], unwritten: _Unwritten) -> bytes:
    """The kernel-argument segment. Arguments that Triton adds (scratch memory of its own) are null."""
    segment = bytearray(program.number("kernarg_size"))
    extents: dict[int, tuple[int, int]] = {}
    for value, _ in values:
        if isinstance(value, Tensor):
            key, (low, high) = value.untyped_storage().data_ptr(), _extent(value)
            before = extents.get(key, (low, high))
            extents[key] = min(low, before[0]), max(high, before[1])
    places: dict[int, int] = {}
    for (value, kind), (offset, size, _) in zip(values, program.arguments, strict=False):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            key = storage.data_ptr()
            low, high = extents[key]
            if key not in places:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
                name = f"argument {len(places)} ({tuple(value.shape)} of {value.dtype})"
                places[key] = memory.add(name, whole[low:high], key not in unwritten.storages, (key + low) % 256)
            address = places[key] + value.storage_offset() * value.element_size() - low
            struct.pack_into("<Q", segment, offset, address)
        else:
            assert size == struct.calcsize(FORMATS[kind]), (kind, size)
            struct.pack_into("<" + FORMATS[kind], segment, offset, value)
    return bytes(segment)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of its storage that the tensor has, and the one after the last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


@contextmanager
def on(launches: Launches) -> Iterator[None]:
    """Launches go to the machine, as this target."""
    before = driver._active
    with _Unwritten() as unwritten:
        driver.set_active(_Machine(launches, unwritten))
        try:
            yield
        finally:
            driver._active = before
