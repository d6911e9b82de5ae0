"""`QuantLinear`: an nn.Linear whose weight is packed, as PEFT, transformers and torch see one.

What holds: `.weight` reads as a dense tensor of the right shape and dtype (its values are made when something computes
with them) and refuses to be written to, since a write would be lost; dtype moves (`.to(torch.bfloat16)`, `.half()`)
leave the packed weight and its scales alone and move the bias; the state dict has bitsandbytes' names for NF4; deep
copies and device moves work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from core.train.kernels.autograd import linear
from core.train.kernels.format import Format
from core.train.kernels.ops import dequantize
from core.train.quant.int8 import STATE_KEY as INT8_KEY
from core.train.quant.int8 import Int8Weight, int8_from_state
from core.train.quant.layout import STATE_KEY as NF4_KEY
from core.train.quant.layout import SUFFIXES, NF4Weight, nf4_from_state

PackedWeight = NF4Weight | Int8Weight
_BUFFERS = ("packed", "absmax", "nested_absmax", "nested_map", "offset")
_OF_SHAPE = {"shape", "dtype", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad", "grad_fn", "layout"}
_OF_PLACE = {"device", "is_cpu", "is_cuda", "is_meta"}
_ASKS_SHAPE = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex"}


class QuantLinear(nn.Linear):
    """y = x·Wᵀ + bias with W packed and frozen, in the dtype of x (or of autocast)."""

    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_map: Tensor | None
    offset: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: it would make a dense weight
        if len(weight.shape) != 2:
            raise ValueError(f"a linear layer has a weight of two dimensions, not {list(weight.shape)}")
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self._take(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]

    def _take(self, weight: PackedWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self.block = weight.block
        self.quantized_dtype = weight.dtype
        self.packed, self.absmax = weight.packed, weight.absmax
        self._row_squares: Tensor | None = None
        match weight:
            case NF4Weight():
                self.format: Format = "nf4"
                self.nested_absmax, self.nested_map = weight.nested_absmax, weight.nested_map
                self.offset = weight.offset
            case Int8Weight():
                self.format = "int8"
                self.nested_absmax = self.nested_map = self.offset = None

    # --- the weight ----------------------------------------------------------------------------------

    @property
    def scales(self) -> list[Tensor]:
        if self.nested_absmax is None or self.nested_map is None or self.offset is None:
            return [self.absmax]
        return [self.absmax, self.nested_absmax, self.nested_map, self.offset]

    @property
    def quantized(self) -> PackedWeight:
        """The packed weight as a value, sharing the module's tensors."""
        shape = (self.out_features, self.in_features)
        if self.format == "int8":
            return Int8Weight(self.packed, self.absmax, shape, self.quantized_dtype, self.block)
        return NF4Weight(
            self.packed, self.absmax, self.nested_absmax, self.nested_map, self.offset,
            shape, self.quantized_dtype, self.block,
        )  # fmt: skip

    def dense_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """A fresh dense [N, K] weight; default dtype: the one that was quantised."""
        shape = [self.out_features, self.in_features]
        to = dtype or self.quantized_dtype
        weight: Tensor = dequantize(self.packed, self.scales, self.format, self.block, shape, to)
        return weight

    def row_squares(self) -> Tensor:
        """Sum of the squares of each row, float32 [N]: made at the first call, and kept."""
        if self._row_squares is None or self._row_squares.device != self.packed.device:
            with torch.no_grad():
                # In float32 as a merge has it: rounded to 16 bits first, the norms of narrow rows would be others.
                norms = torch.linalg.vector_norm(self.dense_weight(torch.float32), dim=1)
            self._row_squares = norms.square()
        return self._row_squares

    def dense(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain nn.Linear with the dequantised weight, on the same device."""
        weight = self.dense_weight(dtype)
        with torch.device("meta"):
            plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach().to(weight.dtype).clone(), requires_grad=False)
        return plain.train(self.training)

    @property
    def weight(self) -> Tensor:
        """Dense, to read only; its values are made when something computes with them."""
        shape = (self.out_features, self.in_features)
        make = partial(dequantize, self.packed, self.scales, self.format, self.block, list(shape), self.quantized_dtype)
        return DenseWeight.of(self.packed, shape, self.quantized_dtype, make)

    @weight.setter
    def weight(self, value: Any) -> NoReturn:
        _refuse()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            _refuse()
        super().register_parameter(name, param)

    # --- as a module ---------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(compute_dtype(input))
        return linear(x, self.packed, self.scales, self.format, self.block, self.out_features, self.bias)

    def reset_parameters(self) -> None:
        """Nothing: a packed weight is never drawn anew."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}, block={self.block}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        before = {name: getattr(self, name) for name in _BUFFERS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = getattr(self, name)
            if old is not None and new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.packed.is_meta:
            return
        for name, tensor in self.quantized.state().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = INT8_KEY if self.format == "int8" else NF4_KEY
        names = ["weight", *(f"weight.{name}" for name in {*SUFFIXES, key})]
        here = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        rest = {k: v for k, v in state_dict.items() if not (k.startswith(prefix) and k[len(prefix) :] in here)}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if "weight" not in here:
            missing_keys.append(prefix + "weight")
            return
        weight = (int8_from_state if self.format == "int8" else nf4_from_state)(here, prefix + "weight")
        if weight.shape != (self.out_features, self.in_features):
            error_msgs.append(f"size mismatch for {prefix}weight: {list(weight.shape)} in the file")
            return
        device = self.packed.device
        self._take(weight)
        if device.type != "meta":
            self.to(device)


class _ReadOnly(Tensor):
    """A tensor that other code may compute with, but not write to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.__name__
        if _written(name, args):
            _refuse()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # `.data` and `.detach()` are the same memory: writing to them would be lost as well.
        return result.as_subclass(_ReadOnly) if name in ("__get__", "detach") and isinstance(result, Tensor) else result


class DenseWeight(_ReadOnly):
    """A dense weight of `shape` and `dtype` on the device of `packed`; `make` makes its values, when something computes
    with them. PEFT asks every layer that it adapts for its weight's shape, dtype and device, some twenty times: with
    values, a whole model would be unpacked each time. What bypasses torch's hooks for subclasses meets a tensor on the
    device `meta`, and fails instead of computing with other values."""

    _make: Callable[[], Tensor]
    _packed: Tensor

    @classmethod
    def of(cls, packed: Tensor, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> Self:
        weight = torch.empty(*shape, dtype=dtype, device="meta").as_subclass(cls)
        weight._make, weight._packed = make, packed
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.__name__
        attribute = func.__self__.__name__ if name == "__get__" else ""
        if attribute in _OF_PLACE:
            return getattr(args[0]._packed, attribute)
        if attribute not in _OF_SHAPE and name not in _ASKS_SHAPE and not _written(name, args):
            args, kwargs = tree_map_only(cls, _values, (args, kwargs))
        return super().__torch_function__(func, types, args, kwargs)


def _values(weight: DenseWeight) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return weight._make().as_subclass(_ReadOnly)


def _written(name: str, args: Any) -> bool:
    return name == "__set__" or bool(args and isinstance(args[0], _ReadOnly) and _writes(name))


def _writes(name: str) -> bool:
    return (
        (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    )


def _refuse() -> NoReturn:
    raise RuntimeError(
        "the weight of a quantised layer is packed and cannot be written to; merge through "
        "core.train.quant.adapters (dequantise, add, 16 bit), or quantise the changed weight anew"
    )


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: autocast's where it is on, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
