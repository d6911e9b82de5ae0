"""A checkpointed block: its forward saves its input and, with `CheckpointPolicy.selective`, the results that are
expensive to recompute (selective.py), and nothing else; its backward computes the block again.

The recomputation makes every node of the block's graph anew and the backward runs through them at once, while the
block is in its slot: whatever a layer keeps of its weights (through autograd or by itself) is what is there now. A
graph kept from the first forward would show the slot as it was then, with another block in it since. The price beside
torch's non-reentrant checkpoints is the last product of the block, which those do not repeat.

Random numbers and autocast are as they were, so that dropout draws the same; gradients of what is trained in the
block are added to `.grad` as in any other backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from core.errors import ModelError
from core.train.memory.checkpointing.selective import SavedResults
from core.train.memory.offload.activations import ActivationOffload

OnDevice = Callable[[], AbstractContextManager[None]]
CACHES = ("past_key_values", "past_key_value", "layer_past")


def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A block has to take and give tensors. ModelError when it is handed something that it may write to: what later
    blocks read there has no gradient any more once each block is a unit of its own."""
    for path, leaf in _pytree.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, MutableMapping | MutableSequence | MutableSet):
            name = next((key.key for key in path if isinstance(key, _pytree.MappingKey)), type(leaf).__name__)
            raise ModelError(
                f"the blocks of this model share `{name}`, which they write to: such blocks cannot be streamed; leave "
                "`memory.stream` out",
                field="memory.stream",
                code="blocks_shared",
            )


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """What a checkpointed block saves between forward and backward: its input, and more."""

    selective: bool = False
    """Results that are expensive to recompute are saved, too (selective.py)."""
    inputs: ActivationOffload | None = None
    """Host memory for the input meanwhile; None: it stays on the device."""

    def about(self) -> dict[str, Any]:
        """For the run record."""
        where = {"where": "device"} if self.inputs is None else self.inputs.about()
        return {"kept": "selected" if self.selective else "inputs", **where}


@dataclass(slots=True)
class _Call:
    """One call of a block."""

    forward: Callable[..., Any]
    first: OnDevice
    """Context of the forward: the block is in a slot."""
    again: OnDevice
    """Context of the recomputation and the backward."""
    device: torch.device
    tree: Any
    """Structure of args and kwargs."""
    leaves: list[Any]
    """Leaves of args and kwargs; None where there is a tensor."""
    tensors: list[int]
    """Indices of the tensors among the leaves."""
    autocast: _Autocast
    random: _Random
    kept: SavedResults | None
    out_tree: Any = None
    outputs: list[Any] = field(default_factory=list)
    """Leaves of the block's result; None where there is a tensor."""

    def run(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self.tree)
        return self.forward(*args, **kwargs)


def run_checkpointed(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    first: OnDevice,
    again: OnDevice,
    anchor: Tensor,
    policy: CheckpointPolicy,
) -> Any:
    """The result of `forward(*args, **kwargs)`, with a graph that holds its tensors and nothing else. `anchor`: a
    scalar with `requires_grad` on the block's device, so that the block gets a backward even where none of its inputs
    needs a gradient."""
    cached = next((name for name in CACHES if kwargs.get(name) is not None), None)
    if cached is not None:
        raise RuntimeError(
            f"a block that is computed again in the backward was given `{cached}`: it would be written twice"
        )
    leaves, tree = _pytree.tree_flatten((args, kwargs))
    at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    call = _Call(
        forward=forward,
        first=first,
        again=again,
        device=anchor.device,
        tree=tree,
        leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        tensors=at,
        autocast=_Autocast.now(anchor.device.type),
        random=_Random.now(anchor.device),
        kept=SavedResults() if policy.selective else None,
    )
    putting = nullcontext() if policy.inputs is None else policy.inputs.first_put()
    with putting:
        found: tuple[Tensor, ...] = _Checkpointed.apply(call, anchor, *(leaves[place] for place in at))  # type: ignore[no-untyped-call]
    answered = iter(found)
    return _pytree.tree_unflatten([next(answered) if leaf is _TENSOR else leaf for leaf in call.outputs], call.out_tree)


_TENSOR = object()


def _forget(tensor: Tensor) -> None:
    """Save nothing: no backward runs through the graph of the forward."""


def _forgotten(nothing: None) -> Tensor:
    raise AssertionError("the graph of a unit's forward is dropped")


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[2:]
        # With gradients, though the graph is dropped at once: some kernels are others where none are asked for, and
        # this pass must give what the recomputation gives, to the bit.
        keeping = nullcontext() if call.kept is None else call.kept.keeping()
        with call.first(), torch.enable_grad(), saved_tensors_hooks(_forget, _forgotten), keeping:
            answer = call.run([each.detach().requires_grad_(want) for each, want in zip(tensors, wanted, strict=True)])
        leaves, call.out_tree = _pytree.tree_flatten(answer)
        call.outputs = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
        ctx.mark_non_differentiable(*(tensor for tensor in found if not tensor.is_floating_point()))
        ctx.save_for_backward(*tensors)
        ctx.call = call
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        wanted = ctx.needs_input_grad[2:]
        inputs = [tensor.detach().requires_grad_(want) for tensor, want in zip(ctx.saved_tensors, wanted, strict=True)]
        with call.again():
            again = nullcontext() if call.kept is None else call.kept.again()
            with torch.enable_grad(), call.random.again(), call.autocast.again(), again:
                leaves = _pytree.tree_leaves(call.run(inputs))
            heads = [
                (tensor, grad)
                for tensor, grad in zip((leaf for leaf in leaves if isinstance(leaf, Tensor)), grads, strict=True)
                if grad is not None and tensor.requires_grad
            ]
            if heads:
                torch.autograd.backward([tensor for tensor, _ in heads], [grad for _, grad in heads])
        return None, None, *(tensor.grad for tensor in inputs)


# --- as it was -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype
    cached: bool

    @classmethod
    def now(cls, device: str) -> _Autocast:
        return cls(
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )

    def again(self) -> AbstractContextManager[Any]:
        if not self.enabled:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=self.cached)


@dataclass(frozen=True, slots=True)
class _Random:
    device: torch.device
    cpu: Tensor
    gpu: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> _Random:
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, the random state of the forward; afterwards the state from before."""
        with torch.random.fork_rng(devices=[] if self.gpu is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.gpu is not None:
                torch.cuda.set_rng_state(self.gpu, self.device)
            yield
