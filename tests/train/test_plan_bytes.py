"""The plan against torch: weights, adapters, gradients and optimizer to the byte, and all tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from core.plan.device import Device
from core.plan.memory.plan import plan
from core.plan.models.families import FAMILIES
from core.plan.models.shape import Shape
from core.spec.axes.method import OFT, Full, LoRA, LowRank
from core.spec.axes.quantization import QAT
from core.spec.axes.stage import DPO, ProcessReward, Reward
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.settled import method_of
from core.train.batch import Batch
from core.train.engine import Engine, build_engine
from core.train.kernels.fused.modules import fuse_parts
from core.train.kernels.scratch import clear_scratch
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.methods.oft import adapt_oft
from core.train.methods.qat import round_adapters, to_qat
from core.train.methods.start import begin_at_base
from core.train.model.heads import TASKS, head_name, head_of_model, with_head
from core.train.model.load import load_model
from core.train.optim.groups import decay_groups
from core.train.optim.optimizers import build_optimizer
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions
from core.train.stages.dpo import DirectPreference
from core.train.stages.process_reward import ProcessRewardModel
from core.train.stages.reward import RewardModel
from tests.support.live_bytes import LiveBytes
from tests.support.losses import by_kernels

CPU = Device("cpu", products="bf16")
VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
ROWS, TOKENS = 4, 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plan") / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def built(folder: Path, spec: JobSpec, cache: Path) -> Any:
    """As core/train/model/build.py builds it, on the CPU."""
    options = {"nf4": QuantOptions("nf4"), "int8": QuantOptions("int8"), "none": None, "qat": None}
    assert spec.quantization is not None
    packing, method, head = options[spec.quantization.type], method_of(spec), spec.stage.head

    def headed(model: Any) -> Any:
        return model if head == "tokens" else with_head(model, head, None)

    def adapted(model: Any) -> Any:
        name = None if head == "tokens" else head_name(model)
        adapt: Any = adapt_oft if isinstance(method, OFT) else partial(adapt_lora, autocast=True)
        made = adapt(model, method, task=TASKS[head], head=name)
        if isinstance(method, LowRank) and method.started:
            begin_at_base(made, method, torch.device("cpu"))
        return made

    if isinstance(spec.quantization, QAT):
        model = load_model(folder, torch.float32 if isinstance(method, Full) else torch.bfloat16)
        to_qat(model, spec.quantization, torch.bfloat16 if isinstance(method, Full) else torch.float32)
        if isinstance(method, Full):
            return adapt_full(model, method)
        model = adapted(model)
        round_adapters(model)
        return model
    if isinstance(method, Full):
        whole = headed(load_model(folder, torch.float32))
        return adapt_full(whole, method, None if head == "tokens" else head_of_model(whole))
    if packing is None:
        return adapted(headed(load_model(folder, torch.bfloat16)))
    load_quantized(folder, torch.bfloat16, packing, cache)
    model = adapted(headed(load_quantized(folder, torch.bfloat16, packing, cache)[0]))
    fuse_adapters(model)
    return model


METHODS = [
    {"method": "full"},
    {"method": {"type": "full", "train": {"layers": "last 1", "head": True}}},
    {"method": {"type": "lora", "r": 4}},
    {"method": {"type": "lora", "r": 4, "target_modules": "attention"}},
    {"method": {"type": "lora", "r": 4, "lora_dropout": 0.5}},
    {"method": {"type": "lora", "r": 4, "use_dora": True}},
    {"method": {"type": "lora", "r": 4, "init_lora_weights": "pissa"}},
    {"method": {"type": "lora", "r": 4, "modules_to_save": ["norm", "input_layernorm"]}},
    {"method": {"type": "oft"}},
    {"method": {"type": "oft"}, "quantization": "nf4"},
    {"method": {"type": "qlora", "r": 4}},
    {"method": {"type": "qlora", "r": 4, "use_dora": True}},
    {"method": {"type": "qlora", "r": 4}, "quantization": "int8"},
    {"method": "full", "quantization": "qat"},
    {"method": {"type": "lora", "r": 4}, "quantization": {"type": "qat", "weights": "int4"}},
    {"method": "full", "stage": "reward"},
    {"method": {"type": "lora", "r": 4}, "stage": "reward"},
    {"method": {"type": "qlora", "r": 4}, "stage": "process_reward"},
    {"method": "full", "stage": "dpo"},
    {"method": {"type": "lora", "r": 4}, "stage": "dpo"},
]
NAMES = [
    *(
        "full",
        "last layer",
        "lora",
        "attention",
        "dropout",
        "dora",
        "pissa",
        "norms",
        "oft",
        "qoft",
        "nf4",
        "qdora",
        "int8",
        "qat full",
        "qat lora",
    ),
    *("full with a score", "lora with a score", "nf4 with labels", "full dpo", "lora dpo"),
]


@pytest.mark.parametrize("axes", METHODS, ids=NAMES)
def test_what_is_held_is_what_was_planned(folder: Path, tmp_path: Path, axes: dict[str, Any]) -> None:
    spec = resolve(JobSpec.model_validate({"model": str(folder), "data": "rows.jsonl", **axes}))
    shape = Shape.of_folder(folder)
    found = plan(spec, shape, longest=TOKENS, device=CPU)
    model = built(folder, spec, tmp_path)
    rotary = [buffer for name, buffer in model.named_buffers() if "rotary" in name]
    held = sum(storages([*model.parameters(), *model.buffers()]).values()) - sum(storages(rotary).values())
    assert found.bytes["weights"] + found.bytes.get("adapter", 0) == held
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.trained == sum(p.numel() for p in trained.values())

    optimizer = build_optimizer(spec.optimizer, decay_groups(model), trained)
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert sum(p.grad.nbytes for p in trained.values() if p.grad is not None) == 4 * found.trained
    assert (
        sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
        == (found.bytes["optimizer"])
    )


@pytest.mark.parametrize("checkpointed", [False, True], ids=["all kept", "checkpointed"])
@pytest.mark.parametrize("axes", METHODS, ids=NAMES)
def test_the_most_that_torch_has_at_once(
    folder: Path, tmp_path: Path, axes: dict[str, Any], checkpointed: bool
) -> None:
    """Every tensor of two optimizer steps, counted as long as it lives (tests/support/live_bytes.py); the plan is
    within a tenth of it."""
    sequences = 2 if axes.get("stage") in ("reward", "dpo") else 1
    spec = resolve(
        JobSpec.model_validate(
            {
                "model": str(folder),
                "data": "rows.jsonl",
                "training": {"per_device_train_batch_size": ROWS // sequences},
                "memory": {"gradient_checkpointing": checkpointed},
                **axes,
            }
        )
    )
    found = plan(spec, Shape.of_folder(folder), longest=TOKENS, device=CPU)
    model = built(folder, spec, tmp_path)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = build_engine(model, spec.optimizer, autocast=torch.bfloat16)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % VOCABULARY
    labels = ids.clone()
    labels[:, 0] = -100
    batch = Batch(ids, labels, (TOKENS,) * ROWS, ROWS * (TOKENS - 1), sequences=sequences)
    clear_scratch()
    with LiveBytes([*model.parameters(), *model.buffers()], []) as live:
        for _ in range(2):
            engine.backward(loss_of(spec, engine, batch))
            engine.step()
    planned = found.peak - found.bytes["slack"]
    assert -0.10 <= planned / live.peak - 1 <= 0.10, (planned / live.peak, planned, live.peak, found.moments)


@pytest.mark.parametrize(
    "axes",
    [{"method": {"type": "lora", "r": 4}}, {"method": {"type": "qlora", "r": 4}}, {"method": "full"}],
    ids=["lora", "nf4", "full"],
)
def test_parts_in_one_operator_keep_as_much_less_as_was_counted(
    folder: Path, tmp_path: Path, axes: dict[str, Any]
) -> None:
    """To the byte; the first norm, whose input needs no gradient beside adapters, keeps nothing either way."""
    one_row = {"per_device_train_batch_size": 1}
    job = {"model": str(folder), "data": "rows.jsonl", "training": one_row, **axes}
    spec = resolve(JobSpec.model_validate(job))
    ids = torch.arange(TOKENS).view(1, TOKENS) % VOCABULARY
    batch = Batch(ids, ids, (TOKENS,), TOKENS - 1)
    kept, planned = [], []
    for fused in (False, True):
        model = built(folder, spec, tmp_path)
        if fused:
            parts = fuse_parts(model, torch.device("cpu"))
            assert (parts.norms, parts.gates) == (7, 3)
        engine = build_engine(model, spec.optimizer, autocast=torch.bfloat16)
        own, saved = storages([*model.parameters(), *model.buffers()]), dict[int, Tensor]()

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(spec, engine, batch)
        kept.append(sum(count for at, count in storages(saved.values()).items() if at not in own))
        del loss
        device = Device("cpu", products="bf16", parts=fused)
        planned.append(plan(spec, Shape.of_folder(folder), longest=TOKENS, device=device).moments["loss"])
    first = 0 if axes["method"] == "full" else (4 - 2) * SIZES["hidden_size"] * TOKENS
    assert kept[0] - kept[1] == planned[0] - planned[1] - first > 0


def loss_of(spec: JobSpec, engine: Engine, batch: Batch) -> Tensor:
    match spec.stage:
        case Reward() as reward:
            batch = replace(batch, values={"margin": torch.zeros(batch.examples)})
            return engine.forward(batch, RewardModel(reward).loss, {"pairs": batch.examples}).total
        case ProcessReward():
            batch = replace(batch, token_values={"label": torch.ones(batch.label_tokens)})
            return engine.forward(batch, ProcessRewardModel().loss, {"judged_steps": batch.label_tokens}).total
        case DPO() as dpo:
            batch = replace(batch, values={"reference": torch.zeros(batch.examples, 2)})
            return engine.forward(batch, DirectPreference(dpo).loss, {"pairs": batch.examples}).total
        case _:
            return by_kernels(engine, batch, batch.label_tokens).total


# --- from config.json alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_familys_parameters_are_those_of_its_class(family: str) -> None:
    """Names, shapes and ties, on the meta device, with the family's own defaults and with other ones."""
    small: dict[str, Any] = {"num_hidden_layers": 3}
    for changes in ({}, {"tie_word_embeddings": family in ("llama", "qwen2")}):
        config: Any = AutoConfig.for_model(family, **small | changes)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        there = {name: tuple(p.shape) for name, p in model.named_parameters()}
        shape = Shape.of_config(config.to_dict())
        here = {weight.name: weight.shape for weight in shape.outside}
        for number, block in enumerate(shape.blocks):
            here |= {f"{shape.list_name}.{number}.{weight.name}": weight.shape for weight in block}
        assert here == there
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
        outside, blocks = shape.targets(LoRA(target_modules="all-linear"))
        chosen = {f"{shape.list_name}.{number}.{name}" for number, names in enumerate(blocks) for name in names}
        assert chosen | outside == linear - head
