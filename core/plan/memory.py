"""The memory plan of a job: bytes by kind, on the device, on the host and on disk, before anything is loaded. No torch.

A run is at its most at one of four moments, and the plan is the largest of them: when the backward begins (everything
is kept), when it ends (all gradients are there), in the optimizer's step, and while evaluating (whole logits).
docs/memory.md has the formula in a table; `python -m bench.plan` holds it against what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, assert_never

from core.plan.activations import Numbers, Pass, kept, passed, worked
from core.plan.device import CHUNK_BYTES, SCRATCH_BYTES, SLACK_BYTES, Device
from core.plan.shape import Selected, Shape, Weight
from core.plan.stream import MARGIN, Decision, Free, Need, settle
from core.spec.job import JobSpec
from core.spec.runtime import AutoStream, DiskStream, HeldOut, HostStream, NoStream
from core.spec.settled import method_of
from core.spec.training import NF4, Full, Int8, LoRA, NoQuantization, Packed, QLoRA, Rows, Tokens

ALIGNMENT = 256
"""Between the streamed tensors of a block (core/train/memory/blocks.py)."""
WHOLE_LOGITS_BYTES = 256 << 20
"""Float32 logits up to which a trained head runs on all label tokens at once (core/train/stages/sft.py)."""
PROCESS_BYTES = 1536 << 20
"""Of the host, what a trainer takes before it has a model: Python, torch, transformers, the driver's mappings."""


@dataclass(frozen=True, slots=True)
class Item:
    kind: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    device: tuple[Item, ...]
    """On the device at the moment at which it holds most. Kinds: weights, adapter, gradients, optimizer, activations,
    logits, slots, scratch, slack."""
    moment: str
    """Which one: `backward begins`, `backward ends`, `step` or `evaluation`."""
    moments: dict[str, int]
    """Bytes of each."""
    host: tuple[Item, ...]
    """In the host's memory, beside the device's own where that is the CPU."""
    disk: tuple[Item, ...]
    rows: int
    """Rows of the largest forward pass; with a budget of tokens, as many of the longest as fit."""
    tokens: int
    """Tokens of it, padding counted."""
    field: str
    """The field that decides `tokens`."""
    parameters: int
    trained: int
    """Of them, or beside them, what is trained."""
    precision: str
    stream: Decision
    one_memory: bool

    @property
    def peak(self) -> int:
        """Bytes that must fit into the device's memory; on a CPU with what is kept aside, which is the same memory."""
        return sum(item.bytes for item in self.device) + (self.host_bytes if self.one_memory else 0)

    @property
    def host_bytes(self) -> int:
        return sum(item.bytes for item in self.host)

    @property
    def disk_bytes(self) -> int:
        return sum(item.bytes for item in self.disk)

    @property
    def bytes(self) -> dict[str, int]:
        """On the device, by kind."""
        return {item.kind: item.bytes for item in self.device}

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {
            "peak": self.peak,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }


def fits(plan: Plan, free: int | None) -> bool:
    """Whether the device has room for it with MARGIN to spare; where nobody can tell, it has."""
    return free is None or plan.peak <= MARGIN * free


def largest_pass(spec: JobSpec, longest: int) -> tuple[int, str]:
    """(tokens of the largest forward pass, padding counted; the field that says so)."""
    tokens, field = training_pass(spec, longest)
    if isinstance(spec.evaluation, HeldOut):
        held_out = spec.evaluation.per_device_eval_batch_size * longest, "evaluation.per_device_eval_batch_size"
        return max((tokens, field), held_out)
    return tokens, field


def training_pass(spec: JobSpec, longest: int) -> tuple[int, str]:
    """The same of passes that are trained on."""
    match spec.batching:
        case Rows():
            return spec.training.per_device_train_batch_size * longest, "training.per_device_train_batch_size"
        case Tokens(tokens_per_batch=budget) | Packed(tokens_per_batch=budget):
            return max(budget, longest), "batching.tokens_per_batch"
        case _ as never:
            assert_never(never)


def plan(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Plan:
    """What the job takes on this device. `longest`: tokens of its longest row (`training.max_length`, until the rows
    have been read). The spec's dependent defaults must be filled in (core/spec/resolve.py). `memory.stream: auto` is
    settled by what the device and its host have. SpecError where the spec names modules that the model does not have.
    """
    match spec.memory.stream:
        case AutoStream() as asked:
            resident = _plan(spec, shape, longest, device, Decision("none", 0, False, "all on the device"))
            decision = settle(
                asked,
                need(spec, shape, longest=longest, device=device),
                Free(device=device.usable, host=device.host, one_memory=device.one_memory),
            )
            if decision.where == "none":
                return replace(resident, stream=decision)
            return _plan(spec, shape, longest, device, decision)
        case NoStream() | HostStream() | DiskStream() as asked:
            decision = settle(asked, None, Free(None, None, device.one_memory))
            return _plan(spec, shape, longest, device, decision)
        case _ as never:
            assert_never(never)


def need(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Need | None:
    """What decides whether the blocks are streamed; None where nothing can be: all is trained, or there are no
    blocks."""
    if isinstance(method_of(spec), Full) or not shape.layers:
        return None
    held = _held(spec, shape, device)
    resident = _plan(spec, shape, longest, device, Decision("none", 0, False, ""))
    streamed = _plan(spec, shape, longest, device, Decision("host", 1, True, ""))
    trained = held.adapter * 4
    beside = held.stays + trained
    return Need(
        blocks=sum(held.aligned),
        largest_block=held.largest,
        outside=held.stays,
        trained=trained,
        working=sum(item.bytes for item in resident.device) - sum(held.aligned) - beside,
        working_streamed=sum(item.bytes for item in streamed.device) - held.largest - beside,
        of=shape.layers,
    )


# --- weights ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of what lies somewhere for the whole run."""

    outside: int
    """Base weights in no block."""
    frozen: tuple[int, ...]
    """Of each block, the base weights that would be streamed."""
    aligned: tuple[int, ...]
    """The same as they lie in a slot."""
    still: int
    """Of all blocks, the base weights that would not: norms, biases, tables of packed layers."""
    adapter: int
    """Adapter weights in float32."""
    tensors: int
    """Trained tensors: each has a counter of steps."""
    trained: int
    """Trained parameters."""
    dense: int
    """Packed weights, unpacked into the precision of products."""
    largest_dense: int
    """The largest of them."""
    adapted: tuple[frozenset[str], ...]
    """Of each block, the linear layers with an adapter."""

    @property
    def stays(self) -> int:
        return self.outside + self.still

    @property
    def weights(self) -> int:
        """All base weights."""
        return self.stays + sum(self.frozen)

    @property
    def largest(self) -> int:
        return max(self.aligned, default=0)


@dataclass(slots=True)
class _Part:
    """Bytes of the base weights of a block, or of what is in none."""

    frozen: int = 0
    aligned: int = 0
    still: int = 0
    dense: int = 0
    largest_dense: int = 0


def _held(spec: JobSpec, shape: Shape, device: Device) -> _Held:
    method = method_of(spec)
    full = isinstance(method, Full)
    width = 4 if full or device.precision(spec.training) == "fp32" else 2
    pack, packed = _packing(spec, shape), _packed(spec, shape)
    outside = _measure(shape.outside, packed[0], pack, width)
    blocks = [_measure(block, names, pack, width) for block, names in zip(shape.blocks, packed[1], strict=True)]
    targets: Selected = (frozenset(), (frozenset(),) * shape.layers)
    count = tensors = 0
    if not isinstance(method, Full):
        targets = shape.targets(method)
        for part, names in zip((shape.outside, *shape.blocks), (targets[0], *targets[1]), strict=True):
            for weight in part:
                if weight.kind == "linear" and weight.module in names:
                    count += method.r * (weight.inputs + weight.outputs) + (weight.outputs if method.use_dora else 0)
                    tensors += 3 if method.use_dora else 2
    return _Held(
        outside=outside.frozen + outside.still,
        frozen=tuple(block.frozen for block in blocks),
        aligned=tuple(block.aligned for block in blocks),
        still=sum(block.still for block in blocks),
        adapter=4 * count,
        tensors=len(shape.outside) + sum(len(block) for block in shape.blocks) if full else tensors,
        trained=shape.parameters if full else count,
        dense=sum(part.dense for part in (outside, *blocks)),
        largest_dense=max(part.largest_dense for part in (outside, *blocks)),
        adapted=targets[1],
    )


def _measure(part: Iterable[Weight], packed: frozenset[str], pack: _Packing | None, width: int) -> _Part:
    """`width`: bytes of a number that is not packed."""
    found = _Part()
    for weight in part:
        if pack is not None and weight.kind == "linear" and weight.module in packed:
            tensors, beside = pack.bytes(weight.numel)
            found.still += beside
            found.dense += weight.numel * width
            found.largest_dense = max(found.largest_dense, weight.numel * width)
        elif len(weight.shape) >= 2:
            tensors = (weight.numel * width,)
        else:
            tensors = ()
            found.still += weight.numel * width
        found.frozen += sum(tensors)
        found.aligned += sum(-(-size // ALIGNMENT) * ALIGNMENT for size in tensors)
    return found


@dataclass(frozen=True, slots=True)
class _Packing:
    bits: int
    block: int
    double: bool

    def bytes(self, numel: int) -> tuple[tuple[int, ...], int]:
        """(of elements and scales, each a tensor; of the table and offset beside them): `core.train.quant.layout`."""
        elements, scales = -(-numel * self.bits // 8), -(-numel // self.block)
        if self.double:
            return (elements, scales, 4 * -(-scales // 256)), 4 * 256 + 4
        return (elements, 4 * scales), 0


def _packing(spec: JobSpec, shape: Shape) -> _Packing | None:
    match spec.quantization:
        case NF4(double=double):
            return _Packing(4, 64, shape.packed_double if shape.packed else double)
        case Int8(block_size=block):
            return _Packing(8, block, False)
        case None | NoQuantization():
            return _Packing(4, 64, shape.packed_double) if shape.packed else None
        case _ as never:
            assert_never(never)


def _packed(spec: JobSpec, shape: Shape) -> Selected:
    """The linear layers with packed weights."""
    if isinstance(spec.quantization, NF4 | Int8) and not shape.packed:
        return shape.packable(spec.quantization.skip_modules)
    if not shape.packed:
        return frozenset(), (frozenset(),) * shape.layers
    return (
        frozenset(weight.module for weight in shape.outside if weight.dtype == "NF4"),
        tuple(frozenset(weight.module for weight in block if weight.dtype == "NF4") for block in shape.blocks),
    )


# --- the moments -----------------------------------------------------------------------------------------


def _plan(spec: JobSpec, shape: Shape, longest: int, device: Device, stream: Decision) -> Plan:
    held = _held(spec, shape, device)
    precision = device.precision(spec.training)
    tokens, field = training_pass(spec, longest)
    what = Pass(tokens, longest)
    streams = stream.where != "none"
    slots = min(stream.slots, shape.layers) * held.largest
    weights = held.stays if streams else held.weights
    each = [_numbers(spec, device, names) for names in held.adapted] or [_numbers(spec, device, frozenset())]
    blocks = list(zip(shape.blocks, each, strict=False))
    one = max((kept(shape, block, numbers, what) for block, numbers in blocks), default=0)
    work = max((worked(shape, block, numbers, what) for block, numbers in blocks), default=0)
    inputs = shape.layers * each[0].residual * shape.hidden * tokens
    checkpointed = spec.memory.gradient_checkpointing or streams
    everything = sum(kept(shape, block, numbers, what) for block, numbers in blocks)
    ends = each[0].residual * shape.hidden * tokens
    at_begin = inputs + one if checkpointed else everything
    at_end = one + (ends if checkpointed else 0)
    casts = _casts(shape, held, each[0])
    gradients = 4 * held.trained
    optimizer = 8 * held.trained + 4 * held.tensors
    scratch = max(held.largest_dense, min(SCRATCH_BYTES[device.kind], held.dense))
    loss = _loss(shape, each[0], tokens, device)
    always = [
        Item("weights", weights, _weights_why(spec, shape, streams)),
        Item("adapter", held.adapter, "in float32"),
        Item("slots", slots, f"{stream.slots} of the largest block"),
        Item("optimizer", optimizer, "AdamW: two means in float32 and a counter a tensor"),
        Item("scratch", scratch, "dense copies of packed weights for the moment of a product"),
        Item("slack", SLACK_BYTES[device.kind], "the matrix libraries' buffers, the allocator's gaps"),
    ]
    accumulated = gradients if spec.training.gradient_accumulation_steps > 1 or spec.resources.gpus > 1 else 0
    moments = {
        "backward begins": [
            Item("gradients", accumulated, "of the micro-batches before, in float32"),
            Item("activations", at_begin + work + casts, _kept_why(checkpointed, what)),
            Item("logits", loss, "a chunk of them, or all where the head is trained and they are few"),
        ],
        "backward ends": [
            Item("gradients", gradients, "of all that is trained, in float32"),
            Item("activations", at_end + work, "of the first block"),
        ],
        "step": [Item("gradients", gradients, "of all that is trained, in float32"), *_reducing(spec)],
    }
    if isinstance(spec.evaluation, HeldOut):
        held_out = Pass(spec.evaluation.per_device_eval_batch_size * longest, longest)
        moments["evaluation"] = [
            Item("activations", passed(shape, each[0], held_out) + casts, "of one block, nothing kept"),
            Item("logits", (8 + each[0].computed) * shape.vocab * held_out.tokens, "all of them, in float32 too"),
        ]
    totals = {name: sum(item.bytes for item in items) for name, items in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    fixed = sum(item.bytes for item in always)
    return Plan(
        device=tuple(item for item in (*always, *moments[moment]) if item.bytes),
        moment=moment,
        moments={name: fixed + total for name, total in totals.items()},
        host=tuple(item for item in _host(held, device, stream) if item.bytes),
        disk=tuple(item for item in _disk(spec, shape, held, stream) if item.bytes),
        rows=max(1, tokens // longest),
        tokens=tokens,
        field=field,
        parameters=shape.parameters,
        trained=held.trained,
        precision=precision,
        stream=stream,
        one_memory=device.one_memory,
    )


def _numbers(spec: JobSpec, device: Device, adapted: frozenset[str]) -> Numbers:
    computed = 4 if device.precision(spec.training) == "fp32" else 2
    attention = device.attention(spec.training)
    match method_of(spec):
        case Full():
            return Numbers(computed, 4, True, adapted, attention=attention)
        case LoRA() | QLoRA() as method:
            return Numbers(
                computed,
                computed,
                False,
                adapted,
                rank=method.r,
                dropout=method.lora_dropout > 0,
                dora=method.use_dora,
                fused=spec.quantization is not None and not isinstance(spec.quantization, NoQuantization),
                attention=attention,
            )
        case _ as never:
            assert_never(never)


def _casts(shape: Shape, held: _Held, numbers: Numbers) -> int:
    """What autocast keeps of trained matrices, rounded to the precision of products, from a forward to its end."""
    if numbers.computed == 4:
        return 0
    if not numbers.trained:
        return 0 if numbers.fused else held.adapter // 2
    return 2 * sum(weight.numel for block in shape.blocks for weight in block if len(weight.shape) >= 2)


def _loss(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    """Hidden states of the label tokens with their gradient, and logits; every token is taken to have a label."""
    whole = 4 * shape.vocab * tokens
    hidden = (2 * numbers.residual + 4) * shape.hidden * tokens
    if numbers.trained and whole <= WHOLE_LOGITS_BYTES:
        return hidden + 3 * whole + (2 * shape.vocab * tokens if numbers.computed == 2 else 0)
    chunk = min(CHUNK_BYTES[device.kind], whole)
    head = 4 * shape.vocab * shape.hidden * 2 if numbers.trained else 0
    return hidden + 2 * chunk + head


def _reducing(spec: JobSpec) -> Iterable[Item]:
    if spec.resources.gpus > 1:
        yield Item("scratch of ranks", 2 * (32 << 20), "two buckets of gradients on their way")


def _weights_why(spec: JobSpec, shape: Shape, streams: bool) -> str:
    if isinstance(method_of(spec), Full):
        return "all of them in float32"
    how = (
        "as the files have them packed"
        if shape.packed
        else f"quantization {spec.quantization and spec.quantization.type}"
    )
    return f"what stays on the device; {how}" if streams else f"of the base model; {how}"


def _kept_why(checkpointed: bool, what: Pass) -> str:
    if checkpointed:
        return f"every block's input and one block's inside, {what.tokens} tokens"
    return f"what every block keeps, {what.tokens} tokens"


# --- elsewhere -------------------------------------------------------------------------------------------


def _host(held: _Held, device: Device, stream: Decision) -> Iterable[Item]:
    if not device.one_memory:
        yield Item("process", PROCESS_BYTES, "Python, torch, transformers")
    match stream.where:
        case "none":
            if not device.one_memory:
                yield Item("loading", held.weights, "the weights on their way to the device")
        case "host":
            yield Item("blocks", sum(held.aligned), "the frozen blocks, streamed from here")
        case "disk":
            if not device.one_memory:
                yield Item("staging", 2 * held.largest, "two blocks on their way from disk")
        case _ as never:
            assert_never(never)


def _disk(spec: JobSpec, shape: Shape, held: _Held, stream: Decision) -> Iterable[Item]:
    one = 16 * held.trained
    yield Item(
        "checkpoints",
        one * (spec.checkpoint.keep_last + 1),
        f"{spec.checkpoint.keep_last} are kept while the next is written; weights, optimizer, gradients",
    )
    if isinstance(spec.evaluation, HeldOut) and spec.evaluation.load_best_model_at_end:
        yield Item("best weights", 2 * 4 * held.trained, "of the best evaluation, and of the one before")
    whole = held.weights
    if stream.where == "disk":
        yield Item("image", whole, "the blocks as they are streamed, kept in the cache")
    elif isinstance(spec.quantization, NF4 | Int8) and not shape.packed:
        yield Item("packed weights", whole, "kept in the cache for further runs")
    size = shape.parameters * shape.file_bits // 8
    yield Item("result", size if isinstance(method_of(spec), Full) else 4 * held.trained, "what the job hands back")
    for export in spec.export:
        wide = export.dtype == "fp32"
        yield Item("export", shape.parameters * (4 if wide else 2), f"`{export.type}`: the whole model")
