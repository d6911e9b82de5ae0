"""The passes of a run, and the numbers by which what they keep is counted."""

from __future__ import annotations

from typing import assert_never

from core.plan.activations import Numbers, Pass
from core.plan.device import Device
from core.plan.models.shape import Shape
from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.method import OFT, Full, LoRA, QLoRA
from core.spec.axes.quantization import NF4, QAT, Int8
from core.spec.axes.runtime import HeldOut
from core.spec.job import JobSpec
from core.spec.settled import method_of


def training_pass(spec: JobSpec, longest: int) -> tuple[int, str]:
    """(tokens of the largest forward pass of training, padding counted; the field that says so). Those of held-out rows
    are no larger."""
    match spec.batching:
        case Rows():
            rows = spec.training.per_device_train_batch_size * spec.stage.sequences
            return rows * longest, "training.per_device_train_batch_size"
        case Tokens(tokens_per_batch=budget) | Packed(tokens_per_batch=budget):
            return max(budget, spec.stage.sequences * longest), "batching.tokens_per_batch"
        case _ as never:
            assert_never(never)


def held_out_pass(held_out: HeldOut, training: Pass, longest: int) -> Pass:
    """The largest pass of rows of at most so many tokens: as many as are asked for, and no more tokens than a pass of
    training, or one row (core/train/data/dataset.py, `spans`)."""
    return Pass(max(longest, min(training.tokens, held_out.per_device_eval_batch_size * longest)), longest)


def numbers_of(spec: JobSpec, shape: Shape, device: Device, adapted: frozenset[str]) -> Numbers:
    computed = 4 if device.precision(spec.training) == "fp32" else 2
    cpu, attention = device.kind == "cpu", device.attention(spec.training)
    if shape.scores_capped:
        attention = "eager"
    elif shape.own_dropout and cpu and attention == "flash":  # torch's flash attention for CPUs has no dropout
        attention = "math"
    rounds, parts = isinstance(spec.quantization, QAT), device.fuses_parts(spec.training)
    match method_of(spec):
        case Full():
            return Numbers(computed, 4, True, adapted, rounded=rounds, attention=attention, cpu=cpu, parts=parts)
        case OFT() as rotation:
            return Numbers(
                computed,
                computed,
                False,
                adapted,
                rotation=rotation,
                attention=attention,
                cpu=cpu,
                parts=parts and not rotation.modules_to_save,  # which may be norms
            )
        case LoRA() | QLoRA() as method:
            return Numbers(
                computed,
                computed,
                False,
                adapted,
                rank=method.computed_rank,
                dropout=0 if not method.lora_dropout else computed if device.kind == "cpu" else 1,
                dora=method.use_dora,
                fused=isinstance(spec.quantization, NF4 | Int8),
                rounded=rounds,
                attention=attention,
                cpu=cpu,
                parts=parts and not method.modules_to_save,  # which may be norms
            )
        case _ as never:
            assert_never(never)
