"""What an engine holds, written into a folder and restored to the bit: weights, optimizer, random numbers, gradients of
an unfinished accumulation window, and its stateful parts. Tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.train.base.rng import capture_rng, restore_rng
from core.train.engine import REMEDY, Diverged, Engine
from core.train.model.scaler import LossScaler
from core.train.optim import state as optimizer_state
from core.train.ranks.group import ProcessGroup


def save(engine: Engine, folder: Path) -> None:
    """Write everything into an existing empty folder: tensors as safetensors, the rest as JSON. Of several ranks the
    first does this, all others `save_rank`. Raises Diverged in place of writing what is no good: after a step without a
    finite loss or gradient (`Engine.step`), or with a weight or an optimizer state that is no finite number."""
    save_weights(engine, folder)
    tensors, numbers = optimizer_state.capture(engine.optimizer, engine.trained_parameters)
    _require_finite(engine, {**engine.trained_parameters, **tensors})
    save_file(_flat(tensors), folder / "optimizer.safetensors")
    state = {
        "steps": engine.steps,
        "micro_steps": engine.micro_steps,
        "ranks": engine.ranks.world,
        "optimizer": numbers,
        "rng": save_rank(engine, folder),
        "parts": {name: part.state_dict() for name, part in engine.parts.items()},
        "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
    }
    (folder / "state.json").write_text(json.dumps(state, allow_nan=False), encoding="utf-8")


def _require_finite(engine: Engine, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            words = f"after step {engine.steps}, {name} holds numbers that are not finite"
            raise Diverged(f"{words}; {REMEDY}", field="optimizer.learning_rate")


def save_rank(engine: Engine, folder: Path) -> dict[str, Any]:
    """Write what each rank has for itself into the folder of `save`: random numbers, and the gradients of the
    unfinished window. The first rank returns its JSON part, all others write it."""
    engine.updates.synchronize()
    gradients = {name: p.grad for name, p in engine.trained_parameters.items() if p.grad is not None}
    save_file(_flat(gradients), folder / _own(engine.ranks, "gradients.safetensors"))
    tensors, numbers = capture_rng()
    save_file(_flat(tensors), folder / _own(engine.ranks, "rng.safetensors"))
    if not engine.ranks.first:
        (folder / _own(engine.ranks, "rng.json")).write_text(json.dumps(numbers, allow_nan=False), encoding="utf-8")
    return numbers


def _own(ranks: ProcessGroup, name: str) -> str:
    """Name of a file that every rank has: `rng.safetensors` of rank 0, `rng-1.safetensors` of rank 1."""
    stem, _, ending = name.partition(".")
    return name if ranks.first else f"{stem}-{ranks.rank}.{ending}"


def checkpoint_bytes(engine: Engine) -> int:
    """Bytes that `save` and `save_rank` would write now, without some kilobytes of JSON and random numbers."""
    engine.updates.synchronize()
    gradients = [p.grad for p in engine.trained_parameters.values() if p.grad is not None] * engine.ranks.world
    tensors = [
        *_weights(engine).values(),
        *gradients,
        *optimizer_state.capture(engine.optimizer, engine.trained_parameters)[0].values(),
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def save_weights(engine: Engine, folder: Path) -> None:
    """Write the weights alone, as `load_weights` reads them, into an existing empty folder. Raises Diverged as
    `save` does."""
    engine.check()
    engine.updates.synchronize()
    save_file(_flat(_weights(engine)), folder / "weights.safetensors")


def assert_in_sync(engine: Engine) -> None:
    """Raise RanksDiverged when the ranks do not have the same weights, bit for bit."""
    engine.ranks.assert_in_sync(_weights(engine))


def weight_bytes(engine: Engine) -> int:
    """Bytes that `save_weights` would write now."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _weights(engine).values())


def load_weights(engine: Engine, folder: Path) -> None:
    """Restore the weights that `save` or `save_weights` wrote; all else stays. ValueError when they belong to
    another model."""
    weights = load_file(folder / "weights.safetensors")
    engine.updates.synchronize()
    here = _weights(engine)
    if weights.keys() != here.keys():
        odd = sorted(weights.keys() ^ here.keys())
        raise ValueError(f"the checkpoint is of another model: {odd[0]} and {len(odd) - 1} more differ")
    with torch.no_grad():
        for name, tensor in here.items():
            if tensor.shape != weights[name].shape or tensor.dtype != weights[name].dtype:
                raise ValueError(f"the checkpoint is of another model: {name} has another shape or dtype")
            tensor.copy_(weights[name])
    engine.updates.refresh_weights()


def load(engine: Engine, folder: Path, *, without: Collection[str] = ()) -> None:
    """Restore what `save` and this rank's `save_rank` wrote, but for the parts named in `without`. ValueError when
    it belongs to another model or optimizer, or to another number of ranks: what each has done of a window is of no
    use to another number."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if (then := int(state.get("ranks", 1))) != engine.ranks.world:
        raise ValueError(
            f"it was written by {then} ranks, and this run has {engine.ranks.world}; continue with resources.gpus: "
            f"{then}, or start anew"
        )
    load_weights(engine, folder)
    gradients = load_file(folder / _own(engine.ranks, "gradients.safetensors"))
    rescale = _load_scaler(engine.scaler, state.get("scaler"))
    for name, parameter in engine.trained_parameters.items():
        saved = gradients.get(name)
        parameter.grad = None if saved is None else (saved * rescale).to(parameter.device)
    tensors = load_file(folder / "optimizer.safetensors")
    optimizer_state.restore(engine.optimizer, engine.trained_parameters, tensors, state["optimizer"])
    for name, part in engine.parts.items():
        if name not in without:
            part.load_state_dict(state["parts"][name])
    engine.continue_at(int(state["steps"]), int(state["micro_steps"]))
    numbers = state["rng"]
    if not engine.ranks.first:
        numbers = json.loads((folder / _own(engine.ranks, "rng.json")).read_text(encoding="utf-8"))
    restore_rng(load_file(folder / _own(engine.ranks, "rng.safetensors")), numbers)  # last: nothing may draw after it


def _load_scaler(scaler: LossScaler | None, saved: dict[str, Any] | None) -> float:
    """Restore the loss scale; the factor that saved gradients must be multiplied by, which is 1 unless the run
    goes on in another precision than before."""
    if scaler is not None and saved is not None:
        scaler.load_state_dict(saved)
        return 1.0
    return (1.0 if scaler is None else scaler.scale) / (1.0 if saved is None else float(saved["scale"]))


def _weights(engine: Engine) -> dict[str, Tensor]:
    """Trained parameters, and buffers that belong to the model's state and may have changed with them."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in engine.model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return {**engine.trained_parameters, **buffers}


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
