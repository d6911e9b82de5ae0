"""Fill in the defaults that depend on other axes, so that a resolved spec says everything it means."""

from __future__ import annotations

from typing import Any, assert_never

from core.spec.axes.batching import Packed
from core.spec.axes.data import (
    FileSource,
    GameRows,
    HubDataset,
    Mixture,
    PathSource,
    RowFormat,
    Source,
    TaskRows,
    format_of,
)
from core.spec.axes.method import OFT, Auto, Full, LoRA, QLoRA
from core.spec.axes.optim.optimizers import (
    SGD,
    Adafactor,
    AdaLomo,
    AdamW,
    AdEMAMix,
    Apollo,
    ApolloMini,
    BAdam,
    GaLore,
    Lion,
    Muon,
    SophiaG,
)
from core.spec.axes.optimizer import Optimizer
from core.spec.axes.quantization import NF4, NoQuantization
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import ActivationsOnHost, HeldOut, NoEvaluation
from core.spec.axes.stage import CPT, DPO, KTO, ORPO, SFT, ProcessReward, Reward, SimPO
from core.spec.job import JobSpec

LEARNING_RATE_ADAPTER = 2e-4
LEARNING_RATE_FULL = 2e-5
LEARNING_RATES = {
    "dpo": (1e-5, 1e-6),
    "simpo": (1e-5, 1e-6),
    "orpo": (8e-6, 8e-6),
    "kto": (1e-5, 1e-6),
    "grpo": (1e-5, 1e-6),
    "rloo": (1e-5, 1e-6),
    "ppo": (1e-5, 1e-6),
} | dict.fromkeys(("reward", "process_reward"), (1e-4, 1e-5))
"""Learning rates of stages that need others: of adapters, and of all parameters."""


def resolve(spec: JobSpec) -> JobSpec:
    """The same job with every dependent default written out; resolving twice changes nothing. What depends on a method
    that is still to be settled (`auto`) is left open until then."""
    spec = _with_defaults_of_stage(spec)
    updates: dict[str, Any] = {}
    learning_rate: float | None
    adapters, full = default_rates(spec)
    match spec.method:
        case LoRA() | QLoRA() | Auto():
            learning_rate = None if isinstance(spec.method, Auto) else adapters
            alpha = spec.method.lora_alpha if spec.method.lora_alpha is not None else 2.0 * spec.method.r
            updates["method"] = spec.method.model_copy(update={"lora_alpha": alpha})
        case OFT():
            learning_rate = adapters
        case Full():
            learning_rate = full
        case _ as never:
            assert_never(never)
    if spec.quantization is None and not isinstance(spec.method, Auto):
        updates["quantization"] = NF4() if isinstance(spec.method, QLoRA) else NoQuantization()
    if spec.optimizer.learning_rate is None:
        updates["optimizer"] = spec.optimizer.model_copy(update={"learning_rate": learning_rate})
    if isinstance(spec.stage, SFT) and spec.stage.loss_on is None:
        match format_of(spec.data.train):
            case "text":
                updates["stage"] = spec.stage.model_copy(update={"loss_on": "all"})
            case (
                "messages" | "sharegpt" | "prompt_completion" | "instruction" | "preference" | "kto" | "stepwise"
                | "prompt"
            ):  # fmt: skip
                updates["stage"] = spec.stage.model_copy(update={"loss_on": "completions"})
            case "auto":
                pass  # known only once the rows are read
    if isinstance(spec.stage, KTO | RolloutStage):
        sides = {"train": spec.data.train, "eval": spec.data.eval}
        updates["data"] = spec.data.model_copy(
            update={
                name: None if source is None else _read_as(source, spec.stage.rows[0]) for name, source in sides.items()
            }
        )
    if spec.memory.gradient_checkpointing is None:
        kept = isinstance(spec.memory.activation_offloading, ActivationsOnHost)
        updates["memory"] = spec.memory.model_copy(update={"gradient_checkpointing": kept})
    if spec.evaluation is None:
        updates["evaluation"] = (
            HeldOut() if spec.data.eval is not None or spec.data.split is not None else NoEvaluation()
        )
    evaluation = updates.get("evaluation", spec.evaluation)
    if isinstance(evaluation, HeldOut) and evaluation.metric_of(spec.stage.metrics) != evaluation.metric_for_best_model:
        metric = evaluation.metric_of(spec.stage.metrics)
        updates["evaluation"] = evaluation.model_copy(update={"metric_for_best_model": metric})
    return spec.model_copy(update=updates)


def _read_as(source: Source, rows: RowFormat) -> Source:
    """Rows with a label or prompts with columns are pairs or chats too, by their keys; the stage says which. An
    upload's format is its own."""
    match source:
        case Mixture():
            inner = [one.model_copy(update={"source": _read_as(one.source, rows)}) for one in source.sources]
            return source.model_copy(update={"sources": inner})
        case PathSource() | HubDataset() if source.format == "auto":
            return source.model_copy(update={"format": rows})
        case PathSource() | HubDataset() | FileSource() | TaskRows() | GameRows():
            return source
        case _ as never:
            assert_never(never)


def _with_defaults_of_stage(spec: JobSpec) -> JobSpec:
    """The same job with the stage's own defaults where the job says nothing."""
    updates: dict[str, Any] = {}
    training: dict[str, Any] = {}
    match spec.stage:
        case SFT() | DPO() | KTO() | ORPO() | SimPO():
            pass
        case Reward() | ProcessReward() | RolloutStage():
            training = {"num_train_epochs": 1.0}
        case CPT():
            training = {"num_train_epochs": 1.0, "truncation": "split"}
            if "batching" not in spec.model_fields_set:
                updates["batching"] = Packed()
        case _ as never:
            assert_never(never)
    if unsaid := {name: value for name, value in training.items() if name not in spec.training.model_fields_set}:
        updates["training"] = spec.training.model_copy(update=unsaid)
    return spec.model_copy(update=updates) if updates else spec


def default_rates(spec: JobSpec) -> tuple[float, float]:
    """The default learning rates of the job's stage and optimizer: of adapters, and of all parameters."""
    adapters, full = LEARNING_RATES.get(spec.stage.type, (LEARNING_RATE_ADAPTER, LEARNING_RATE_FULL))
    return usual_rate(spec.optimizer, adapters), usual_rate(spec.optimizer, full)


def usual_rate(optimizer: Optimizer, adamw: float) -> float:
    """The default learning rate of an optimizer, given that of AdamW."""
    match optimizer:
        case AdamW() | AdEMAMix() | Muon() | Apollo() | ApolloMini() | BAdam() | SophiaG():
            return adamw
        case Lion():
            return adamw / 10
        case GaLore():
            return 4 * adamw
        case AdaLomo():
            return 25 * adamw
        case Adafactor() | SGD():
            return 1e-2
        case _ as never:
            assert_never(never)
