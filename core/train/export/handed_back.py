"""The weights a job hands back, read again from their files and compared with what was trained, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from core.errors import EftError
from core.spec.axes.method import OFT, Full, LoRA, QLoRA, SettledMethod
from core.spec.axes.stage import Head
from core.train.base.adapters import adapter_state
from core.train.hub.model_files import inspect
from core.train.memory.available import available_bytes
from core.train.model.load import load_model


class ArtifactsDiffer(RuntimeError):
    """The files that were written do not hold what was trained."""


def check_saved(model: nn.Module, method: SettledMethod, folder: Path, head: Head = "tokens") -> str:
    """Read `folder`, as `save_weights` has just written it, and answer how far it was compared: "bits", or "shapes"
    where this machine's memory does not hold the model a second time. Raises ArtifactsDiffer."""
    try:
        match method:
            case LoRA() | QLoRA() | OFT():
                return _check_adapter(model, folder)
            case Full():
                return _check_model(model, folder, head)
            case _ as never:
                assert_never(never)
    except (EftError, OSError, ValueError, KeyError, SafetensorError) as error:
        raise ArtifactsDiffer(f"what was written into {folder.name}/ cannot be read again: {error}") from error


def _check_adapter(model: Any, folder: Path) -> str:
    from peft import PeftConfig

    PeftConfig.from_pretrained(str(folder))
    _compare(adapter_state(model), load_file(folder / "adapter_model.safetensors"), folder)
    return "bits"


def _check_model(model: nn.Module, folder: Path, head: Head) -> str:
    inspect(folder, field="artifacts")
    trained = model.state_dict()
    free, needed = available_bytes(), sum(tensor.nbytes for tensor in trained.values())
    dtype = next(model.parameters()).dtype
    if free is not None and needed > free:
        _compare(trained, load_model(folder, dtype, device_map="meta", head=head).state_dict(), folder)
        return "shapes"
    _compare(trained, load_model(folder, dtype, head=head).state_dict(), folder)
    return "bits"


def _compare(trained: dict[str, Tensor], written: dict[str, Tensor], folder: Path) -> None:
    if odd := sorted(trained.keys() ^ written.keys()):
        where = "is missing in" if odd[0] in trained else "was not trained and is in"
        raise ArtifactsDiffer(f"{odd[0]} {where} {folder.name}/, and {len(odd) - 1} more tensors differ")
    for name, tensor in trained.items():
        other = written[name]
        if tensor.shape != other.shape:
            raise ArtifactsDiffer(f"{name} has another shape in {folder.name}/ than what was trained")
        # Some models keep a few modules in float32 whatever they are loaded in, so numbers count and not the dtype.
        if not other.is_meta and not torch.equal(tensor.detach().cpu(), other.to(tensor.dtype)):
            raise ArtifactsDiffer(f"{name} has other numbers in {folder.name}/ than what was trained")
