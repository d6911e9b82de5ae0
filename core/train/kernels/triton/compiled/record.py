"""The forms in which kernels are launched, from Triton's own just-in-time compiler.

For each target a driver that only knows its name takes the place of the GPU's, and each case launches its kernel on
tensors without memory. The compiler's binder derives types, constants, alignment (16 bytes, less than 2 GiB) and
options as it does at run time, hands them to `jit_cache_hook`, and stops there. So there is no second
description of a launch that could differ from the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from core.hardware.tables.arch import lookup
from core.train.kernels.triton import block, gemv, int8, loss, nf4
from core.train.kernels.triton.case import Case

MODULES = (nf4, int8, gemv, loss, block)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One kernel as one launch specialises it for one target."""

    kernel: str
    """module.function, without its leading underscore"""
    case: str
    target: str
    function: Any
    """What `triton.jit` made."""
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]
    """All of the backend's options, as it resolved them."""


def cases() -> list[Case]:
    """The cases of all kernel modules. Their names are unique."""
    found = [case for module in MODULES for case in module.cases()]
    names = [case.name for case in found]
    double = {name for name in names if names.count(name) > 1}
    if double:
        raise ValueError(f"two cases have one name: {', '.join(sorted(double))}")
    return found


def forms(target: str, chosen: list[Case]) -> list[Form]:
    """What the launches of these cases would have compiled on a GPU of this target, in order."""
    found: list[Form] = []
    case_name = ""

    def take(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        function = fn.jit_function
        module = function.module.rpartition(".")[2]
        found.append(
            Form(
                f"{module}.{function.__name__.lstrip('_')}",
                case_name,
                target,
                function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                _options(compile["specialization_data"]),
            )
        )
        return True  # neither compile nor launch

    with _as_if_on(target), _hooked(take):
        for case in chosen:
            case_name, before = case.name, len(found)
            case.launch()
            if len(found) == before:
                raise ValueError(f"{case_name}: its launch reached no kernel")
    return found


def gpu_target(target: str) -> GPUTarget:
    """Triton's name of it."""
    row = lookup(target)
    if row is None:
        raise ValueError(f"{target} is not in core/hardware/tables/arch.py")
    if row.vendor == "nvidia":
        return GPUTarget("cuda", int(target.removeprefix("sm_")), row.wave_size)
    return GPUTarget("hip", target, row.wave_size)


def _options(specialization_data: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(specialization_data)["options"]
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


class _Named:
    """All that the just-in-time compiler asks a driver before it compiles."""

    def __init__(self, target: str) -> None:
        self._name, self._target = target, gpu_target(target)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return self._name  # kernels keep one cache a device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _as_if_on(target: str) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Named(target))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def _hooked(hook: Callable[..., bool]) -> Iterator[None]:
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
