"""Saved adapters that operations only read. They stay in memory until others need the room."""

from __future__ import annotations

import json
from pathlib import Path

from peft import LoraConfig

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.train.session.adapter import SessionAdapter
from core.train.session.faults import BadOperation, reading
from core.train.session.resident import ResidentBase

WEIGHTS = "adapter_model.safetensors"
RESIDENT = 4
"""Number of saved adapters in memory at once."""


class Shelf:
    """The saved adapters in memory, the last used one at the end. All sessions of a base share them. Snapshots leave
    them out."""

    def __init__(self, base: ResidentBase) -> None:
        self._base = base
        self._adapters: dict[tuple[Path, int], SessionAdapter] = {}
        self._loads = 0

    def take(self, folder: Path) -> SessionAdapter:
        """Get the adapter of a folder. BadOperation where there is none that fits the base."""
        check_adapter(folder)
        key = folder, (folder / WEIGHTS).stat().st_mtime_ns  # a folder from elsewhere may be written again
        known = self._adapters.pop(key, None)
        if known is None:
            while len(self._adapters) >= RESIDENT:
                oldest = next(iter(self._adapters))
                self._base.drop(self._adapters.pop(oldest).key)
            self._loads += 1
            name = f"_saved{self._loads}"  # adapters of operations have no such names
            known = SessionAdapter.make(self._base, name, name, method_of(folder), AdamW(), 0)
            try:
                self._base.read_adapter(name, folder)
            except BaseException:
                self._base.drop(name)
                raise
        self._adapters[key] = known
        return known


def check_adapter(folder: Path) -> None:
    """BadOperation for a folder without an adapter in PEFT's form."""
    if not ((folder / "adapter_config.json").is_file() and (folder / WEIGHTS).is_file()):
        raise BadOperation(f"there is no adapter in {folder.name}", field="folder", code="checkpoint_not_found")


def method_of(folder: Path) -> LoRA:
    """The method of an adapter in PEFT's form. BadOperation for one that is not LoRA."""
    with reading(folder):
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            words = f"the adapter is a {config.get('peft_type')}, and sessions load LoRA"
            raise BadOperation(words, field="folder")
        read = LoraConfig.from_pretrained(str(folder))
        if (
            read.rank_pattern
            or read.alpha_pattern
            or read.bias != "none"
            or read.modules_to_save
            or read.trainable_token_indices
        ):
            words = "the adapter has ranks of its own for some layers, biases, whole modules or new tokens"
            raise BadOperation(words, field="folder")
        targets = read.target_modules
        return LoRA(
            r=read.r,
            lora_alpha=read.lora_alpha,
            lora_dropout=read.lora_dropout,
            use_rslora=read.use_rslora,
            use_dora=read.use_dora,
            target_modules=targets if targets == "all-linear" else sorted(targets),
        )
