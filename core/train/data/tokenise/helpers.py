"""Processes beside the trainer that read and render rows, each with a renderer of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from core.base import quick_imports
from core.base.collector import importing
from core.base.process import die_with_parent
from core.data.rows import Numbered
from core.spec.run.orders import DataOrder, MemoryLimit
from core.train.base import memory_limit
from core.train.render.options import RenderOptions

if TYPE_CHECKING:
    from core.data.stream import Cursor
    from core.train.data.tokenise.blocks import MadeBlock
    from core.train.data.tokenise.chunks import TokenChunk
    from core.train.render.renderer import Renderer

_T = TypeVar("_T")
_P = ParamSpec("_P")


class HelperKilled(RuntimeError):
    """A helper got SIGKILL from somebody: from the kernel, as a rule, which had no more memory."""


class HelperShort(RuntimeError):
    """A helper wanted more memory than it was given."""


class Helpers:
    """At most so many, each started when there is work for it."""

    def __init__(self, processes: int, options: RenderOptions, model_dir: Path) -> None:
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
            initializer=_begin,
            initargs=(os.getpid(), options, model_dir, memory_limit.of_helpers()),
        )
        self._others = set(multiprocessing.active_children())
        self._started: set[BaseProcess] = set()

    def submit(self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> Future[_T]:
        """Have one of them call it: `rendered` or `made_ahead`. All of it is pickled."""
        try:
            future = self._pool.submit(function, *args, **named)
        except BrokenProcessPool as error:
            raise self._why(error) from error
        self._started |= set(multiprocessing.active_children()) - self._others
        return future

    def result(self, future: Future[_T], between: Callable[[], None]) -> _T:
        """What it answered, or the error it raised; HelperKilled. `between` runs meanwhile, and may raise to stop."""
        while True:
            between()
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                continue
            except BrokenProcessPool as error:
                raise self._why(error) from error
            except MemoryError as error:
                raise HelperShort(_short()) from error

    def close(self) -> None:
        """They end by themselves after what they are at; nobody waits for that."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _why(self, error: BrokenProcessPool) -> RuntimeError:
        codes = []
        for process in self._started:
            process.join(1.0)
            codes.append(_exit_code(process))
        if -signal.SIGKILL in codes:
            return HelperKilled("a process that makes tokens of rows was killed (SIGKILL)")
        if -signal.SIGABRT in codes and memory_limit.of_helpers() is not None:  # so end libraries in Rust
            return HelperShort(_short())
        died = ", ".join(str(code) for code in codes if code) or "unknown"
        return RuntimeError(f"a process that makes tokens of rows has died (exit status {died}): {error}")


def _exit_code(process: BaseProcess) -> int | None:
    """Exit status of a process that is gone; None: it cannot be learned. The pool's own thread waits for the process as
    well: where that thread got the status, the process object has it a moment later."""
    until = time.monotonic() + 1.0
    while (code := process.exitcode) is None and time.monotonic() < until:
        time.sleep(0.01)
    return code


def _short() -> str:
    limit = memory_limit.of_helpers()
    held = "" if limit is None else f" than the {limit.bytes / 1e9:.3g} GB that it may take ({limit.setting})"
    return f"a process that makes tokens of rows wanted more memory{held}"


# --- in a process of its own -----------------------------------------------------------------------------

_renderer: Renderer | None = None


def rendered(rows: list[Numbered], listing: bool) -> TokenChunk:
    """Rows as tokens, in a helper; `listing`: see render_rows."""
    from core.train.data.tokenise.chunks import render_rows

    return render_rows(rows, _own_renderer(), listing=listing).chunk()


def made_ahead(data: DataOrder, start: Cursor | None, count: int) -> MadeBlock:
    """A block of streamed rows, in a helper."""
    from core.train.data.tokenise.blocks import make_block

    return make_block(data, start, count, _own_renderer())


def _own_renderer() -> Renderer:
    assert _renderer is not None
    return _renderer


def _begin(parent: int, options: RenderOptions, model_dir: Path, limit: MemoryLimit | None) -> None:
    global _renderer
    # Whoever ends the trainer means its helpers too; a request to stop is the trainer's to answer.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # It computes nothing: without torch it starts in a quarter of the time and takes a quarter of the memory.
    quick_imports.install((*quick_imports.UNUSED, "torch"))
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # transformers advises to install torch
    with importing():
        from core.train.data.tokenise import blocks, chunks  # noqa: F401 - for the calls to come
        from core.train.render.renderer import Renderer
        from core.train.vocabulary.tokenizer import load_tokenizer

    memory_limit.hold(limit)
    _renderer = Renderer(load_tokenizer(model_dir), options)
    gc.collect()
    gc.freeze()  # what is here by now stays; Python's collector need not walk it again and again
