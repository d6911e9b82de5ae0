"""TRL's trainer over the same start weights, the same tokens and the same batches as ours.

Nothing of TRL's arithmetic is changed: what is overridden is where its rows come from (they are tokens already), the
order of its batches, and the length of its learning-rate schedule.
"""

from __future__ import annotations

import importlib
import inspect
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.errors import SpecError
from core.plan.steps import warmup_steps
from core.spec.axes.optim.schedules import GreedyLR, Polynomial, ReduceLROnPlateau, WarmupStableDecay
from core.spec.axes.optimizer import AdamW, Schedule

Example = dict[str, Any]
"""Columns of a row as the collator of TRL's trainer takes it."""

TRAINERS = {
    "sft": ("trl", "SFT"),
    "cpt": ("trl", "SFT"),
    "dpo": ("trl", "DPO"),
    "kto": ("trl", "KTO"),
    "reward": ("trl", "Reward"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
    "simpo": ("trl.experimental.cpo", "CPO"),
}
"""Stage → module of TRL, and what the names of its trainer begin with."""
EXTRA = "this needs TRL: install the extra with `uv pip install -e '.[verify]'`, or `pip install -e '.[verify]'`"


@dataclass(frozen=True)
class Replay:
    """What TRL is to do in our place."""

    stage: str
    """One of `TRAINERS`."""
    examples: Sequence[Example]
    """See `core.train.verify.columns`."""
    batches: Sequence[Sequence[int]]
    """Examples of each micro-batch, by their place in `examples`, in the order of training."""
    accumulation: int
    """Micro-batches of an optimizer step."""
    optimizer: AdamW
    schedule: Schedule
    total_steps: int
    """Steps of the whole run: the length of its schedule. `batches` may be fewer."""
    max_grad_norm: float | None = 1.0
    seed: int = 0
    precision: str = "fp32"
    """`fp32`, or autocast to `bf16` or `fp16`."""
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the trainer's own configuration, such as `beta` and `loss_type`, by TRL's names."""

    @property
    def steps(self) -> int:
        return -(-len(self.batches) // self.accumulation)


@dataclass(frozen=True)
class Trajectory:
    curve: list[dict[str, float]]
    """Figures of each step: `step`, `loss`, `grad_norm`, `learning_rate`, and the trainer's own ones by its names."""
    model: nn.Module
    """As trained."""


def train(replay: Replay, model: nn.Module, tokenizer: Any, *, peft_config: Any = None) -> Trajectory:
    """Train `model` in place under TRL. Its trained parameters must be float32. `peft_config`: adapters that TRL is to
    add itself, to which it then compares the model without them. SpecError where TRL is not installed or has no trainer
    of the stage."""
    start = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(replay, model, tokenizer, folder, peft_config=peft_config)
        if peft_config is None:
            for name, value in start.items():  # over a packed base TRL rounds the adapters to bf16
                trainer.model.get_parameter(name).data = value
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trajectory([{name: float(value) for name, value in entry.items()} for entry in logged], trainer.model)


def build_trainer(replay: Replay, model: nn.Module, tokenizer: Any, folder: str, *, peft_config: Any = None) -> Any:
    """TRL's trainer of the stage, ready to train. `folder`: where it may write."""
    try:
        from datasets import Dataset, disable_progress_bars
    except ImportError as error:
        raise SpecError(EXTRA, field="stage") from error
    disable_progress_bars()
    trainer, config = _classes(replay.stage)
    sizes = {len(batch) for batch in replay.batches}
    schedule, optimizer = replay.schedule, replay.optimizer
    arguments = quiet(folder, device=replay.device, precision=replay.precision) | {
        "per_device_train_batch_size": max(sizes),
        "gradient_accumulation_steps": replay.accumulation,
        "num_train_epochs": 1,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "optim": "adamw_torch",
        "lr_scheduler_type": schedule.type,
        "lr_scheduler_kwargs": _scheduler_kwargs(schedule, replay.total_steps),
        "warmup_steps": warmup_steps(replay.total_steps, schedule),
        "max_grad_norm": replay.max_grad_norm or 0.0,
        "seed": replay.seed,
        "logging_steps": 1,
        "remove_unused_columns": False,
    }
    known = inspect.signature(config).parameters
    if "max_length" in known:
        arguments["max_length"] = max(map(_length, replay.examples))
    if unknown := sorted(replay.options.keys() - known.keys()):
        raise SpecError(f"TRL's {config.__name__} has no {', '.join(unknown)}", field="stage")
    made = _in_our_order(trainer, replay)(
        model=model,
        args=config(**arguments | replay.options),
        train_dataset=Dataset.from_list(list(replay.examples)),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    from transformers.trainer_callback import PrinterCallback

    made.remove_callback(PrinterCallback)
    return made


def quiet(folder: str | Path, *, device: str, precision: str) -> dict[str, Any]:
    """Arguments of a TRL configuration that computes on `device` in `precision` (as `Replay` has it) and writes neither
    checkpoints nor reports."""
    return {
        "output_dir": str(folder),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device != "cpu",
        "gradient_checkpointing": False,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _scheduler_kwargs(schedule: Schedule, total_steps: int) -> dict[str, Any]:
    """The options of a schedule as transformers names them."""
    written = schedule.model_dump(exclude={"type", "warmup_ratio", "warmup_steps"}, exclude_none=True)
    match schedule:
        case ReduceLROnPlateau() | GreedyLR():
            raise SpecError(
                "TRL evaluates at other moments, so a schedule that follows evaluations cannot be compared",
                field="schedule",
            )
        case WarmupStableDecay(decay_ratio=ratio):
            steps = schedule.decay_steps if ratio is None else math.ceil(total_steps * ratio)
            return {
                "num_decay_steps": steps,
                "decay_type": schedule.decay_type,
                "min_lr_ratio": schedule.min_lr_rate,
            }
        case Polynomial(power=power, min_lr_rate=least):
            if least:
                raise SpecError("transformers takes this end as an absolute rate", field="schedule.min_lr_rate")
            return {"power": power, "lr_end": 0.0}
        case _:
            return written


def _classes(stage: str) -> tuple[Any, Any]:
    """(trainer, configuration) of a stage."""
    if stage not in TRAINERS:
        raise SpecError(f"TRL has no trainer for `stage: {stage}`, so there is nothing to compare with", field="stage")
    folder, name = TRAINERS[stage]
    try:
        module = importlib.import_module(folder)
    except ImportError as error:
        raise SpecError(EXTRA, field="stage") from error
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def _length(example: Example) -> int:
    """At least the tokens of the longest sequence of an example."""
    return sum(len(value) for value in example.values() if isinstance(value, list))


def _in_our_order(trainer: Any, replay: Replay) -> Any:
    """The trainer's class over rows that are tokens already, in batches that are given."""
    from torch.utils.data import DataLoader

    def rows_as_they_are(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def row_as_it_is(self: Any, feature: Example, *args: Any, **kwargs: Any) -> Example:
        return feature

    def loader(self: Any) -> Any:
        batches = [list(batch) for batch in replay.batches]
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        )

    def scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        return super(found, self).create_scheduler(replay.total_steps, optimizer)

    found: Any = type(
        f"Replayed{trainer.__name__}",
        (trainer,),
        {
            "_prepare_dataset": rows_as_they_are,
            "tokenize_row": row_as_it_is,
            "get_train_dataloader": loader,
            "create_scheduler": scheduler,
        },
    )
    return found


def trained_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what is trained, by the names that PEFT saves it under."""
    return {
        name.replace(".default", ""): value.detach().clone()
        for name, value in model.named_parameters()
        if value.requires_grad
    }
