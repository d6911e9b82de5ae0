"""The models that can be asked: the base, and adapters that are put on it when they are first asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from core.spec.serving.request import ServedAdapter
from core.train.serving.lane import adapter_name
from core.train.session.faults import BadOperation
from core.train.session.resident import ResidentBase
from core.train.session.shelf import method_of
from core.train.vocabulary.tokenizer import load_tokenizer

WEIGHTS = "weights.safetensors"
"""File of a checkpoint with what was trained."""
_OF_TRAINING = "default"
"""PEFT's name of the adapter of a training."""
_SEED = 0


class ServedModels:
    """Adapters over one base, `most` at once: beyond that the one that was not asked for the longest goes."""

    def __init__(self, base: ResidentBase, most: int) -> None:
        self.base, self._most = base, most
        self._loaded: dict[str, bool] = {}
        """Adapters by name, the least recently asked first: whether they can be computed beside others in one pass."""
        self._tokenizers: dict[str, Any] = {}

    def name(self, asked: ServedAdapter | None) -> str | None:
        """The name of an adapter here; None: the base."""
        return None if asked is None else adapter_name(asked.folder)

    def has(self, name: str | None) -> bool:
        return name is None or name in self._loaded

    def mixes(self, name: str | None) -> bool:
        """Whether its answers can be computed in one pass with those of others."""
        return name is None or self._loaded[name]

    def load(self, asked: ServedAdapter, busy: Set[str | None]) -> None:
        """Put an adapter on the base. `busy`: adapters that stay. BadOperation where it cannot be served."""
        name, folder = adapter_name(asked.folder), Path(asked.folder)
        idle = [known for known in self._loaded if known not in busy]
        if len(self._loaded) >= self._most and idle:
            self._drop(idle[0])
        method = asked.method if asked.checkpoint else _method_in(folder)
        assert method is not None  # the API sends it with a checkpoint
        model = self.base.add(name, method.model_copy(update={"loraplus_lr_ratio": None}), _SEED)
        try:
            if asked.checkpoint:
                self._read_checkpoint(name, model, folder)
            else:
                self.base.read_adapter(name, folder)
        except BaseException:
            self.base.drop(name)
            raise
        model.eval()
        self._loaded[name] = self._can_mix(name)

    def touch(self, name: str | None) -> None:
        """It was asked for now."""
        if name is not None:
            self._loaded[name] = self._loaded.pop(name)

    def tokenizer(self, asked: ServedAdapter | None) -> Any:
        """The tokenizer beside the adapter, with its chat template, or the base's."""
        if asked is None or not (Path(asked.folder) / "tokenizer_config.json").is_file():
            return self.base.tokenizer
        if asked.folder not in self._tokenizers:
            self._tokenizers[asked.folder] = load_tokenizer(Path(asked.folder))
        return self._tokenizers[asked.folder]

    @contextmanager
    def computing(self, names: Sequence[str | None]) -> Iterator[None]:
        """Let the model compute each row of a pass with the adapter of this name."""
        different = set(names)
        if different == {None}:
            with self.base.alone():
                yield
        elif len(different) == 1:
            self.base.activate(str(names[0]))
            yield
        else:
            with self.base.mixed(names):
                yield

    def _drop(self, name: str) -> None:
        self.base.drop(name)
        del self._loaded[name]

    def _can_mix(self, name: str) -> bool:
        """Found by trying: DoRA, and layers that see tokens of all rows in one list, refuse."""
        ids = torch.zeros((2, 1), dtype=torch.int64, device=self.base.placement.device)
        try:
            with self.base.engine.inference() as model, self.base.mixed([None, name]):
                model(input_ids=ids, use_cache=False)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        return True

    def _read_checkpoint(self, name: str, model: nn.Module, folder: Path) -> None:
        """Put the weights of a checkpoint in the place of an adapter's."""
        try:
            saved = load_file(folder / WEIGHTS)
        except FileNotFoundError as error:
            raise BadOperation("the checkpoint is gone", field="model", code="checkpoint_not_found") from error
        neutral = {
            key.replace(f".{_OF_TRAINING}.", ".").removesuffix(f".{_OF_TRAINING}"): value
            for key, value in saved.items()
        }
        own = {
            self.base.neutral(name, key): parameter
            for key, parameter in model.named_parameters()
            if self.base.neutral(name, key) != key
        }
        if odd := sorted(neutral.keys() ^ own.keys()):
            words = f"the checkpoint holds more than an adapter, or another one ({odd[0]}, and {len(odd) - 1} more)"
            raise BadOperation(words, field="model")
        with torch.no_grad():
            for key, parameter in own.items():
                parameter.copy_(neutral[key])


def _method_in(folder: Path) -> Any:
    config = folder / "adapter_config.json"
    if not config.is_file():
        raise BadOperation("the adapter is gone", field="model", code="checkpoint_not_found")
    targets = json.loads(config.read_text(encoding="utf-8")).get("target_modules") or []
    if not isinstance(targets, str) and {"lm_head", "embed_tokens"} & set(targets):
        raise BadOperation("the adapter changes the embeddings or the head, which are not served", field="model")
    return method_of(folder)
