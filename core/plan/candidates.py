"""The candidates of `method: auto`: each method of the cascade as a whole job, or why this job cannot use it.

Full fine-tuning, LoRA (arXiv:2106.09685), LoRA over 8 bits, QLoRA (arXiv:2305.14314), and QLoRA with its blocks
streamed: each needs less memory than the one before it. Each stands here as it is, and once more with gradient
checkpointing, which changes no result: a method is not given up for the sake of activations. Pure; whether one fits is
core/jobs/admission/auto_method.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.plan.advice import FAR_RATE
from core.plan.compatibility import check
from core.spec.axes.method import Auto, Full, LoRA, QLoRA, SettledMethod
from core.spec.axes.quantization import NF4, Int8, NoQuantization, Quantization
from core.spec.axes.runtime import AutoStream, DiskStream, HostStream, NoStream
from core.spec.job import JobSpec
from core.spec.resolve import default_rates, resolve

FULL, LORA, LORA_INT8, QLORA, STREAMED = "full", "lora", "lora over int8", "qlora", "streamed"
CHECKPOINTED = " with gradient checkpointing"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method that `method: auto` may choose."""

    name: str
    spec: JobSpec | None
    """The job with this method, resolved; None: the job cannot use it."""
    reason: str = ""
    """The reason where `spec` is None."""


def candidates(spec: JobSpec) -> list[Candidate]:
    """The candidates of a job with `method: auto`, in their order; for any other job, the job itself."""
    if not isinstance(spec.method, Auto):
        return [Candidate(spec.method.type, spec)]
    return list(_candidates(spec, spec.method))


def _candidates(spec: JobSpec, auto: Auto) -> Iterator[Candidate]:
    options = auto.model_dump(exclude={"type"})
    asked, stream = spec.quantization, spec.memory.stream
    lora, qlora = LoRA(**options), QLoRA(**options)
    as_asked = isinstance(stream, HostStream | DiskStream)
    resident: dict[str, Any] = {} if as_asked else {"stream": NoStream()}
    rate, (adapters, full) = spec.optimizer.learning_rate, default_rates(spec)
    natural: tuple[tuple[str, SettledMethod, Quantization], ...] = (
        (FULL, Full(), NoQuantization()),
        (LORA, lora, NoQuantization()),
        (LORA_INT8, lora, Int8()),
        (QLORA, qlora, NF4()),
    )
    for name, method, packing in natural:
        if asked is not None and asked.type != packing.type:
            yield Candidate(name, None, f"`quantization: {asked.type}` is asked for")
            continue
        if isinstance(method, Full) and rate is not None and full < adapters and rate >= FAR_RATE * full:
            words = f"`optimizer.learning_rate: {rate:g}` is one of adapters: the default for all weights is {full:g}"
            yield Candidate(name, None, words)
            continue
        rung = _candidate(name, spec, method, asked or packing, resident)
        yield rung
        if rung.spec is not None and not (as_asked or spec.memory.gradient_checkpointing is True):
            twice = resident | {"gradient_checkpointing": True}
            yield _candidate(f"{name}{CHECKPOINTED}", spec, method, asked or packing, twice)
    if as_asked:
        yield Candidate(STREAMED, None, f"`memory.stream: {stream.type}` is asked for, with each of the others")
        return
    slots = stream if isinstance(stream, AutoStream) else AutoStream()
    last = _candidate(
        STREAMED, spec, lora if isinstance(asked, NoQuantization) else qlora, asked or NF4(), {"stream": slots}
    )
    if last.spec is None and asked is None:  # packed weights may be what is refused
        dense = _candidate(STREAMED, spec, lora, NoQuantization(), {"stream": slots})
        last = last if dense.spec is None else dense
    yield last


def _candidate(
    name: str, spec: JobSpec, method: SettledMethod, packing: Quantization, memory: dict[str, Any]
) -> Candidate:
    memories = spec.memory.model_copy(update=memory)
    tried = resolve(spec.model_copy(update={"method": method, "quantization": packing, "memory": memories}))
    refused = check(tried)
    return Candidate(name, None, refused[0].message) if refused else Candidate(name, tried)
