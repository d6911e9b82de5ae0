"""The child process in which Triton's kernels are compiled for AMD GPUs and executed by the machine.

Triton decides when it is imported whether kernels are compiled or interpreted, and must not stand in for the one that a
build of torch brings: so it is never imported by the tests' own process. What it compiles is kept in its cache, under
the hash of all that the code depends on, in `~/.cache/eft/machine`.
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

from tests.support.interpreter import TRITON


@contextmanager
def machine() -> Iterator[Callable[..., Any]]:
    """A function that calls "module:function" in the child and hands back its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare) as pool:

        def run(where: str, *args: Any, **kwargs: Any) -> Any:
            return pool.submit(_call, where, args, kwargs).result(timeout=280)

        yield run


def _prepare() -> None:
    for name in [name for name in os.environ if name.startswith(("TRITON_", "AMDGCN_"))]:
        del os.environ[name]  # what a shell has set would change what is compiled
    os.environ |= {"EFT_KERNELS": "triton", "TRITON_CACHE_DIR": str(Path.home() / ".cache" / "eft" / "machine")}
    sys.path.insert(0, str(TRITON))
    import torch

    torch.set_num_threads(1)


def _call(where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)(*args, **kwargs)
