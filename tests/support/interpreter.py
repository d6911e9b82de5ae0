"""Triton kernels on the CPU: a child process in which Triton interprets them.

Triton decides when it is imported whether kernels are compiled or interpreted, so the tests' own process, in which
other tests compile, cannot do both. The child repairs one thing: Triton 3.9 cuts float32 off where GPUs round to the
nearest bfloat16, ties to even.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TRITON = Path(__file__).resolve().parents[2] / ".venv" / "aot"
"""Where `make test` puts it: aside, so that it cannot stand in for the one that a build of torch brings."""

Run = Callable[..., Any]


@contextmanager
def interpreter() -> Iterator[Run]:
    """A function that calls "module:function" in the child and hands back its result and the arguments as the call has
    left them: kernels write into tensors that they are given."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare) as pool:

        def run(where: str, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            return pool.submit(_call, where, args, kwargs).result(timeout=120)

        yield run


def _prepare() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "EFT_KERNELS": "triton"}
    sys.path.insert(0, str(TRITON))
    import torch
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name == "fp32" and target.name == "bf16":
            return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    interpreter._convert_float = rounded


def _call(where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)(*args, **kwargs), args


def one_program(kernel: str, at: int, grid: int, *args: Any, **constants: Any) -> None:
    """In the child: program `at` of `grid` of a kernel and no other, without the copies that a launch makes of its
    arguments. So arguments may be larger than the memory, if hardly any of it is touched."""
    from triton.runtime import interpreter

    module, _, name = kernel.partition(":")
    function = getattr(import_module(module), name).rewrite()
    scope = interpreter._patch_lang(function)
    try:
        interpreter.interpreter_builder.set_grid_dim(grid, 1, 1)
        interpreter.interpreter_builder.set_grid_idx(at, 0, 0)
        function(*(interpreter._implicit_cvt(arg) for arg in args), **constants)
    finally:
        scope.restore()
