"""The resident base of a session, with any number of adapters on it, one of them active at a time; or a model that the
session trains itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn

from core.errors import SpecError
from core.spec.axes.method import Full, LoRA
from core.train.base.adapters import target_modules
from core.train.engine import Engine
from core.train.hub.model_files import inspect
from core.train.methods.full import adapt_full
from core.train.methods.lora import leave_inputs, lora_config
from core.train.model.build import build_base
from core.train.model.compute import Compute
from core.train.model.gemm_limits import pad_ranks, split_matmuls
from core.train.model.load import context_length, load_model
from core.train.run import Run
from core.train.session.faults import BadOperation, reading
from core.train.vocabulary.tokenizer import pad_token

_PREFIX = "session_"
"""Begins PEFT's name of an adapter, so that no name is an attribute of PEFT's containers."""


class ResidentBase:
    """See the module. The base alone computes through `engine`, adapters through engines of their own."""

    def __init__(self, run: Run, compute: Compute, tokenizer: Any, *, whole: bool = False) -> None:
        """`whole`: its weights are those that are trained, and there are no adapters on it."""
        if compute.scaler is not None:
            raise SpecError(
                "a session computes in bf16 or fp32, since the scale of fp16 losses is one of a whole run; set "
                "`training.precision` to `fp32`",
                field="training.precision",
            )
        self.placement = compute.placement
        self.ranks = run.ranks
        self.whole = whole
        self._owner: str | None = None
        self._folder = run.model_dir
        self.tokenizer = tokenizer
        self.pad_token_id = pad_token(tokenizer)
        with run.ranks.rank_zero_first(run.caches_weights):
            self.model, self.packed = build_base(run, self.placement, tokenizer)
        split_matmuls(self.model, self.placement.limits)
        self.longest = context_length(self.model)
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._linear = _linear_names(self.model)
        self._peft: PeftModel | None = None
        nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)  # the base is not trained
        self.engine = self._engine(self.model, nothing)
        self.engine.policy.head(compute.choice.veto.get("chunked"))

    def _engine(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        return Engine(
            model,
            optimizer,
            lambda step: 1.0,
            device=self.placement.device,
            autocast=self.placement.autocast,
            max_grad_norm=None,
            pad_token_id=self.pad_token_id,
        )

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """Compute with the base, without any adapter. BadOperation where the base is being trained."""
        if self._owner is not None:
            words = "the session trains the model itself, so that there is no base beside it: name the model"
            raise BadOperation(words, field="model")
        if self._peft is None:
            yield self.engine
            return
        with self._peft.disable_adapter():
            yield self.engine

    @contextmanager
    def mixed(self, names: Sequence[str | None]) -> Iterator[None]:
        """Compute each row of a pass with the adapter of this name; None: the base alone. ValueError, and others, from
        layers that cannot."""
        assert self._peft is not None
        model: Any = self._peft.base_model
        rows = ["__base__" if name is None else _PREFIX + name for name in names]
        hooks = model._enable_peft_forward_hooks(adapter_names=rows)
        model.training = False  # PEFT's own mark; the layers are in their mode already
        hooks.__enter__()
        try:
            yield
        finally:
            hooks.__exit__(None, None, None)  # without the exception, at which PEFT would leave its hooks behind

    def add(self, name: str, method: LoRA | Full, seed: int) -> nn.Module:
        """Put a fresh adapter on the base, active, or hand out the base itself to be trained. BadOperation where this
        cannot be."""
        if isinstance(method, Full) != self.whole:
            words = "a session has either adapters or one model that it trains whole: open one with `method: "
            raise BadOperation(f"{words}{method.type}` for this", field="method")
        if isinstance(method, Full):
            return self._hand_out(name, method)
        _check_method(method)
        method = method if method.lora_alpha is not None else method.model_copy(update={"lora_alpha": 2.0 * method.r})
        targets = self._targets(method)
        config = lora_config(method, targets)
        torch.manual_seed(seed)
        try:
            if self._peft is None:
                self._peft = get_peft_model(self.model, config, adapter_name=_PREFIX + name)
            else:
                self._peft.add_adapter(_PREFIX + name, config)
        except (ValueError, NotImplementedError) as error:  # of layers that PEFT has no adapter for
            raise BadOperation(f"PEFT cannot adapt this model: {error}", field="method.target_modules") from error
        assert self._peft is not None
        self._peft.to(self.placement.device)
        self.activate(name)
        if self.placement.autocast is not None:
            leave_inputs(self._peft)
        if (multiple := self.placement.limits.rank_multiple) > 1:
            pad_ranks(self._peft, multiple)
        if self.packed is not None:
            from core.train.quant.adapters import fuse_adapters

            fuse_adapters(self._peft)
        return self._peft

    def _hand_out(self, name: str, method: Full) -> nn.Module:
        if self._owner is not None:
            words = (
                "the session trains the model itself, and that has one owner: drop it first, or open another session"
            )
            raise BadOperation(words, field="model", code="session_name_taken")
        try:
            adapt_full(self.model, method)
        except BaseException:
            self.model.requires_grad_(False)
            raise
        self._owner = name
        return self.model

    def activate(self, name: str) -> None:
        """Let the model compute with this adapter, and have its parameters alone require gradients."""
        if self.whole:
            return
        assert self._peft is not None
        self._peft.set_adapter(_PREFIX + name)

    def drop(self, name: str) -> None:
        """Take an adapter off the base, or give the base back the weights of its files."""
        if self.whole:
            self._owner = None
            self.model.requires_grad_(False)
            self.model.load_state_dict(load_model(self._folder, self.placement.weights).state_dict())
            return
        assert self._peft is not None
        self._peft.delete_adapter(_PREFIX + name)

    def engine_of(self, optimizer: torch.optim.Optimizer) -> Engine:
        """An engine over the parameters of the active adapter, or of the model itself."""
        if self.whole:
            return self._engine(self.model, optimizer)
        assert self._peft is not None
        return self._engine(self._peft, optimizer)

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write an adapter as PEFT does, into an existing folder, or the model itself as transformers does."""
        if self.whole:
            model: Any = self.model
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            return
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        assert self._peft is not None
        state = get_peft_model_state_dict(self._peft, adapter_name=_PREFIX + name)
        tensors = {key: value.detach().to("cpu").contiguous() for key, value in state.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self._peft.peft_config[_PREFIX + name].save_pretrained(str(folder))

    def read_model(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a model's folder, by their names in this one. BadOperation where they have other names or
        shapes, or are no finite numbers."""
        inspect(folder, field="folder")
        with reading(folder):
            saved = load_model(folder, self.placement.weights).state_dict()
        _check_alike("model", self.model.state_dict(), saved)
        return saved

    def read_adapter(self, name: str, folder: Path) -> None:
        """Put saved weights in the place of an adapter's, or of the model's own. BadOperation where they have other
        names or shapes."""
        if self.whole:
            self.model.load_state_dict(self.read_model(folder))
            return
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        assert self._peft is not None
        with reading(folder):
            saved = load_file(folder / "adapter_model.safetensors")
        made = get_peft_model_state_dict(self._peft, adapter_name=_PREFIX + name)
        _check_alike("adapter", made, saved)
        set_peft_model_state_dict(self._peft, saved, adapter_name=_PREFIX + name)

    def neutral(self, name: str, parameter: str) -> str:
        """The name of a parameter without that of its adapter, the same for all adapters."""
        return re.sub(rf"\.{re.escape(_PREFIX + name)}(?=\.|$)", "", parameter)

    def _targets(self, method: LoRA) -> list[str]:
        if method.target_modules == "all-linear":
            return self._linear
        found = target_modules(self.model, method)
        return [found] if isinstance(found, str) else found


def _linear_names(model: Any) -> list[str]:
    """Last parts of the names of all linear layers but the head, as long as the model has no adapter."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return sorted({name.rpartition(".")[2] for name in names})


def _check_alike(what: str, made: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """BadOperation where saved weights are not in the place of those that were made."""
    if odd := sorted(saved.keys() ^ made.keys()):
        where = f"the saved {what} lacks" if odd[0] in made else f"this {what} has no place for"
        raise BadOperation(f"{where} {odd[0]}, and {len(odd) - 1} more tensors differ", field="folder")
    for key, tensor in saved.items():
        if tensor.shape != made[key].shape:
            words = f"{key} is {list(tensor.shape)} in the saved {what} and {list(made[key].shape)} in this one"
            raise BadOperation(words, field="folder")
        if not bool(tensor.isfinite().all()):
            raise BadOperation(f"{key} has NaN or infinite numbers", field="folder", code="model_not_finite")


def _check_method(method: LoRA) -> None:
    """BadOperation for what one base under several adapters cannot do."""
    if method.modules_to_save:
        words = "all adapters of a session share one base, so that none can train whole modules of it"
        raise BadOperation(words, field="method.modules_to_save")
    if method.new_tokens:
        words = "all adapters of a session share one tokenizer, so that none can add tokens to it"
        raise BadOperation(words, field="method.new_tokens")
    if method.started:
        words = f"`init_lora_weights: {method.init_lora_weights}` is one of jobs; a session's adapters begin at zero"
        raise BadOperation(words, field="method.init_lora_weights")
    if method.loraplus_lr_ratio is not None:
        words = "each step of a session gives its learning rate; LoRA+ is one of jobs"
        raise BadOperation(words, field="method.loraplus_lr_ratio")
