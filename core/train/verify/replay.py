"""A run that is done, from its folder to what TRL is to do in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

from core.errors import SpecError
from core.spec.axes.batching import Packed
from core.spec.axes.method import OFT, Full, LoRA, LowRank, QLoRA, SettledMethod
from core.spec.axes.optimizer import AdamW
from core.spec.axes.quantization import QAT
from core.spec.axes.stage import Head
from core.spec.job import JobSpec
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder
from core.spec.settled import method_of
from core.train.base.adapters import load_adapter
from core.train.base.events import NullEventWriter
from core.train.base.rng import seed_all
from core.train.data.dataset import TokenDataset
from core.train.data.order import StepOrder, build_order
from core.train.feed import read_data
from core.train.loss.router import coefficient_of
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.methods.oft import adapt_oft
from core.train.model.compute import prepare_compute
from core.train.model.heads import TASKS, has_head, head_name, head_of_model, pad_token_of, with_head
from core.train.model.load import given_head, load_model
from core.train.run import Run
from core.train.verify.columns import columns
from core.train.verify.peer import EXTRA, Replay
from core.train.vocabulary.new_tokens import NEW
from core.train.vocabulary.tokenizer import load_tokenizer

BALANCED = ("sft", "cpt", "dpo", "kto")
"""Stages in which TRL adds the load-balancing loss of a mixture-of-experts model."""
PER_BATCH = ("kto", "orpo", "reward")
"""Stages in which TRL has figures of a micro-batch (a mean in the loss, the smallest score), and ours are of the step:
each step is one batch."""


def recorded(folders: Iterable[Path]) -> dict[int, dict[str, float]]:
    """Metrics of each step that a run has reported, over all of its attempts (their folders, oldest first)."""
    found: dict[int, dict[str, float]] = {}
    for folder in folders:
        path = folder / EVENTS_FILE
        for line in path.read_bytes().splitlines() if path.exists() else ():
            event = json.loads(line)
            if event["type"] == "metrics":
                found[event["step"]] = event["values"]
    return found


@dataclass(frozen=True)
class ReadyReplay:
    """A run's first steps, ready for TRL."""

    replay: Replay
    model: nn.Module
    """As the run begins with it."""
    tokenizer: Any
    differing: list[str]
    """What is known to make the curves differ."""


def prepare(run_dir: Path, steps: int) -> ReadyReplay:
    """Read a run's order and make what TRL needs for its first `steps` steps. SpecError where TRL cannot do them;
    DataError, ModelError."""
    order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    spec, world = order.spec, order.world_size
    if spec.data.streaming:
        raise SpecError("a stream of rows is not replayed: its order is made during the run", field="data.streaming")
    if not isinstance(spec.optimizer, AdamW) or spec.optimizer.type != "adamw":
        raise SpecError("only `optimizer: adamw` is replayed: the arithmetic of others is not TRL's", field="optimizer")
    if isinstance(spec.method, LowRank) and spec.method.new_tokens:
        raise SpecError("new tokens are not replayed: TRL's model has no rows for them", field=NEW)
    if isinstance(spec.quantization, QAT):
        raise SpecError("`quantization: qat` is not replayed: TRL's layers do not round", field="quantization")
    alone = order.model_copy(update={"world_size": 1, "fence_seconds": None, "settled": None})
    with Run(alone, run_dir, NullEventWriter()) as run:
        placement = prepare_compute(run).placement
        tokenizer = load_tokenizer(run.model_dir)
        data = read_data(run, tokenizer).train
        sizes = data.sizes(packed=isinstance(spec.batching, Packed))
        orders = [build_order(spec, sizes, rank=rank, world=world) for rank in range(world)]
        total = orders[0].total_steps(spec.training.num_train_epochs, spec.training.max_steps)
        stage = spec.stage.model_dump(mode="json")
        options = options_of(stage)
        if spec.stage.head == "score":
            tokenizer.pad_token = _pad_token(tokenizer)
        batches, accumulation, used = _cut(orders, min(steps, total), stage)
        found = Replay(
            stage=stage["type"],
            examples=examples(stage["type"], data, used),
            batches=batches,
            accumulation=accumulation,
            optimizer=spec.optimizer,
            schedule=spec.schedule,
            total_steps=total,
            max_grad_norm=spec.training.max_grad_norm,
            seed=spec.training.seed,
            precision=placement.precision,
            device=placement.device.type,
            options=options,
        )
        method = method_of(spec)
        seed_all(spec.training.seed)
        ends = spec.stage.head, pad_token_of(tokenizer)
        model = start_of(run.model_dir, method, placement.weights, placement.device.type, *ends)
        if run.adapter_dir is not None:
            load_adapter(model, run.adapter_dir)
    differing = balance_options(spec, model, found)
    if isinstance(method, LoRA | QLoRA) and method.lora_dropout and stage["type"] in ("sft", "cpt"):
        differing.append(
            f"TRL draws other masks for lora_dropout ({method.lora_dropout:g}), so the curves differ by chance"
        )
    if placement.precision != "fp32":
        differing.append(f"computed in {placement.precision}: differences of about 1 % are rounding")
    if isinstance(method, QLoRA):
        differing.append("TRL computes over weights that bitsandbytes has packed")
    return ReadyReplay(found, model, tokenizer, differing)


def balance_options(spec: JobSpec, model: nn.Module, replay: Replay) -> list[str]:
    """Have TRL balance experts with the weight that the run has; returns what differs nevertheless."""
    wanted, own = spec.training.router_aux_loss_coef, coefficient_of(model.config)
    coefficient = own if wanted is None else wanted
    if own is None or coefficient is None:
        return []
    if replay.stage not in BALANCED:
        return [f"TRL's trainer of `{replay.stage}` has no load-balancing loss"] if coefficient else []
    replay.options["router_aux_loss_coef"] = coefficient
    if coefficient and (replay.stage not in ("sft", "cpt") or max(map(len, replay.batches)) > 1):
        return ["TRL balances experts over all tokens of a micro-batch, eft over each sequence"]
    return []


def start_of(
    model_dir: Path,
    method: SettledMethod,
    dtype: torch.dtype,
    device: str = "cpu",
    head: Head = "tokens",
    pad_token_id: int | None = None,
) -> nn.Module:
    """The model, its new head and its new adapters as a run begins with them, if the random numbers are seeded as
    there; 4-bit weights by bitsandbytes. `pad_token_id`: of a reward model's configuration."""
    given = given_head(model_dir, head)
    match method:
        case Full():
            model: Any = load_model(model_dir, torch.float32, head=given)
        case LoRA() | OFT():
            model = load_model(model_dir, dtype, head=given)
        case QLoRA():
            model = _packed(model_dir, dtype, device)
        case _ as never:
            assert_never(never)
    name = None
    if head != "tokens":
        model = with_head(model, head, pad_token_id)
        name = head_name(model)
    if isinstance(method, Full):
        return adapt_full(model, method, head_of_model(model) if has_head(model) else None).to(device)
    if isinstance(method, OFT):
        return adapt_oft(model, method, task=TASKS[head], head=name).to(device)
    adapted = adapt_lora(model, method, task=TASKS[head], head=name)
    if name is not None and isinstance(method, QLoRA):
        head_of_model(adapted).to(device)
    return adapted if isinstance(method, QLoRA) else adapted.to(device)


def _pad_token(tokenizer: Any) -> str:
    """SpecError where TRL would take the end of an answer for padding."""
    if (found := pad_token_of(tokenizer)) is None:
        words = (
            "the tokenizer has no token for padding but the one that ends answers, before which TRL would take the "
            "score; there is nothing to compare with"
        )
        raise SpecError(words, field="stage")
    return str(tokenizer.convert_ids_to_tokens(found))


def _packed(model_dir: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401 -- transformers would say so in other words
    except ImportError as error:
        raise SpecError(EXTRA, field="quantization") from error
    packing = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, quantization_config=packing, device_map={"": device}
    )


def examples(stage: str, data: TokenDataset, used: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for TRL: the examples `used`, in that order."""
    found = []
    for example in used:
        numbers = range(example * data.sequences, (example + 1) * data.sequences)
        parts = [data.sequence(number) for number in numbers]
        values = {name: float(value[example]) for name, value in data.values.items() if value.ndim == 1}
        found.append(columns(stage, [(ids.tolist(), learned.tolist()) for ids, learned in parts], values))
    return found


def _cut(orders: Sequence[StepOrder], steps: int, stage: Mapping[str, Any]) -> tuple[list[list[int]], int, list[int]]:
    """(micro-batches by the place of their examples in the last part, micro-batches of a step, examples used)."""
    windows = [[batch for order in orders for batch in order.window(step) if batch] for step in range(steps)]
    counts = {len(window) for window in windows}
    sizes = {len(batch) for window in windows for batch in window}
    # A mean of token losses is the same however a step is cut; TRL weighs all other batches alike, whatever their size.
    alike = len(counts) == 1 and (stage["type"] in ("sft", "cpt") or len(sizes) == 1)
    if stage["type"] in PER_BATCH or stage.get("nll_weight") or not alike:
        windows = [[[row for batch in window for row in batch]] for window in windows]
    used = sorted({row for window in windows for batch in window for row in batch})
    places = {row: place for place, row in enumerate(used)}
    batches = [[places[row] for row in batch] for window in windows for batch in window]
    return batches, len(windows[0]), used


def options_of(stage: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's fields as arguments of TRL's configuration. SpecError for a loss that TRL does not have."""
    match stage["type"]:
        case "sft" | "cpt":
            return {"loss_type": "dft"} if stage.get("loss") == "dft" else {}
        case "grpo":
            raise SpecError("rollouts are not replayed: TRL would draw answers of its own", field="stage")
        case "process_reward":
            raise SpecError(
                "TRL has no trainer of process reward models any more, so there is nothing to compare with",
                field="stage",
            )
        case "reward":
            return {"center_rewards_coefficient": stage["center_rewards_coefficient"] or None}
        case "dpo" if stage["loss"] == "kto_pair":
            raise SpecError("TRL has no `kto_pair` any more, so there is nothing to compare with", field="stage.loss")
        case "dpo" if stage["label_smoothing"] and stage["loss"] == "sigmoid":
            raise SpecError(
                "TRL smooths labels in `robust` only, so there is nothing to compare with",
                field="stage.label_smoothing",
            )
        case "dpo":
            found = {"beta": stage["beta"], "loss_type": [stage["loss"]], "label_smoothing": stage["label_smoothing"]}
            if stage["nll_weight"]:
                found |= {"loss_type": [stage["loss"], "sft"], "loss_weights": [1.0, stage["nll_weight"]]}
            return found
        case "kto":
            return {name: stage[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
        case "orpo":
            return {"beta": stage["beta"]}
        case "simpo":
            return {"beta": stage["beta"], "simpo_gamma": stage["gamma"], "loss_type": "simpo", "cpo_alpha": 0.0}
        case _:
            return {}
