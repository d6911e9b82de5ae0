"""The memory plan: what is known to the byte, what must be less than what, and what lies where."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.plan_large import ROWS, SHAPES
from core.plan.device import CONTEXT_BYTES, Device
from core.plan.memory.plan import need, plan
from core.plan.memory.result import Plan, fits
from core.plan.models.shape import ScorerShape, Shape
from core.spec.job import JobSpec
from core.spec.resolve import resolve

GIB = 2**30
CARD = Device("gpu", "gfx942", memory=192 * GIB, host=512 * GIB)
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPE = Shape.of_config(LLAMA_8B)
JOB = {"model": "a/b", "data": "rows.jsonl"}
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
TOTAL = 8_030_261_248
"""Llama 3.1 8B, as its model card says."""


def planned(device: Device = CARD, longest: int = 1024, **axes: Any) -> Plan:
    return plan(resolve(JobSpec.model_validate(JOB | axes)), SHAPE, longest=longest, device=device)


def test_full_fine_tuning_is_sixteen_bytes_a_parameter() -> None:
    found = planned(method="full", memory={"gradient_checkpointing": True})
    assert SHAPE.parameters == found.trained == TOTAL
    tensors = 32 * 9 + 3
    assert found.bytes["weights"] == found.bytes["gradients"] == 4 * TOTAL
    assert found.bytes["optimizer"] == 8 * TOTAL + 4 * tensors
    assert found.moment == "backward ends", "by then every gradient is there"


@pytest.mark.parametrize(
    ("name", "allocated"),
    [
        ("1b lora, all kept, 1x2048", 5_450_052_608),
        ("8b lora, checkpointed, 4x2048", 20_394_211_328),
        ("8b qlora, checkpointed, 4x2048", 10_494_327_808),
    ],
)
def test_a_gpus_plan_is_what_an_h200_took(name: str, allocated: int) -> None:
    """Bytes that torch allocated there (bench/results/plan-nvidia-h200-2026-11-26.txt)."""
    row = next(row for row in ROWS if row.name == name)
    shape = Shape.of_config(SHAPES[row.shape] | {"dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-5})
    job = resolve(JobSpec.model_validate(row.job))
    found = plan(job, shape, longest=row.tokens, device=Device("gpu", "sm_90", host=200 * GIB))
    assert 1.0 <= found.peak / allocated <= 1.02


def test_parts_in_one_operator_are_counted_where_they_run() -> None:
    lora = {"method": "lora", "training": {"per_device_train_batch_size": 4}}
    one, apart = planned(**lora), planned(replace(CARD, parts=False), **lora)
    tokens = 4 * 1024
    a_block = 2 * (4 - 2) * 4096 * tokens + 2 * 14336 * tokens
    assert apart.moments["loss"] - one.moments["loss"] == 32 * a_block + (4 - 2) * 4096 * tokens
    in_one = tuple(replace(w, name=w.name.replace("gate_proj", "gate_up_proj")) for w in SHAPE.patterns[0])
    phi, spec = replace(SHAPE, patterns=(in_one,)), resolve(JobSpec.model_validate(JOB | lora))
    one, apart = (plan(spec, phi, longest=1024, device=replace(CARD, parts=parts)) for parts in (True, False))
    norms_alone = 32 * 2 * (4 - 2) * 4096 * tokens + (4 - 2) * 4096 * tokens
    assert apart.moments["loss"] - one.moments["loss"] == norms_alone
    old = Device("gpu", "gfx906", memory=192 * GIB)
    assert planned(old, **lora).peak == planned(replace(old, parts=False), **lora).peak, "Triton knows no such card"
    lora["training"]["compile"] = True
    assert planned(**lora).peak == planned(replace(CARD, parts=False), **lora).peak, "torch.compile fuses by itself"


def test_reward_models_are_copies_of_their_own() -> None:
    stage = {"type": "grpo", "reward": [{"type": "model", "model": "a/reward", "max_length": 512, "batch_size": 64}]}
    trained = resolve(
        JobSpec.model_validate({"model": "a/b", "data": "rows.jsonl", "stage": "reward", "method": "qlora"})
    )
    job = resolve(JobSpec.model_validate({"model": "a/b", "data": "rows.jsonl", "stage": stage}))
    alone = plan(job, SHAPE, longest=1024, device=CARD)
    whole, packed = (
        plan(job, replace(SHAPE, scorers=(ScorerShape("model", SHAPE, spec),)), longest=1024, device=CARD)
        for spec in (None, trained)
    )
    assert "reward models" not in alone.bytes and "rewards" not in alone.moments
    assert whole.bytes["reward models"] == 2 * TOTAL and whole.moments["rewards"] > whole.moments["step"]
    reward_run = plan(trained, SHAPE, longest=1024, device=CARD)
    assert packed.bytes["reward models"] == reward_run.bytes["weights"] + reward_run.bytes["adapter"]
    assert whole.peak - alone.peak >= 2 * TOTAL


def test_lora_and_packed_weights() -> None:
    lora = planned(method={"type": "lora", "r": 16})
    sides = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert lora.bytes["weights"] == 2 * TOTAL
    assert lora.bytes["adapter"] == 4 * 16 * sides and lora.trained == 16 * sides
    dora = planned(method={"type": "lora", "r": 16, "use_dora": True})
    assert dora.trained - lora.trained == 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    dense = 2 * (TOTAL - LINEAR)
    layers = 32 * 7
    nf4 = LINEAR // 2 + LINEAR // 64 + 4 * LINEAR // 64 // 256 + 1028 * layers
    assert planned(method="qlora").bytes["weights"] == dense + nf4
    single = {"type": "nf4", "double": False}
    assert planned(method="qlora", quantization=single).bytes["weights"] == dense + LINEAR // 2 + 4 * LINEAR // 64
    assert planned(method="qlora", quantization="int8").bytes["weights"] == dense + LINEAR + 4 * LINEAR // 64
    skipped = planned(method="qlora", quantization={"type": "int8", "skip_modules": ["down_proj"]}).bytes["weights"]
    kept = 32 * 14336 * 4096
    assert skipped == dense + 2 * kept + (LINEAR - kept) + 4 * (LINEAR - kept) // 64


LORA = {"method": {"type": "lora", "r": 16}}
QLORA = {"method": {"type": "qlora", "r": 16}}
FULL = {"method": "full"}
CHECKPOINTED = {"memory": {"gradient_checkpointing": True}}
SELECTIVE = {"memory": {"gradient_checkpointing": "selective"}}


@pytest.mark.parametrize(
    "less, more",
    [
        (LORA, FULL),
        (LORA | {"quantization": "int8"}, LORA),
        (QLORA, LORA | {"quantization": "int8"}),
        (QLORA | {"memory": {"stream": "host"}}, QLORA),
        (
            LORA | {"memory": {"gradient_checkpointing": True}},
            LORA | {"memory": {"gradient_checkpointing": "selective"}},
        ),
        (LORA | {"memory": {"gradient_checkpointing": "selective"}}, LORA),
        (LORA | {"memory": {"activation_offloading": True}}, LORA | {"memory": {"gradient_checkpointing": True}}),
        (FULL | {"memory": {"offload_optimizer": "host"}}, FULL),
        (LORA, LORA | {"training": {"precision": "fp32"}}),
        (LORA, LORA | {"training": {"attention": "eager"}}),
        (LORA, LORA | {"training": {"per_device_train_batch_size": 16}}),
        (LORA | {"batching": {"type": "packed", "tokens_per_batch": 2048}}, LORA),
        (QLORA | {"memory": {"stream": {"type": "disk", "slots": 1}}}, QLORA | {"memory": {"stream": "disk"}}),
    ],
)
def test_what_takes_less(less: dict[str, Any], more: dict[str, Any]) -> None:
    assert planned(**less).peak < planned(**more).peak


def test_attention_in_plain_operations_grows_with_the_square_of_a_row() -> None:
    axes: dict[str, Any] = LORA | {"training": {"attention": "eager", "per_device_train_batch_size": 1}}
    short, long = (planned(longest=length, **axes).bytes["activations"] for length in (2048, 4096))
    flash = LORA | {"training": {"per_device_train_batch_size": 1}}
    short_flash, long_flash = (planned(longest=length, **flash).bytes["activations"] for length in (2048, 4096))
    assert long_flash == pytest.approx(2 * short_flash, rel=0.01)  # but for what autocast keeps of the adapters
    assert long > 3 * short
    assert planned(Device("gpu", "gfx908"), **LORA).peak > planned(**LORA).peak, "a card without flash attention"


ON_THE_HEAD = {"method": {"type": "lora", "r": 16, "target_modules": ["q_proj", "lm_head"]}}
HELD_OUT: dict[str, Any] = {
    "data": {"train": "rows.jsonl", "eval": "held.jsonl"},
    "evaluation": {"type": "held_out", "per_device_eval_batch_size": 32},
}


@pytest.mark.parametrize("device", [CARD, Device("cpu", memory=64 * GIB)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "axes",
    [
        {},
        CHECKPOINTED,
        SELECTIVE,
        {"batching": {"type": "packed", "tokens_per_batch": 8192}},
        {"batching": {"type": "tokens", "tokens_per_batch": 512}},
        {"training": {"precision": "fp32"}},
        {"training": {"attention": "eager"}},
        {"memory": {"activation_offloading": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [LORA, QLORA, FULL, ON_THE_HEAD], ids=["lora", "qlora", "full", "head"])
def test_held_out_rows_take_no_more_than_training(
    method: dict[str, Any], axes: dict[str, Any], rows: int, device: Device
) -> None:
    if method is FULL and "activation_offloading" in axes.get("memory", {}):
        method = LORA
    training = {"training": {"per_device_train_batch_size": rows, **axes.get("training", {})}}
    without = planned(device, 4096, **method | axes | training)
    found = planned(device, 4096, **method | axes | training | HELD_OUT)
    assert found.moments["evaluation"] <= max(without.moments.values())
    assert (found.peak, found.moment, found.device) == (without.peak, without.moment, without.device)


def test_logits_of_held_out_rows_are_a_chunk_unless_the_head_has_an_adapter() -> None:
    few = {"training": {"per_device_train_batch_size": 1}}
    chunk = 256 * 2**20 // (2 * 128256) // 32 * 32 * 128256 * 2
    inside = planned(**QLORA | CHECKPOINTED | HELD_OUT | few)
    whole = planned(**ON_THE_HEAD | CHECKPOINTED | HELD_OUT | few)
    fixed = inside.bytes["weights"] + inside.bytes["adapter"] + inside.bytes["optimizer"]
    assert inside.moments["evaluation"] - fixed < chunk + 2**30
    assert whole.moments["evaluation"] > 10 * 128256 * 1024 > chunk


def test_answers_to_prompts_are_in_the_plan() -> None:
    """One row of 1,024 tokens and 4,096 new ones: keys and values of all."""
    asked = {"type": "held_out", "samples": {"type": "greedy", "max_new_tokens": 4096}}
    few = {"training": {"per_device_train_batch_size": 1}}
    found = planned(**QLORA | CHECKPOINTED | few | HELD_OUT | {"evaluation": asked})
    assert found.moment == "evaluation"
    assert found.bytes["cache"] == 2 * 32 * 8 * 128 * 2 * (1024 + 4096)


@pytest.mark.parametrize("device", [CARD, Device("cpu", memory=64 * GIB)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("method", [LORA, QLORA, FULL, ON_THE_HEAD], ids=["lora", "qlora", "full", "head"])
@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_the_reference_takes_no_more_than_training(stage: str, method: dict[str, Any], device: Device) -> None:
    found = planned(device, 4096, **method | {"stage": stage})
    assert found.moments["reference"] < max(found.moments.values())
    assert found.moment != "reference"
    weights = found.bytes["weights"] + found.bytes.get("adapter", 0)
    chunk = 4 * 128256 * 32
    assert found.moments["reference"] > weights + chunk, "the model, a block's activations and logits in float32"
    for without in ("sft", "orpo", "simpo", "reward"):
        assert "reference" not in planned(device, 4096, **method | {"stage": without}).moments


def test_what_lies_on_the_host_and_on_disk() -> None:
    host = planned(**QLORA | {"memory": {"stream": "host"}})
    disk = planned(**QLORA | {"memory": {"stream": "disk"}})
    on_host, on_disk = ({item.kind: item.bytes for item in found.host} for found in (host, disk))
    assert on_host["blocks"] == 16 * on_disk["blocks"], "32 blocks against two"
    assert {item.kind for item in disk.disk} == {"checkpoints", "image", "result"}
    assert {item.kind for item in host.disk} == {"checkpoints", "packed weights", "result"}
    checkpoints = {item.kind: item.bytes for item in host.disk}["checkpoints"]
    assert checkpoints == 16 * host.trained * 3, "two are kept, and the next one is being written"
    merged = planned(**QLORA | {"export": ["merged"]})
    assert {item.kind: item.bytes for item in merged.disk}["export"] == 2 * TOTAL
    full = planned(**FULL | {"memory": {"offload_optimizer": "host"}})
    assert {item.kind: item.bytes for item in full.host}["optimizer"] == 16 * TOTAL
    assert full.bytes["weights"] == 4 * TOTAL - 2 * LINEAR, "of linear layers the device has what products take"


def test_on_a_cpu_what_is_put_aside_counts() -> None:
    cpu = Device("cpu", memory=64 * GIB, host=64 * GIB)
    found = planned(cpu, **QLORA | {"memory": {"stream": "host"}})
    assert found.one_memory
    assert found.peak == sum(item.bytes for item in found.device) + found.host_bytes
    assert not planned(cpu, **QLORA | {"memory": {"stream": "disk"}}).host


@pytest.mark.parametrize(
    "memory, host, where, slots",
    [(64, 512, "none", 0), (16, 512, "host", 2), (16, 10, "disk", 2), (5, 512, "host", 1)],
)
def test_auto_is_settled_by_the_plan(memory: int, host: int, where: str, slots: int) -> None:
    card = Device("gpu", "gfx1100", memory=memory * GIB, host=host * GIB)
    training = {"per_device_train_batch_size": 4}
    found = planned(card, **LORA | {"training": training, "memory": {"stream": "auto"}})
    assert (found.stream.where, found.stream.slots) == (where, slots), found.stream.reason
    spec = resolve(JobSpec.model_validate({"model": "a/b", "data": "r.jsonl", "memory": {"stream": "auto"}} | LORA))
    wanted = need(spec, SHAPE, longest=1024, device=card)
    assert wanted is not None and wanted.of == 32
    assert need(resolve(JobSpec.model_validate({"model": "a/b", "data": "r.jsonl"} | FULL)), SHAPE, longest=8,
                device=card) is None  # fmt: skip


def test_it_fits_with_a_tenth_to_spare_and_what_the_driver_takes() -> None:
    found = planned(**QLORA)
    assert fits(found, None)
    assert fits(found, int(found.peak / 0.9) + 1) and not fits(found, int(found.peak / 0.9) - 1)
    assert Device("gpu", "gfx942", memory=GIB, context=True).usable == GIB - CONTEXT_BYTES
    assert Device("cpu", memory=GIB, context=True).usable == GIB


def test_it_says_which_rows_and_which_field() -> None:
    rows = planned(**LORA)
    assert (rows.rows, rows.tokens, rows.field) == (8, 8192, "training.per_device_train_batch_size")
    packed = planned(**LORA | {"batching": {"type": "packed", "tokens_per_batch": 512}})
    assert (packed.rows, packed.tokens, packed.field) == (1, 1024, "batching.tokens_per_batch")


def test_as_json() -> None:
    found = planned(**QLORA)
    about = json.loads(json.dumps(found.as_dict()))
    assert about["peak"] == found.peak == sum(item["bytes"] for item in about["device"])
    assert all(item["why"] and item["bytes"] > 0 for part in ("device", "host", "disk") for item in about[part])
