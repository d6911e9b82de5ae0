"""The importance matrix of a model: how large the inputs of each weight are on training rows.

K-quants choose scales that keep the weights of large inputs closer. llama.cpp calls the file of these figures an
imatrix: for each tensor the mean square of each of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from core.train.model.load import load_model

ROWS = 64
"""Most training rows; a row is cut as in training."""


def write_importance(
    whole: Path, converted: Path, rows: Sequence[Tensor], file: Path, between: Callable[[], None]
) -> None:
    """Run the model in `whole` over `rows`, and write the figures for the tensors of the GGUF file `converted`. Tensors
    that are no plain linear layer (experts of a mixture) have none, and are quantised by their own size."""
    model: Any = load_model(whole, torch.float32)
    sums: dict[str, Tensor] = {}
    count = 0
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(partial(_add, sums, name)).remove)
        for row in rows[:ROWS]:
            between()
            model(input_ids=row.long()[None], use_cache=False)
            count += len(row)
    names = _names(converted)
    found: dict[str, Any] = {names[name]: (total / count).numpy() for name, total in sums.items() if name in names}
    with file.open("wb") as stream:
        np.savez(stream, **found)


def _add(sums: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    square = args[0].float().square().flatten(0, -2).sum(0)
    sums[name] = sums[name] + square if name in sums else square


def _names(converted: Path) -> dict[str, str]:
    """Names in the GGUF file by the names of modules."""
    reader = gguf.GGUFReader(converted)
    architecture = reader.fields["general.architecture"].contents()
    kind = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        return {}
    blocks = int(reader.fields[f"{architecture}.block_count"].contents())
    table = gguf.get_tensor_name_map(kind, blocks)
    here = {tensor.name for tensor in reader.tensors}
    mapped = {name: f"{table.get_name(name)}.weight" for name in table.mapping}
    return {name: to for name, to in mapped.items() if to in here}
