"""Whether a job fits the slots here, by the plan of its memory, and what would make it fit.

What decides is the least that a job can come to: the last rung of `method: auto`, the smallest micro-batch that the
service would cut it to by itself (core/jobs/admission/oom_backoff.py), blocks in files where they may be streamed. Only
what does not fit even then, with what a plan may be wrong by, is refused: a plan is an estimate, and the rest is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from core.errors import SpecError
from core.jobs.admission import oom_backoff
from core.jobs.base.slots import LEAST, MB, Key, Needs, PlanNeeds, Slot
from core.jobs.kinds import Kind
from core.jobs.scheduling.cluster import SlotState
from core.plan.candidates import candidates
from core.plan.compatibility import check
from core.plan.device import CONTEXT_BYTES, Device
from core.plan.memory.plan import plan
from core.plan.memory.result import Plan
from core.plan.models.shape import Shape
from core.plan.steps import BATCH
from core.spec.axes.method import Auto, Full, LoRA, QLoRA
from core.spec.axes.quantization import NF4, QAT, Int8, packing_of
from core.spec.axes.runtime import AutoStream, DiskStream, HostStream
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.session.job import is_session

GPU, CPU = Slot("", "gpu", "amd", "gfx942"), Slot("", "cpu")
"""What is planned for where no such slot is known."""
FEWER_SLOTS = "`memory.stream.slots: 1`"
SHORTEST = 64
"""Tokens; no shorter rows are proposed."""
DIGITS = 5
"""Binary digits of a need that count, the rest is cut off: what takes nearly the same (another max_length, another
file) stands in one line, since a look at the queue costs as much as it has lines."""
PASSING = ("process", "loading")
"""Host memory of every run, or mapped from the model's files, which the kernel can let go."""


class FitsNowhere(SpecError):
    """By the plan of its memory the job fits none of the slots here."""

    code = "fits_nowhere"


def device_of(slot: Slot) -> Device:
    """What a plan is made for."""
    on_cpu = slot.kind == "cpu"
    return Device(
        kind="cpu" if on_cpu else "gpu",
        arch="cpu" if on_cpu else slot.arch,
        vendor=slot.vendor or "any",
        memory=slot.device_bytes or None,
        host=slot.host_bytes or None,
        bf16=slot.bf16,
        context=True,
        parts=slot.parts,
    )


def needs(spec: JobSpec, shape: Shape, longest: int, slots: Iterable[Slot]) -> PlanNeeds | None:
    """The least that the job can come to; None where the model's files allow nothing that it asks for. `slots`: those
    of this installation, for their architectures. SpecError as of `plan`."""
    kinds = {(slot.kind, slot.arch): slot for slot in (CPU, *slots)}
    gpus = [slot for slot in kinds.values() if slot.kind == "gpu"] or [GPU]
    on_gpu = _smallest(plan for slot in gpus for plan in _leasts(spec, shape, longest, slot))
    on_cpu = _smallest(_leasts(spec, shape, longest, CPU))
    if on_gpu is None or on_cpu is None:
        return None
    host = sum(item.bytes for item in on_gpu.host if item.kind not in PASSING)
    return PlanNeeds(*map(_coarse, (on_gpu.peak + CONTEXT_BYTES, on_cpu.peak, host)))


def _coarse(count: int) -> int:
    """In MB, up to 6 % less: never so that what fits is refused."""
    megabytes = -(-count // MB)
    spare = max(0, megabytes.bit_length() - DIGITS)
    return megabytes >> spare << spare


def sought(spec: JobSpec, shape: Shape, longest: int, slots: Sequence[Slot]) -> PlanNeeds | None:
    """What a slot must have for the job to start there: the least by its plan or, where none of those that have all
    else has as much, what of it is certain. None, SpecError as of `needs`."""
    takes, asks = needs(spec, shape, longest, slots), Needs.of(spec.resources)
    able = [slot for slot in slots if not asks.missing(slot)]
    if takes is None or not able or any(not takes.missing(slot) for slot in able):
        return takes
    return takes.certain if any(not takes.certain.missing(slot) for slot in able) else takes


def planned(key: Key, spec: JobSpec, shape: Shape, longest: int, slots: Sequence[Slot]) -> Key:
    """The line of a job whose model is known. SpecError as of `plan`."""
    return replace(key, needs=replace(key.needs, plan=sought(spec, shape, longest, slots)))


def _smallest(plans: Iterable[Plan]) -> Plan | None:
    return min(plans, key=lambda one: one.peak, default=None)


def _leasts(spec: JobSpec, shape: Shape, longest: int, slot: Slot) -> Iterator[Plan]:
    for rung in candidates(spec):
        if rung.spec is not None and ruled_out(rung.spec, shape) is None:
            yield plan(lightest(_in_files(rung.spec)), shape, longest=longest, device=device_of(slot))


def lightest(spec: JobSpec) -> JobSpec:
    """With the smallest batches, of training and of evaluations, that it would be cut to for want of memory."""
    for field in (BATCH, oom_backoff.EVAL_BATCH):
        while (changes := oom_backoff.smaller(spec, field)) is not None:
            spec = oom_backoff.apply(spec, changes)
    return spec


def ruled_out(spec: JobSpec, shape: Shape) -> str | None:
    """Why the model's own files rule the method out; None: they do not."""
    if shape.packed and isinstance(spec.method, Full):
        return "the model's files are packed (NF4), and packed weights cannot be trained"
    if shape.packed and spec.quantization is not None and spec.quantization.type == "int8":
        return "the model's files are packed already (NF4)"
    if isinstance(spec.quantization, QAT):
        return _unrounded(shape)
    return None


def _unrounded(shape: Shape) -> str | None:
    """Why the model's linear layers cannot be rounded."""
    if shape.packed:
        return "the model's files are packed (NF4), and `quantization: qat` rounds 16-bit weights"
    weights = [weight for pattern in shape.patterns for weight in pattern]
    if any(weight.kind == "experts" for weight in weights):
        return "its experts are fused, and `quantization: qat` does not round mixtures of experts"
    if any(weight.transposed for weight in weights):
        return "its linear layers are transposed (models of the GPT-2 kind), which `quantization: qat` does not round"
    return None


def _in_files(spec: JobSpec) -> JobSpec:
    stream = spec.memory.stream
    if not isinstance(stream, AutoStream) or isinstance(spec.method, Full):
        return spec
    files = DiskStream(slots=1, pinned=stream.pinned)
    return spec.model_copy(update={"memory": spec.memory.model_copy(update={"stream": files})})


# --- refusals --------------------------------------------------------------------------------------------


def refusal(spec: JobSpec, shape: Shape, longest: int, seats: Sequence[SlotState]) -> SpecError | None:
    """Why the job cannot run with this model, or fits none of the slots that have all else that it asks for, with what
    would make it fit; None where one may take it, or none is there at all. SpecError as of `plan`."""
    if (wrong := _wrong_stream(spec, shape)) is not None:
        return wrong
    asks, there = Needs.of(spec.resources), [seat for seat in seats if seat.slot.phase == Kind.TRAIN]
    able = [seat for seat in there if not asks.missing(seat.slot)]
    takes = sought(spec, shape, longest, [seat.slot for seat in there])
    if takes is None:
        why = next((why for rung in candidates(spec) if rung.spec and (why := ruled_out(rung.spec, shape))), "")
        if isinstance(spec.quantization, QAT):
            return SpecError(f"{why}; name another model, or remove `quantization`", field="quantization")
        return SpecError(f"{why}; train adapters over them (`method: qlora`)", field="method")
    if not able or any(not takes.missing(seat.slot) for seat in able):
        return None
    most = max(able, key=lambda seat: seat.slot.device_bytes)
    lacks = " and ".join(takes.missing(most.slot))
    which = "the one slot that could take it" if len(able) == 1 else f"none of the {len(able)} slots that could take it"
    has = f"{which} has {gb(most.slot.device_bytes)} ({most.label})"
    if len(able) > 1:
        has = f"{which} has that; {most.label}, the largest, has {gb(most.slot.device_bytes)}"
    found = proposals(spec, shape, longest, able)
    ways = ", or ".join([*found, f"a slot with {lacks.replace(f' {LEAST}', '')}"])
    fewer, session = FEWER_SLOTS in found, is_session(spec)
    field = "memory" if spec.method.type in ("qlora", "auto") else "method"
    if session and not isinstance(spec.method, Full):
        field = "quantization"
    return FitsNowhere(
        f"this {'session' if session else 'job'} needs {lacks}, and {has}. What would fit: {ways}. A plan is an "
        "estimate: EFT_MEMORY_CHECK=false, set by who runs eft, lets jobs try",
        field="memory.stream.slots" if fewer else field,
        code="slots_do_not_fit" if fewer else None,
    )


def _wrong_stream(spec: JobSpec, shape: Shape) -> SpecError | None:
    """What about the model's blocks rules out the streaming that is asked for; the trainer would find the same."""
    stream = spec.memory.stream
    if not isinstance(stream, HostStream | DiskStream):
        return None
    if not shape.layers:
        return SpecError(
            "the model has no list of blocks that could be streamed; leave `memory.stream` out",
            field="memory.stream",
            code="blocks_not_found",
        )
    if stream.slots > shape.layers:
        return SpecError(
            f"the model has {shape.layers} blocks, and {stream.slots} slots would hold more than all of them; take "
            "fewer, or leave `memory.stream` out",
            field="memory.stream.slots",
            code="more_slots_than_blocks",
        )
    return None


def proposals(spec: JobSpec, shape: Shape, longest: int, seats: Sequence[SlotState]) -> list[str]:
    """Changes of the job with which it would fit one of these slots, the smallest first; at most three."""
    slots = [seat.slot for seat in seats]

    def fits(changed: JobSpec) -> bool:
        if check(changed) or ruled_out(changed, shape) is not None:
            return False
        planned = needs(changed, shape, min(longest, changed.training.max_length), slots)
        return planned is not None and any(not planned.missing(slot) for slot in slots)

    found = [words for words, changed in _other_memory(spec) if fits(changed)]
    *_, (words, smallest) = [("", spec), *_other_memory(spec)]
    for prefix, base in (("", spec), (f"{words} and ", smallest)):
        if prefix and (found or not words):
            break
        for length, changed in _shorter(base, longest):
            if fits(changed):
                found.append(f"{prefix}`training.max_length: {length}`")
                break
    return found[:3]


def _other_memory(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """The same rows in less memory, in words and as a job; the last one takes the least."""
    method, memory = spec.method, spec.memory
    if isinstance(method, Auto):
        return
    if is_session(spec):
        yield from _other_base(spec)
        return
    if memory.gradient_checkpointing is not True and memory.stream.type == "none":
        less = memory.model_copy(update={"gradient_checkpointing": True})
        yield "`memory.gradient_checkpointing: true`", spec.model_copy(update={"memory": less})
    words, smaller = [], spec
    if isinstance(memory.stream, HostStream | DiskStream) and memory.stream.slots > 1:
        one = memory.stream.model_copy(update={"slots": 1})
        smaller = _with(spec, memory=memory.model_copy(update={"stream": one}))
        yield FEWER_SLOTS, smaller
    if isinstance(memory.stream, HostStream):
        files = DiskStream(slots=1, pinned=memory.stream.pinned)
        smaller = _with(spec, memory=memory.model_copy(update={"stream": files}))
        yield "`memory.stream: disk`", smaller
    if isinstance(method, Full):
        smaller = _with(spec, method=LoRA())
        yield "`method: lora`", smaller
    if isinstance(method, Full | LoRA):
        words = ["`method: qlora`"]
        options = {} if isinstance(method, Full) else method.model_dump(exclude={"type"})
        smaller = _with(smaller, method=QLoRA(**options), quantization=NF4())
        yield words[0], smaller
    if memory.stream.type == "none":
        words.append("`memory.stream: auto`")
        yield " and ".join(words), _with(smaller, memory=memory.model_copy(update={"stream": AutoStream()}))


def _other_base(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """`_other_memory` of a session: what its own form has for it."""
    before = ""
    if isinstance(spec.method, Full):
        spec, before = _with(spec, method=LoRA()), "`method: lora` and "
        yield "`method: lora`", spec
    if packing_of(spec.quantization) is None:
        for weights in (Int8(), NF4()):
            yield f"{before}`quantization: {weights.type}`", _with(spec, quantization=weights)


def _with(spec: JobSpec, **axes: Any) -> JobSpec:
    return resolve(spec.model_copy(update=axes))


def _shorter(spec: JobSpec, longest: int) -> Iterator[tuple[int, JobSpec]]:
    length = 1 << max(0, (longest - 1).bit_length() - 1)
    while length >= SHORTEST:
        yield length, _with(spec, training=spec.training.model_copy(update={"max_length": length}))
        length //= 2


def gb(count: float) -> str:
    """Bytes in the words of a refusal or a reason."""
    return f"{count / 1e9:.3g} GB"
