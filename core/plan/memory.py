"""The memory plan of a job: bytes by kind, on the device, on the host and on disk, before anything is loaded. No torch.

The peak of a run is at one of eight moments, and the plan is the largest of them: while the reference of a stage is
computed, in the loss, when the backward begins (everything is kept), when it ends (all gradients are there), in the
optimizer's step, while evaluating, while answers are sampled, and while reward models score them. Measuring held-out
rows never needs more than training, nor does the reference: their passes are no larger, and their logits are chunks,
too.
docs/plans.md has the formula in a table; `python -m bench.plan` holds it against what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, assert_never

from core.plan.activations import Numbers, Pass, ended, kept, passed, selected, worked
from core.plan.constants import (
    BUCKET_BYTES,
    BUCKETS_IN_FLIGHT,
    GGUF_BITS,
    INPUTS_IN_FLIGHT,
    PIECE_BYTES,
    PROMPT_TOKENS,
    SAMPLED_LOGIT_BYTES,
    SCRATCH_BYTES,
)
from core.plan.device import SLACK_BYTES, Device
from core.plan.logits import chunked, evaluation_bytes, logits_why, logprobs_bytes, reference_bytes, training_bytes
from core.plan.models.scorers import scorer_bytes, scoring_bytes
from core.plan.models.shape import Shape, Weight
from core.plan.models.weights import WeightBytes, headed, weigh
from core.plan.optimizers import state_of
from core.plan.stream import MARGIN, Decision, Free, Need, decide
from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.evaluation.generation import NoGeneration
from core.spec.axes.export import (
    AWQ,
    FP8,
    GGUF,
    GPTQ,
    MXFP4,
    LMEval,
    Merged,
    PackedExport,
    TorchAOInt4,
    TorchAOInt8,
    VLLMAdapter,
)
from core.spec.axes.method import OFT, Full, LoRA, QLoRA
from core.spec.axes.optim.optimizers import SophiaG
from core.spec.axes.quantization import NF4, QAT, Int8
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import (
    ActivationsOnHost,
    AutoStream,
    DiskStream,
    HeldOut,
    HostOffload,
    HostStream,
    NoSamples,
    NoStream,
)
from core.spec.axes.stage import DPO, KTO, ORPO, SimPO
from core.spec.job import JobSpec
from core.spec.settled import method_of

PROCESS_BYTES = 1536 << 20
"""Host memory of a trainer before it has a model: Python, torch, transformers, the driver's mappings."""


ROUNDING_BYTES = 24
"""Bytes per weight of the layer that `quantization: qat` rounds: six float32 copies at most."""


@dataclass(frozen=True, slots=True)
class Item:
    kind: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    device: tuple[Item, ...]
    """On the device at the moment at which it holds most. Kinds: weights, reward models, adapter, gradients, optimizer,
    activations, logits, slots, scratch, rounding, slack."""
    moment: str
    """The moment: `reference`, `loss`, `backward begins`, `backward ends`, `step`, `evaluation`, `rollout` or
    `rewards`."""
    moments: dict[str, int]
    """Bytes at each of the moments."""
    host: tuple[Item, ...]
    """In host memory. On a CPU this comes on top of `device`."""
    disk: tuple[Item, ...]
    rows: int
    """Rows of the largest forward pass; with a budget of tokens, as many of the longest as fit."""
    tokens: int
    """Tokens of the largest forward pass, padding counted."""
    field: str
    """The field that decides `tokens`."""
    parameters: int
    trained: int
    """Trained parameters: some of `parameters`, or adapters beside them."""
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
        """Bytes on the device by kind."""
        return {item.kind: item.bytes for item in self.device}

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {
            "peak": self.peak,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
        }


def fits(plan: Plan, free: int | None) -> bool:
    """Whether the plan fits into the free memory with MARGIN to spare; True where that is unknown."""
    return free is None or plan.peak <= MARGIN * free


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


def plan(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Plan:
    """What the job takes on this device. `longest`: tokens of its longest row (`training.max_length`, until the rows
    have been read). The spec's dependent defaults must be filled in (core/spec/resolve.py). `memory.stream: auto` is
    settled by what the device and its host have. SpecError where the spec names modules that the model does not have.
    """
    shape = headed(spec, shape)
    match spec.memory.stream:
        case AutoStream() as asked:
            resident = _plan(spec, shape, longest, device, Decision("none", 0, False, "all on the device"))
            decision = decide(
                asked,
                need(spec, shape, longest=longest, device=device),
                Free(device=device.usable, host=device.host, one_memory=device.one_memory),
            )
            if decision.where == "none":
                return replace(resident, stream=decision)
            return _plan(spec, shape, longest, device, decision)
        case NoStream() | HostStream() | DiskStream() as asked:
            decision = decide(asked, None, Free(None, None, device.one_memory))
            return _plan(spec, shape, longest, device, decision)
        case _ as never:
            assert_never(never)


def need(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Need | None:
    """The figures that decide whether the blocks are streamed; None where none can be: all is trained, or there are no
    blocks."""
    if isinstance(method_of(spec), Full) or not shape.layers:
        return None
    shape = headed(spec, shape)
    held = weigh(spec, shape, device)
    resident = _plan(spec, shape, longest, device, Decision("none", 0, False, ""))
    streamed = _plan(spec, shape, longest, device, Decision("host", 1, True, ""))
    trained = held.adapter * 4
    beside = held.stays + trained + _scorers(spec, shape, device)
    return Need(
        blocks=sum(held.aligned),
        largest_block=held.largest,
        outside=held.stays + _scorers(spec, shape, device),
        trained=trained,
        working=sum(item.bytes for item in resident.device) - sum(held.aligned) - beside,
        working_streamed=sum(item.bytes for item in streamed.device) - held.largest - beside,
        of=shape.layers,
    )


# --- the moments -----------------------------------------------------------------------------------------


def _plan(spec: JobSpec, shape: Shape, longest: int, device: Device, stream: Decision) -> Plan:
    held = weigh(spec, shape, device)
    tokens, field = training_pass(spec, longest)
    what, streams = Pass(tokens, longest), stream.where != "none"
    numbers = replace(
        _numbers(spec, shape, device, frozenset()), whole=held.head or isinstance(spec.optimizer, SophiaG)
    )
    kept_ = _kept(spec, shape, held, device, what, streams=streams)
    offloads = isinstance(spec.memory.offload_optimizer, HostOffload)
    state = _state(spec, shape, held, device, stream)
    window = held.gradients if spec.training.gradient_accumulation_steps > 1 else 0
    gradients = _travelling(shape, held, numbers) if offloads else held.gradients
    of_window = Item("gradients", 0 if offloads else window, "of the micro-batches before, in float32")
    of_all = Item("gradients", gradients, "on their way to the host" if offloads else "in float32")
    casts = 0 if offloads and numbers.trained else _casts(shape, held, numbers)
    casts += held.copied
    again = min(casts, _casts_of_block(shape, held, numbers)) if kept_.recomputed else casts
    logprobs = isinstance(spec.stage, DPO | SimPO | ORPO | KTO | RolloutStage)
    moments: dict[str, list[Item]] = {
        "loss": [
            of_window,
            Item("activations", kept_.all + casts + ended(shape, numbers, tokens), kept_.why),
            Item(
                "logits",
                (logprobs_bytes if logprobs else training_bytes)(shape, numbers, tokens, device),
                logits_why(shape, numbers, tokens, logprobs=logprobs),
            ),
        ],
        "backward begins": [of_window, Item("activations", kept_.first + again, kept_.why)],
        "backward ends": [of_all, Item("activations", kept_.last, "of the first block")],
        "step": [of_all, *_reducing(spec)],
    }
    if isinstance(spec.stage, DPO | KTO):
        moments["reference"] = [
            Item(
                "activations", max(passed(shape, numbers, what), ended(shape, numbers, tokens)) + casts, "of one block"
            ),
            Item("logits", reference_bytes(shape, numbers, tokens, device), "a chunk of them, in float32"),
        ]
    if isinstance(spec.evaluation, HeldOut) and not isinstance(spec.stage, RolloutStage):  # which answers in its slots
        moments["evaluation"] = _evaluating(spec.evaluation, shape, numbers, what, casts, device)
    if isinstance(spec.stage, RolloutStage):
        moments["rollout"] = _answering(spec.stage, shape, numbers, longest, casts)
    if shape.scorers:
        scoring = max(scoring_bytes(spec, one, numbers, longest) for one in shape.scorers)
        moments["rewards"] = [Item("activations", scoring, "of answers in one block of a reward model, nothing kept")]
    before = [item for item in state if item.kind != "optimizer"]  # which has a state from the first step on
    held_at = {name: [*(before if name == "reference" else state), *items] for name, items in moments.items()}
    totals = {name: sum(item.bytes for item in items) for name, items in held_at.items()}
    moment = max(totals, key=lambda name: totals[name])
    return Plan(
        device=tuple(item for item in held_at[moment] if item.bytes),
        moment=moment,
        moments=totals,
        host=tuple(item for item in (*_host(spec, held, device, stream), *kept_.host) if item.bytes),
        disk=tuple(item for item in _disk(spec, shape, held, stream) if item.bytes),
        rows=max(1, tokens // longest),
        tokens=tokens,
        field=field,
        parameters=shape.parameters,
        trained=held.trained,
        precision=device.precision(spec.training),
        stream=stream,
        one_memory=device.one_memory,
    )


def _evaluating(
    held_out: HeldOut, shape: Shape, numbers: Numbers, training: Pass, casts: int, device: Device
) -> list[Item]:
    """What a pass of held-out rows takes, or of the prompts that are answered at once where that is more."""
    what = _beside(held_out, training, training.longest)
    inside = max(passed(shape, numbers, what), ended(shape, numbers, what.tokens))
    logits = evaluation_bytes(shape, numbers, what.tokens, device)
    found = [
        Item("activations", inside + casts, "of one block, nothing kept"),
        Item("logits", logits, "all of them, in float32 too" if numbers.whole else "a chunk of them"),
    ]
    generated = (held_out.samples, held_out.generation)
    new = max(0 if isinstance(one, NoSamples | NoGeneration) else one.max_new_tokens for one in generated)
    if not new:
        return found
    what = _beside(held_out, training, training.longest + new)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * numbers.computed * what.tokens
    answering = [
        Item("activations", passed(shape, numbers, what) + casts, "of the prompts in one block, nothing kept"),
        Item("cache", cache, f"keys and values of {what.tokens} tokens, {new} of them new in each answer"),
    ]
    return max(found, answering, key=lambda items: sum(item.bytes for item in items))


def _answering(stage: RolloutStage, shape: Shape, numbers: Numbers, longest: int, casts: int) -> list[Item]:
    """What answers in the making take: keys and values of all slots, a pass over prompts, and the logits of a token."""
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * numbers.computed * stage.slots * longest
    what = Pass(max(longest, PROMPT_TOKENS), longest)
    return [
        Item("activations", passed(shape, numbers, what) + casts, "of the prompts in one block, nothing kept"),
        Item("cache", cache, f"keys and values of {stage.slots} answers of up to {longest} tokens with their prompts"),
        Item("logits", SAMPLED_LOGIT_BYTES * stage.slots * shape.vocab, "of one token of each answer, and their sums"),
    ]


def _beside(held_out: HeldOut, training: Pass, longest: int) -> Pass:
    """The largest pass of rows of at most so many tokens: as many as are asked for, and no more tokens than a pass of
    training, or one row (core/train/data/dataset.py, `spans`)."""
    return Pass(max(longest, min(training.tokens, held_out.per_device_eval_batch_size * longest)), longest)


def _state(spec: JobSpec, shape: Shape, held: WeightBytes, device: Device, stream: Decision) -> list[Item]:
    """The items that are on the device for the whole run."""
    offloads = isinstance(spec.memory.offload_optimizer, HostOffload)
    kept = state_of(spec.optimizer)
    optimizer = 0 if offloads else kept.bytes(held.trained_tensors)
    scratch = max(held.largest_dense, min(SCRATCH_BYTES[device.kind], held.dense))
    streams = stream.where != "none"
    linear = (weight.numel for block in shape.patterns for weight in block if weight.kind == "linear")
    rounding = ROUNDING_BYTES * max(linear, default=0) if isinstance(spec.quantization, QAT) else 0
    return [
        Item("weights", held.stays if streams else held.weights, _weights_why(spec, shape, streams)),
        Item("reward models", _scorers(spec, shape, device), _scorers_why(shape)),
        Item("adapter", held.adapter, "in float32"),
        Item("slots", min(stream.slots, shape.layers) * held.largest, f"{stream.slots} of the largest block"),
        Item("optimizer", optimizer, kept.kept),
        Item("scratch", scratch, "dense copies of packed weights for the moment of a product"),
        Item("rounding", rounding, "copies of the largest weight while it is rounded, and its gradient"),
        Item("slack", SLACK_BYTES[device.kind], "the matrix libraries' buffers, the allocator's gaps"),
    ]


def _scorers(spec: JobSpec, shape: Shape, device: Device) -> int:
    return sum(scorer_bytes(spec, one, device) for one in shape.scorers)


def _scorers_why(shape: Shape) -> str:
    names = ", ".join(f"`{one.reward}`" for one in shape.scorers)
    return f"copies of their own, with their adapters: {names}"


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of activations on the device."""

    all: int
    """At the end of the forward."""
    first: int
    """At the peak of the last block's backward."""
    last: int
    """At the peak of the first block's backward."""
    why: str
    host: tuple[Item, ...] = ()
    recomputed: bool = True
    """Whether a block's backward computes its inside once more."""


def _kept(spec: JobSpec, shape: Shape, held: WeightBytes, device: Device, what: Pass, *, streams: bool) -> _Kept:
    one = work = everything = chosen = 0
    cached: dict[tuple[int, frozenset[str]], tuple[int, int, int]] = {}
    for at, (number, names) in enumerate(zip(shape.order, held.adapted, strict=True)):
        if (number, names) not in cached:
            block, numbers = shape.patterns[number], _numbers(spec, shape, device, names)
            cached[number, names] = (
                kept(shape, block, numbers, what),
                worked(shape, block, numbers, what),
                selected(shape, block, numbers, what),
            )
        whole, beside, some = cached[number, names]
        work = max(work, beside)
        if at < held.first:  # frozen, and nothing below it is trained
            continue
        one = max(one, whole)
        everything, chosen = everything + whole, chosen + some
    how = spec.memory.gradient_checkpointing
    offloads = isinstance(spec.memory.activation_offloading, ActivationsOnHost)
    entry = _numbers(spec, shape, device, frozenset()).residual * shape.hidden * what.tokens
    if not how and not streams and not offloads:
        why = f"what every block keeps, {what.tokens} tokens"
        return _Kept(everything, everything + work, one + work, why, recomputed=False)
    inputs = shape.layers * entry
    if offloads:
        aside = Item("activations", inputs, "the input of every block")
        some = min(INPUTS_IN_FLIGHT + 1, shape.layers) * entry
        return _Kept(some, some + one + work, entry + one + work, "inputs of blocks on their way, one inside", (aside,))
    if how == "selective":
        why = f"the large products of every block, one block's inside, {what.tokens} tokens"
        return _Kept(chosen, chosen + one + work, one + work, why)
    return _Kept(
        inputs,
        inputs + one + work,
        entry + one + work,
        f"every block's input, one block's inside, {what.tokens} tokens",
    )


def _numbers(spec: JobSpec, shape: Shape, device: Device, adapted: frozenset[str]) -> Numbers:
    computed = 4 if device.precision(spec.training) == "fp32" else 2
    cpu, attention = device.kind == "cpu", device.attention(spec.training)
    if shape.scores_capped:
        attention = "eager"
    elif shape.own_dropout and cpu and attention == "flash":  # torch's flash attention for CPUs has no dropout
        attention = "math"
    rounds = isinstance(spec.quantization, QAT)
    match method_of(spec):
        case Full():
            return Numbers(computed, 4, True, adapted, rounded=rounds, attention=attention, cpu=cpu)
        case OFT() as rotation:
            return Numbers(computed, computed, False, adapted, rotation=rotation, attention=attention, cpu=cpu)
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
            )
        case _ as never:
            assert_never(never)


def _casts(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Bytes of the rounded copies of trained matrices that autocast keeps during a forward."""
    if numbers.computed == 4:
        return 0
    if numbers.rotation is not None:  # its powers are counted with what blocks keep
        return 0
    if not numbers.trained:
        return 0 if numbers.fused or numbers.rounded else held.adapter // 2
    head = 0 if chunked(shape, numbers, 0) else shape.vocab * shape.hidden
    if numbers.rounded:
        return 2 * head
    return 2 * (head + sum(_matrices(block) for block in shape.blocks[held.first :]))


def _casts_of_block(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Bytes of the rounded copies that a block makes again where its backward recomputes it: those of the forward went
    with its autocast."""
    if not numbers.trained:
        return _casts(shape, held, numbers)
    if numbers.rounded:
        return 0
    return 2 * max((_matrices(block) for block in shape.patterns), default=0)


def _matrices(block: Iterable[Weight]) -> int:
    """Numbers of the matrices of a block."""
    return sum(weight.numel for weight in block if len(weight.shape) >= 2)


def _travelling(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Gradients on their way to the host: twice the larger of a block's and of the largest other parameter's."""
    if not numbers.trained:
        return 2 * max(held.gradients // max(1, shape.layers), 0)
    block = max((sum(weight.numel for weight in block) for block in shape.patterns), default=0) * numbers.computed
    return 2 * max(block, 4 * max((weight.numel for weight in shape.outside), default=0))


def _reducing(spec: JobSpec) -> Iterable[Item]:
    if spec.resources.gpus > 1:
        yield Item("scratch of ranks", BUCKETS_IN_FLIGHT * BUCKET_BYTES, "two buckets of gradients on their way")


def _weights_why(spec: JobSpec, shape: Shape, streams: bool) -> str:
    if isinstance(method_of(spec), Full):
        return "all of them in float32"
    how = (
        "as the files have them packed"
        if shape.packed
        else f"quantization {spec.quantization and spec.quantization.type}"
    )
    return f"what stays on the device; {how}" if streams else f"of the base model; {how}"


# --- elsewhere -------------------------------------------------------------------------------------------


def _host(spec: JobSpec, held: WeightBytes, device: Device, stream: Decision) -> Iterable[Item]:
    if not device.one_memory:
        yield Item("process", PROCESS_BYTES, "Python, torch, transformers")
    if isinstance(spec.memory.offload_optimizer, HostOffload):
        yield Item(
            "optimizer",
            state_of(spec.optimizer).trained(held.trained_tensors),
            f"weights and gradients in float32; {state_of(spec.optimizer).kept}",
        )
        if not device.one_memory:
            yield Item("staging", 2 * PIECE_BYTES, "gradients and weights on their way")
    match stream.where:
        case "none":
            if not device.one_memory:
                yield Item("loading", held.weights, "the weights on their way to the device")
        case "host":
            yield Item("blocks", sum(held.aligned), "the frozen blocks, streamed from here")
        case "disk":
            if not device.one_memory:
                yield Item("blocks", 2 * held.largest, "two of the frozen blocks, on their way from disk")
        case _ as never:
            assert_never(never)


def _disk(spec: JobSpec, shape: Shape, held: WeightBytes, stream: Decision) -> Iterable[Item]:
    one = state_of(spec.optimizer).trained(held.trained_tensors) + 4 * held.starts
    yield Item(
        "checkpoints",
        one * (spec.checkpoint.most_kept + 1),
        f"{spec.checkpoint.most_kept} are kept while the next is written; weights, optimizer, gradients",
    )
    if isinstance(spec.evaluation, HeldOut) and spec.evaluation.load_best_model_at_end:
        yield Item(
            "best weights", 2 * 4 * (held.trained + held.starts), "of the best evaluation, and of the one before"
        )
    whole = held.weights
    if stream.where == "disk":
        yield Item("image", whole, "the blocks as they are streamed, kept in the cache")
    elif isinstance(spec.quantization, NF4 | Int8) and not shape.packed:
        yield Item("packed weights", whole, "kept in the cache for further runs")
    size = shape.parameters * shape.file_bits // 8
    adapter = 4 * (held.trained + held.starts)
    yield Item("result", size if isinstance(method_of(spec), Full) else adapter, "the job's results")
    for export in spec.export:
        match export:
            case Merged(dtype=dtype):
                yield Item("export", shape.parameters * (4 if dtype == "fp32" else 2), "`merged`: the whole model")
            case GGUF(quantization=quantization):
                size = int(GGUF_BITS[quantization] * shape.parameters / 8)
                yield Item("export", size, f"`gguf`: the whole model in {quantization}")
            case VLLMAdapter():
                yield Item("export", adapter, "`vllm`: the adapter")
            case FP8() | GPTQ() | AWQ() | MXFP4() | TorchAOInt8() | TorchAOInt4():
                yield Item("export", shape.parameters * 2, f"`{export.type}`: the whole model, counted in 16 bits")
            case LMEval():
                pass  # a few numbers and the answers
            case _ as never:
                assert_never(never)
    onto = {export.merge_onto for export in spec.export if isinstance(export, GGUF | PackedExport)}
    if onto:
        merged = 0 if isinstance(method_of(spec), Full) else 4
        size = (merged + 2) * shape.parameters * len(onto)
        yield Item("conversion", size, "the model as it is converted: merged in float32, and in 16 bits")
