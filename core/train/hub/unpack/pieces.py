"""The tensors of a packed layer by their last name, and what is wrong with them, in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.errors import ModelError

Pieces = Mapping[str, Tensor]


def rows_of(stored: Tensor, bits: int) -> Tensor:
    """int16 [rows * 32 / bits, columns]: the parts of each word below one another, the lowest first."""
    return torch.stack(_parts(stored, bits), dim=1).flatten(0, 1).to(torch.int16)


def columns_of(stored: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int16 [rows, columns * 32 / bits]: the parts of each word beside one another, the lowest first or by `places`."""
    parts = _parts(stored, bits)
    ordered = parts if places is None else [parts[place] for place in places]
    return torch.stack(ordered, dim=2).flatten(1, 2).to(torch.int16)


def _parts(stored: Tensor, bits: int) -> list[Tensor]:
    """uint8 [rows, columns] for each part of the words, the lowest first; bits: 2, 4 or 8. Bytes are shifted and not
    words, a quarter of the memory to pass over."""
    octets = stored.contiguous().view(torch.uint8).view(*stored.shape, 4)
    return [(octets[:, :, place // 8] >> (place % 8)) & (2**bits - 1) for place in range(0, 32, bits)]


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
