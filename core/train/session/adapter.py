"""One adapter of a session, or the model that a session trains whole: its engine, and the state that outlives the
process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core.spec.axes.method import Full, LoRA
from core.spec.axes.optim.optimizers import BAdam, SophiaG
from core.spec.axes.optimizer import Optimizer
from core.spec.session.method import SessionMethod
from core.spec.session.verbs import OptimStep
from core.train.engine import Engine
from core.train.linalg.norm import total_norm
from core.train.optim import state as optimizer_state
from core.train.optim.groups import decay_groups
from core.train.optim.optimizers import build_optimizer
from core.train.session.faults import BadOperation, reading
from core.train.session.resident import ResidentBase

STATE = "state"
"""Stem of the files that `save` makes in the folder of an adapter."""
_OPTIMIZER: TypeAdapter[Optimizer] = TypeAdapter(Optimizer)
_METHOD: TypeAdapter[LoRA | Full] = TypeAdapter(SessionMethod)


@dataclass
class SessionAdapter:
    """An adapter with its optimizer, gradient window and random state."""

    name: str
    """Its name within the session."""
    key: str
    """Its name on the base, which other sessions may share."""
    method: LoRA | Full
    optimizer: Optimizer
    seed: int
    base: ResidentBase
    engine: Engine
    draws: int = 0
    """Backward passes so far: with the seed, the state of its dropout."""

    @classmethod
    def make(
        cls, base: ResidentBase, name: str, key: str, method: LoRA | Full, optimizer: Optimizer, seed: int
    ) -> SessionAdapter:
        """Put a fresh adapter on the base. BadOperation for an optimizer that sessions do not have."""
        if isinstance(optimizer, BAdam | SophiaG):
            words = f"`{optimizer.type}` takes turns or passes of its own between steps, and is one of jobs"
            raise BadOperation(words, field="optimizer")
        model = base.add(key, method, seed)
        try:
            # The rate of each step is the factor of its schedule, so that factors of groups stay factors.
            spec = optimizer.model_copy(update={"learning_rate": 1.0})
            trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
            made = cls(
                name,
                key,
                method,
                optimizer,
                seed,
                base,
                base.engine_of(build_optimizer(spec, decay_groups(model), trained)),
            )
        except BaseException:
            base.drop(key)
            raise
        made.engine.policy.head()
        return made

    def begin(self) -> Engine:
        """Let the model compute with this adapter."""
        self.base.activate(self.key)
        return self.engine

    def draw(self) -> None:
        """Set the generator that dropout draws from, by the seed, the rank and the number of backward passes before."""
        rank = self.base.ranks.rank
        digest = hashlib.sha256(f"{self.seed}:{self.draws}{f':{rank}' if rank else ''}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        self.draws += 1

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around passes that count together or not at all: an exception takes the window back to where it was."""
        engine = self.engine
        before = {name: None if p.grad is None else p.grad.clone() for name, p in engine.trained_parameters.items()}
        draws, micro_steps = self.draws, engine.micro_steps
        try:
            yield
        except BaseException:
            for name, parameter in engine.trained_parameters.items():
                parameter.grad = before[name]
            self.draws, engine.micro_steps = draws, micro_steps
            raise

    def step(self, asked: OptimStep) -> dict[str, Any]:
        """Update the weights. BadOperation where a gradient is no finite number: nothing changes but the window, which
        is dropped, or where there is no gradient."""
        engine = self.begin()
        gradients = [p.grad for p in engine.trained_parameters.values() if p.grad is not None]
        if not gradients:
            raise BadOperation("there are no gradients: call `forward_backward` before `step`", code="no_gradients")
        if not bool(total_norm(gradients).isfinite()):  # finite ones may have an infinite norm
            engine.zero_grad()
            words = "a gradient, or the norm of all, is not a finite number; the window was dropped"
            raise BadOperation(words, code="diverged")
        engine.schedule = lambda step: asked.learning_rate
        engine.max_grad_norm = asked.max_grad_norm
        with _options(engine.optimizer, asked):
            result = engine.step()
        engine.check()
        return {"grad_norm": float(result.grad_norm), "learning_rate": result.learning_rate, "steps": engine.steps}

    # --- state

    def about(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "method": self.method.model_dump(mode="json"),
            "optimizer": self.optimizer.model_dump(mode="json"),
            "seed": self.seed,
            "steps": self.engine.steps,
            "parameters": sum(p.numel() for p in self.engine.trained_parameters.values()),
        }

    def save(self, folder: Path, stem: str, *, weights: bool = True) -> None:
        """Write all of it to two files of an existing folder, under names without that of the adapter. `weights`: False
        where the folder has those of the whole model beside them."""
        trained = self._neutral()
        kept, numbers = optimizer_state.capture(self.engine.optimizer, trained)
        tensors = {f"weights/{key}": p.detach() for key, p in trained.items() if weights}
        tensors |= {f"gradients/{key}": p.grad for key, p in trained.items() if p.grad is not None}
        tensors |= {f"optimizer/{key}": value for key, value in kept.items()}
        save_file({key: value.to("cpu").contiguous() for key, value in tensors.items()}, folder / f"{stem}.safetensors")
        state = self.about() | {
            "optimizer_state": numbers,
            "micro_steps": self.engine.micro_steps,
            "draws": self.draws,
        }
        (folder / f"{stem}.json").write_text(json.dumps(state, allow_nan=False), encoding="utf-8")

    @classmethod
    def restore(cls, base: ResidentBase, name: str, key: str, folder: Path, stem: str) -> SessionAdapter:
        """Make an adapter of what `save` wrote, to the bit."""
        with reading(folder):
            state = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
            method, optimizer = _METHOD.validate_python(state["method"]), _OPTIMIZER.validate_python(state["optimizer"])
            seed = int(state["seed"])
        made = cls.make(base, name, key, method, optimizer, seed)
        try:
            made.load(folder, stem)
        except BaseException:
            base.drop(key)
            raise
        return made

    def load(self, folder: Path, stem: str) -> None:
        """Put what `save` wrote in the place of this adapter's state. BadOperation when it is another adapter's."""
        with reading(folder):
            state = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / f"{stem}.safetensors")
        trained = self._neutral()
        weights = _part(tensors, "weights/")
        if not weights and isinstance(self.method, Full):
            weights = {key: value for key, value in self.base.read_model(folder).items() if key in trained}
        if weights.keys() != trained.keys() or any(weights[key].shape != p.shape for key, p in trained.items()):
            raise BadOperation("what was saved is of an adapter of another shape", field="folder")
        if state["optimizer"]["type"] != self.optimizer.type:
            words = f"what was saved has the optimizer {state['optimizer']['type']}, and this is {self.optimizer.type}"
            raise BadOperation(words, field="optimizer")
        gradients = _part(tensors, "gradients/")
        with torch.no_grad():
            for key, parameter in trained.items():
                parameter.copy_(weights[key])
                saved = gradients.get(key)
                parameter.grad = None if saved is None else saved.to(parameter.device)
        optimizer_state.restore(self.engine.optimizer, trained, _part(tensors, "optimizer/"), state["optimizer_state"])
        self.engine.steps, self.engine.micro_steps = int(state["steps"]), int(state["micro_steps"])
        self.seed, self.draws = int(state["seed"]), int(state["draws"])

    def _neutral(self) -> dict[str, nn.Parameter]:
        return {self.base.neutral(self.key, name): p for name, p in self.engine.trained_parameters.items()}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


class _options:  # noqa: N801 -- reads as a word after `with`
    """Options of the optimizer for one step."""

    def __init__(self, optimizer: torch.optim.Optimizer, asked: OptimStep) -> None:
        self._groups = optimizer.param_groups
        self._new = {
            name: value for name in ("weight_decay", "betas", "eps") if (value := getattr(asked, name)) is not None
        }
        for name in self._new:
            if any(name not in group for group in self._groups):
                raise BadOperation(f"this optimizer has no `{name}`", field=name)

    def __enter__(self) -> None:
        self._before = [{name: group[name] for name in self._new} for group in self._groups]
        for group in self._groups:
            group.update(self._new)

    def __exit__(self, *_: object) -> None:
        for group, before in zip(self._groups, self._before, strict=True):
            group.update(before)
