"""Selective checkpoints: a block saves its input and the results that are expensive to recompute; its backward
recomputes the rest from them (Korthikanti et al. 2022, arXiv:2205.05198; torch.utils.checkpoint uses the same term).

A rule on the operator and its shapes decides what is saved of a block:

- attention's output (with the few numbers a row that its backward needs), where one operator computes it;
- products of matrices [T, K] × [K, N] with 8·K ≥ N: each saved number took K multiplications, and a narrow product
  (LoRA's B, K = r) is cheaper to repeat than to save;
- batched products that are no larger than their operands: the values of attention, not its T × T scores;
- the output of a packed layer, adapter included: nothing is dequantised again before the backward needs it.

Everything else is computed again: norms, rotations, activations, dropout, softmax, casts, dequantisation. What follows
the last tensor that the block's backward needs is not kept: a block's last product, like its last sum, is not repeated.

A result that draws random numbers (attention with dropout) is never kept, since what draws after it would draw other
numbers. One that was written into since it was kept is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from core.train.kernels.saved import ResultSaver, active

WIDE = 8
"""A product is kept when it is at most so many times as wide as its sum is long."""
_PRODUCTS = ("mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
PACKED = "a packed layer's product"


# --- the rule --------------------------------------------------------------------------------------------


def _product(args: tuple[Any, ...]) -> bool:
    return WIDE * int(args[0].shape[-1]) >= int(args[1].shape[-1])


def _sum_and_product(args: tuple[Any, ...]) -> bool:
    return _product(args[1:])


def _batched(args: tuple[Any, ...]) -> bool:
    one, other = args[0], args[1]
    result = int(one.shape[0]) * int(one.shape[1]) * int(other.shape[2])
    return result <= int(one.numel()) + int(other.numel())


def _sum_and_batched(args: tuple[Any, ...]) -> bool:
    return _batched(args[1:])


def _always(args: tuple[Any, ...]) -> bool:
    return True


def _rules() -> dict[Any, Callable[[tuple[Any, ...]], bool]]:
    aten = torch.ops.aten
    rules: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
        aten.addmm.default: _sum_and_product,
        aten.bmm.default: _batched,
        aten.baddbmm.default: _sum_and_batched,
    }
    rules |= {getattr(aten, name).default: _product for name in _PRODUCTS if hasattr(aten, name)}
    rules |= {getattr(aten, name).default: _always for name in _ATTENTION if hasattr(aten, name)}
    return rules


_RULES = _rules()
_BY_NAME = {
    "torch_attn::_varlen_attn": _always,
    "flash_attn::_flash_attn_varlen_forward": _always,
    "flash_attn_3::fwd": _always,
    "eft::quant_linear": _always,
    "eft::lora_linear": _always,
}
"""Registered when their module is imported, which may be never."""


def _rule(operator: Any) -> Callable[[tuple[Any, ...]], bool] | None:
    found = _RULES.get(operator, _unknown)
    if found is _unknown:
        schema = getattr(operator, "_schema", None)
        found = _RULES[operator] = None if schema is None else _BY_NAME.get(schema.name)  # type: ignore[assignment]
    return found


def _unknown(args: tuple[Any, ...]) -> bool:
    raise AssertionError


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is attention with dropout."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
    return False


# --- what a call keeps -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Result:
    of: Any
    """The operator, or PACKED."""
    value: Any
    """A tensor or a tuple with tensors; None: to be computed again."""
    versions: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        return self.value is not None and self.versions == _versions(self.value)


def _versions(value: Any) -> tuple[int, ...]:
    parts = value if isinstance(value, tuple | list) else (value,)
    return tuple(part._version for part in parts if isinstance(part, Tensor))


@dataclass(slots=True)
class SavedResults:
    """The saved results of one call of a block, in the order in which they are made. `keeping` around the forward,
    `again` around its recomputation, which takes them out one by one."""

    results: deque[_Result] = field(default_factory=deque)

    @property
    def nbytes(self) -> int:
        parts = [p for r in self.results for p in (r.value if isinstance(r.value, tuple) else (r.value,))]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around the block's forward. What comes after the last tensor that autograd saves is not kept."""
        mode, needed = _Keeping(self), 0
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if below is None:
            raise RuntimeError("results are kept for a graph that is made again, under the hooks of a checkpoint")
        pack, unpack = below

        def note(tensor: Tensor) -> Any:
            nonlocal needed
            needed = len(self.results)
            return pack(tensor)

        with saved_tensors_hooks(note, unpack), mode:
            yield
        while len(self.results) > needed:
            self.results.pop()

    def again(self) -> AbstractContextManager[Any]:
        """Around its recomputation, once or often. Once they are taken, as in a second backward, results are
        computed."""
        return _Again(self)

    def keep(self, of: Any, value: Any) -> None:
        """`value`: a tensor or a tuple with tensors; None when it is not kept."""
        if isinstance(value, tuple | list):
            held: Any = tuple(_alias(part) for part in value)
        else:
            held = _alias(value)
        self.results.append(_Result(of, held, _versions(held)))

    def take(self, of: Any) -> Any:
        """The next result; None where it has to be computed."""
        if not self.results:
            return None
        result = self.results.popleft()
        if result.of is not of:
            raise RuntimeError(f"a block was computed again in another way: {of} in place of {result.of}")
        return result.value if result.whole else None


def _alias(part: Any) -> Any:
    """The same memory without the graph that it is a part of, under the same count of writes."""
    if not isinstance(part, Tensor):
        return part
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return part.detach()


class _Mode(TorchDispatchMode):
    """Sees every operator of a block below autograd."""

    def __init__(self, kept: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.inside = False
        """A result that is saved as a whole is being computed (`save_result`)."""
        self._before: list[ResultSaver | None] = []

    def __enter__(self) -> Self:
        self._before.append(active.saver)
        active.saver = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: Any) -> None:
        active.saver = self._before.pop()
        super().__exit__(*about)  # type: ignore[no-untyped-call]

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        self.inside = True
        try:
            return compute()
        finally:
            self.inside = False


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        rule = None if self.inside else _rule(func)
        if rule is not None:
            keeps = rule(args) and not _draws(func, args, kwargs) and _plain(result)
            self.kept.keep(func, result if keeps else None)
        return result

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        value = super().result(compute)
        self.kept.keep(PACKED, value)
        return value


class _Again(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and _rule(func) is not None:
            found = self.kept.take(func)
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))

    def result(self, compute: Callable[[], Tensor]) -> Tensor:
        found: Tensor | None = self.kept.take(PACKED)
        return super().result(compute) if found is None else found


def _plain(result: Any) -> bool:
    """No subclass of Tensor, which may hold its memory elsewhere."""
    parts = result if isinstance(result, tuple | list) else (result,)
    return all(type(part) in (Tensor, torch.nn.Parameter) for part in parts if isinstance(part, Tensor))


def contexts() -> tuple[Any, Any]:
    """`context_fn` of torch.utils.checkpoint (without reentrant backward)."""
    kept = SavedResults()
    return kept.keeping(), kept.again()
