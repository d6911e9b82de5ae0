"""What `method: auto` may come to: each method of the cascade as a whole job, or why it is none of this job's.

Full fine-tuning, LoRA (arXiv:2106.09685), LoRA over 8 bits, QLoRA (arXiv:2305.14314), and QLoRA with its blocks
streamed: each needs less memory than the one before it. Each stands here as it is, and once more with gradient
checkpointing, which changes no result: a method is not given up for the sake of activations. Pure; whether one fits is
core/jobs/admission/auto_method.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from core.plan.compatibility import check
from core.spec.axes.method import Auto, Full, LoRA, QLoRA, SettledMethod
from core.spec.axes.quantization import NF4, Int8, NoQuantization, Quantization
from core.spec.axes.runtime import AutoStream, DiskStream, HostStream, NoStream
from core.spec.job import JobSpec
from core.spec.resolve import resolve

FULL, LORA, LORA_INT8, QLORA, STREAMED = "full", "lora", "lora over int8", "qlora", "streamed"
CHECKPOINTED = " with gradient checkpointing"


@dataclass(frozen=True, slots=True)
class Rung:
    """One method of the cascade."""

    name: str
    spec: JobSpec | None
    """The job with this method, resolved; None: it cannot have it."""
    reason: str = ""
    """Why not."""


def rungs(spec: JobSpec) -> list[Rung]:
    """In their order, of a job with `method: auto`; of any other the job itself, alone."""
    if not isinstance(spec.method, Auto):
        return [Rung(spec.method.type, spec)]
    return list(_rungs(spec, spec.method))


def _rungs(spec: JobSpec, auto: Auto) -> Iterator[Rung]:
    options = auto.model_dump(exclude={"type"})
    asked, stream = spec.quantization, spec.memory.stream
    lora, qlora = LoRA(**options), QLoRA(**options)
    as_asked = isinstance(stream, HostStream | DiskStream)
    resident: dict[str, Any] = {} if as_asked else {"stream": NoStream()}
    natural: tuple[tuple[str, SettledMethod, Quantization], ...] = (
        (FULL, Full(), NoQuantization()),
        (LORA, lora, NoQuantization()),
        (LORA_INT8, lora, Int8()),
        (QLORA, qlora, NF4()),
    )
    for name, method, packing in natural:
        if asked is not None and asked.type != packing.type:
            yield Rung(name, None, f"`quantization: {asked.type}` is asked for")
            continue
        rung = _rung(name, spec, method, asked or packing, resident)
        yield rung
        if rung.spec is not None and not (as_asked or spec.memory.gradient_checkpointing is True):
            twice = resident | {"gradient_checkpointing": True}
            yield _rung(f"{name}{CHECKPOINTED}", spec, method, asked or packing, twice)
    if as_asked:
        yield Rung(STREAMED, None, f"`memory.stream: {stream.type}` is asked for, with each of the others")
        return
    slots = stream if isinstance(stream, AutoStream) else AutoStream()
    last = _rung(
        STREAMED, spec, lora if isinstance(asked, NoQuantization) else qlora, asked or NF4(), {"stream": slots}
    )
    if last.spec is None and asked is None:  # packed weights may be what is refused
        dense = _rung(STREAMED, spec, lora, NoQuantization(), {"stream": slots})
        last = last if dense.spec is None else dense
    yield last


def _rung(name: str, spec: JobSpec, method: SettledMethod, packing: Quantization, memory: dict[str, Any]) -> Rung:
    memories = spec.memory.model_copy(update=memory)
    tried = resolve(spec.model_copy(update={"method": method, "quantization": packing, "memory": memories}))
    refused = check(tried)
    return Rung(name, None, refused[0].message) if refused else Rung(name, tried)
