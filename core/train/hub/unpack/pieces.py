"""The tensors of a packed layer by their last name, and what is wrong with them, in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.errors import ModelError

Pieces = Mapping[str, Tensor]


def rows_of(stored: Tensor, bits: int) -> Tensor:
    """int16 [rows * 32 / bits, columns]: the parts of each word below one another, the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)
    parts: Tensor = (stored.unsqueeze(1) >> shifts) & (2**bits - 1)
    return parts.to(torch.int16).flatten(0, 1)


def columns_of(stored: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int16 [rows, columns * 32 / bits]: the parts of each word beside one another, the lowest first or by `places`."""
    order = tuple(range(32 // bits)) if places is None else places
    shifts = bits * torch.tensor(order, dtype=torch.int32)
    parts: Tensor = (stored.unsqueeze(2) >> shifts) & (2**bits - 1)
    return parts.to(torch.int16).flatten(1, 2)


def words(pieces: Pieces, name: str, where: str) -> Tensor:
    """A matrix of 32-bit words. ModelError where it is none."""
    found = take(pieces, name, where)
    if found.dtype != torch.int32 or found.dim() != 2:
        raise unfit(where, f"{name} is {found.dtype} {list(found.shape)}, and not a matrix of int32")
    return found


def take(pieces: Pieces, name: str, where: str) -> Tensor:
    """The tensor with this last name. ModelError where there is none."""
    if name not in pieces:
        raise unfit(where, f"the files lack its {name}")
    return pieces[name]


def check(where: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """ModelError where the tensor has another shape."""
    if tuple(tensor.shape) != shape:
        raise unfit(where, f"{name} is {list(tensor.shape)}, and {list(shape)} follows from config.json")


def unfit(where: str, why: str) -> ModelError:
    """The error of a layer that is not packed as config.json says."""
    return ModelError(
        f"{where} is not packed as `quantization_config` of config.json says: {why}; save the model again, or give "
        "the 16-bit model it was made from",
        field="model",
        code="model_unreadable",
    )
