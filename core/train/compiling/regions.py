"""The blocks of a model, compiled one by one by torch.compile: what compiles them, and what is called in their place.

A block is compiled whole (`fullgraph`) or not at all, with rows and tokens as symbols (`dynamic`), so that blocks of
one kind share their code and a batch of another length needs no other. All of it is compiled before the first step, by
a batch whose shape is the same in every attempt (prepare.py). Later nothing is compiled: what has no code then is
computed by the block as it was. So the code of a call follows from its shape alone, not from the calls before it, and a
run that is resumed computes the same bits.

Passes without gradients (evaluations, answers) and batches of one row in a run of several rows are computed by the
block as it was, too: each would need code of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

OPTIONS: dict[str, Any] = {
    "compile_threads": 1,  # in this process: it has no children of its own that could outlive it
    "deterministic": True,  # choose no kernel by its time: two attempts may choose otherwise
    "fallback_random": True,  # dropout draws what it draws without a compiler
}
"""Options of torch's inductor."""
FAULTS = (TorchDynamoException, FailOnRecompileLimitHit)
"""What torch raises where a block cannot be compiled."""
STANCE = "fail_on_recompile"
"""Stance of torch.compile once nothing is to be compiled any more. It raises a RuntimeError with this name in it."""
LONGEST_REASON = 300


class Compiler:
    """Compiles graphs for the blocks of a model until it is closed; the backend of torch.compile."""

    def __init__(self, *, several_rows: bool, sign_of_life: Callable[[], None]) -> None:
        """`several_rows`: whether code is for batches of more than one row, or for those of one."""
        self.several_rows, self.sign_of_life = several_rows, sign_of_life
        # One function for all blocks: each would have code of its own otherwise.
        self.code = torch.compile(_forward, fullgraph=True, dynamic=True, backend=self)
        self.closed = False
        self.failed: dict[tuple[str, ...], str] = {}
        """Why blocks of a kind (`kind_of`) are not compiled, from the first of them that was tried."""
        self.graphs: list[str] = []
        """SHA-256 of each graph, in the order in which they were compiled."""
        self.told: Callable[[str, str], None] = lambda block, reason: None
        """Called with a block's name and why a call of it has no code, once for each shape, after `close`."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self.sign_of_life()
        self.graphs.append(hashlib.sha256(graph.code.encode()).hexdigest())
        return compile_fx(graph, inputs, config_patches=OPTIONS)

    def takes(self, rows: int) -> bool:
        """Whether there is code for batches of so many rows."""
        return (rows > 1) == self.several_rows

    def ready(self) -> AbstractContextManager[Any]:
        """Around a call of `code`: once closed, it fails rather than compile."""
        return torch.compiler.set_stance(STANCE) if self.closed else nullcontext()

    def close(self, told: Callable[[str, str], None]) -> None:
        """Compile nothing from now on."""
        self.closed, self.told = True, told


class Region:
    """What a block of a model is called by: its code where there is some, else the block as it was."""

    def __init__(self, name: str, block: nn.Module, compiler: Compiler) -> None:
        self.name, self.block, self.compiler, self.kind = name, block, compiler, kind_of(block)
        self.why_eager: str | None = None
        """Why the block is not compiled; None: it is."""
        self._eager = block.forward
        self._unprepared: set[tuple[int, ...]] = set()
        # Checkpoints stay around the code: inside of it they would be torch's choice of what to keep.
        checkpointed = bool(getattr(block, "gradient_checkpointing", False))
        self._checkpoint: Any = block._gradient_checkpointing_func if checkpointed else None
        block.__dict__["forward"] = self
        if checkpointed:
            block.__dict__["gradient_checkpointing"] = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._checkpoint is None or not self.block.training:
            return self._run(*args, **kwargs)
        return self._checkpoint(partial(self._run, **kwargs), *args)

    def release(self) -> None:
        """Leave the block as it was."""
        self.block.__dict__.pop("forward", None)
        if self._checkpoint is not None:
            self.block.__dict__["gradient_checkpointing"] = True

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else None
        if (
            self.why_eager is not None
            or not isinstance(hidden, Tensor)
            or not (torch.is_grad_enabled() and self.block.training)
            or not self.compiler.takes(hidden.shape[0])
            or tuple(hidden.shape) in self._unprepared
        ):
            return self._eager(*args, **kwargs)
        if not hidden.requires_grad:  # behind frozen embeddings: code of its own for the first block would cost more
            hidden = hidden.detach().requires_grad_()
        if self.kind in self.compiler.failed:
            self.why_eager = self.compiler.failed[self.kind]
            return self._eager(*args, **kwargs)
        try:
            with self.compiler.ready():
                return self.compiler.code(self.block, hidden, *args[1:], **kwargs)
        except FAULTS as error:
            self._without(reason_of(error), tuple(hidden.shape))
        except RuntimeError as error:
            if not self.compiler.closed or STANCE not in str(error):
                raise
            self._without(guard_of(error), tuple(hidden.shape))
        return self._eager(*args, **kwargs)

    def _without(self, reason: str, shape: tuple[int, ...]) -> None:
        if not self.compiler.closed:
            self.why_eager = self.compiler.failed[self.kind] = reason
            return
        self._unprepared.add(shape)
        self.compiler.told(self.name, f"{list(shape)}: {reason}")


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong, and no more of it than an event takes."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else 'no words'}"[:LONGEST_REASON]


def guard_of(error: BaseException) -> str:
    """Which condition of the code a call does not meet, in torch's words."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- ")]
    return (lines[0] if lines else str(error))[:LONGEST_REASON]


def kind_of(block: nn.Module) -> tuple[str, ...]:
    """Blocks that are alike in this are made of the same classes: what cannot be compiled of one cannot of others."""
    return tuple(f"{name} {type(module).__qualname__}" for name, module in block.named_modules())
