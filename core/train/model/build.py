"""The model of a run: load → quantise → check → adapt → place (or stream)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import nn

from core.errors import SpecError
from core.plan.stream import Decision
from core.spec.axes.runtime import ActivationsOnDevice, ActivationsOnHost, HostOffload, NoOffload, NoStream
from core.spec.axes.training import NF4, Full, Int8, LoRA, NoQuantization, QLoRA
from core.spec.job import JobSpec
from core.spec.settled import method_of
from core.train.base.events import EventWriter
from core.train.base.files import remembered_sha256
from core.train.checkpoint.rng import seed_all
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.policy import checkpoint_blocks
from core.train.memory.offload.activations import ActivationOffload
from core.train.memory.streaming.choice import choose_stream
from core.train.model.gemm_limits import pad_ranks
from core.train.model.load import context_length, load_model, packed_as
from core.train.model.placement import Placement
from core.train.quant.fp8 import to_fp8

if TYPE_CHECKING:
    from core.train.memory.offload.optimizer import OptimizerOffload
    from core.train.memory.streaming.block_source import FileBlocks
    from core.train.memory.streaming.blocks import StreamedBlock
    from core.train.memory.streaming.stream import StreamedModel
    from core.train.quant.targets import QuantOptions


@dataclass(frozen=True, slots=True)
class Built:
    model: nn.Module
    streamed: StreamedModel | None
    """To be closed when the model is no longer computed with; None when its blocks stay on the device."""
    offload: OptimizerOffload | None
    """Keeps what is trained in host memory; None when the model keeps it. To be closed, too."""
    inputs: ActivationOffload | None
    """Holds the inputs of checkpointed blocks in host memory; None when they stay on the device. To be closed, too."""
    memory: dict[str, Any]
    """For the run record: where the blocks lie and why, and where what is trained does."""
    quantization: dict[str, Any] | None
    """For the run record: what was packed, from where, and how it computes; None when nothing is."""
    fp8: dict[str, Any] | None
    """The same of layers that multiply in 8-bit floats."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on the CPU."""

    model: nn.Module
    packed: dict[str, Any] | None
    """What there is to say of its packed weights."""
    files: tuple[list[StreamedBlock], FileBlocks] | None = None
    """Its blocks, where they are mapped from files."""


def build_model(
    spec: JobSpec,
    model_dir: Path,
    placement: Placement,
    tokenizer: Any,
    *,
    cache_dir: Path | None,
    longest: int,
    events: EventWriter,
    between: Callable[[], None],
    memory_bytes: int | None = None,
) -> Built:
    """The model with what its method adds, on its device, every random number drawn from the job's seed. Packed weights
    are kept below `cache_dir`. `longest`: tokens of the longest row. `memory_bytes`: what a run on a CPU may count on.
    `between` may raise to stop."""
    stream = choose_stream(spec, model_dir, placement, longest, memory_bytes)
    if not isinstance(spec.memory.stream, NoStream):
        words = f"frozen blocks are streamed from {stream.where}" if stream.where != "none" else "no block is streamed"
        events.write("notice", code="stream", message=f"{words}: {stream.reason}")
    loaded = _load(spec, model_dir, placement.weights, stream, cache_dir, events, between)
    model, packed = loaded.model, loaded.packed
    between()
    placement.attention.fit(model)
    in_fp8 = to_fp8(model, emulate=placement.device.type == "cpu") if placement.fp8 else None
    _check_fit(model, tokenizer, longest, events)
    seed_all(spec.training.seed)
    model = _adapt(model, spec, placement)
    if packed is not None:
        packed |= _fuse(model, placement.device)
    offload = _offload(model, spec, placement, events)
    inputs = _inputs(spec, placement.device, events)
    policy = CheckpointPolicy(selective=spec.memory.gradient_checkpointing == "selective", inputs=inputs)
    checkpointing = bool(spec.memory.gradient_checkpointing)
    streamed = _place(model, placement.device, stream, loaded, policy if checkpointing else None)
    memory = {
        "stream": stream.as_dict() | ({} if streamed is None else streamed.about()),
        "offload_optimizer": {"where": "none"} if offload is None else offload.about(),
    }
    memory["activations"] = policy.about() if checkpointing or streamed is not None else {"kept": "all"}
    return Built(model, streamed, offload, inputs, memory, packed, in_fp8)


# --- load and quantise -----------------------------------------------------------------------------------


def _load(
    spec: JobSpec,
    folder: Path,
    dtype: torch.dtype,
    stream: Decision,
    cache_dir: Path | None,
    events: EventWriter,
    between: Callable[[], None],
) -> _Loaded:
    already = packed_as(folder)
    match spec.quantization:
        case None:
            raise ValueError("the spec is not resolved: quantization is missing")
        case NoQuantization() if already is None and stream.where == "disk":
            return _load_files(folder, dtype, None, cache_dir, events, between)
        case NoQuantization() if already is None:
            return _Loaded(load_model(folder, dtype), None)
        case NoQuantization():
            options = _options("nf4")
        case NF4(double=double, skip_modules=skip):
            options = _options("nf4", double=double, skip=tuple(skip))
        case Int8(block_size=block, skip_modules=skip):
            options = _options("int8", block=block, skip=tuple(skip))
        case _ as never:
            assert_never(never)
    if already is not None:
        _check_packed(spec, already, events)
    if stream.where == "disk":
        return _load_files(folder, dtype, options, cache_dir, events, between)
    return _load_packed(folder, dtype, options, cache_dir, events, between)


def _options(format: Any, **more: Any) -> QuantOptions:
    from core.train.quant.targets import QuantOptions

    return QuantOptions(format=format, **more)


def _check_packed(spec: JobSpec, already: str, events: EventWriter) -> None:
    """The files are packed: what that rules out, and what it means for the job."""
    if isinstance(spec.method, Full):
        raise SpecError(
            f"the model's files are packed ({already}), and not all parameters can be trained in packed weights; train "
            "adapters over it (`method: qlora`), or name the 16-bit model it was made from",
            field="method",
        )
    if any(item.merge_onto == "original" for item in spec.export):
        raise SpecError(
            f"the model's files are packed ({already}): there are no 16-bit weights to merge onto; take "
            "`merge_onto: trained`, or name the 16-bit model it was made from",
            field="export",
        )
    events.write(
        "notice",
        code="already_quantized",
        message=f"the model's files are packed already ({already}); their weights are taken as they are",
    )


def _load_packed(
    folder: Path,
    dtype: torch.dtype,
    options: QuantOptions,
    cache_dir: Path | None,
    events: EventWriter,
    between: Callable[[], None],
) -> _Loaded:
    from core.train.quant.model import load_quantized

    told = _teller(events, between)
    if cache_dir is None:
        model, report = load_quantized(folder, dtype, options, between=told)
    else:
        notes = cache_dir / "digests"
        notes.mkdir(parents=True, exist_ok=True)
        model, report = load_quantized(
            folder,
            dtype,
            options,
            cache_dir / "packed",
            between=told,
            digest=lambda path: remembered_sha256(path, notes),
        )
    _tell_loaded(events, report.cache_fault)
    return _Loaded(model, asdict(report))


def _load_files(
    folder: Path,
    dtype: torch.dtype,
    options: QuantOptions | None,
    cache_dir: Path | None,
    events: EventWriter,
    between: Callable[[], None],
) -> _Loaded:
    """With the blocks in files, of which no more than one is ever in memory."""
    from core.train.memory.streaming.block_image import load_from_disk

    if cache_dir is None:
        raise SpecError(
            "blocks that are streamed from disk lie in the cache of the data root, and this run has none (`cache_dir` "
            "of its order); set `memory.stream` to `host`",
            field="memory.stream",
        )
    notes = cache_dir / "digests"
    notes.mkdir(parents=True, exist_ok=True)
    model, report, blocks, files = load_from_disk(
        folder,
        dtype,
        options,
        cache_dir / "packed",
        between=_teller(events, between),
        digest=lambda path: remembered_sha256(path, notes),
    )
    _tell_loaded(events, None if report is None else report.cache_fault)
    return _Loaded(model, None if report is None else asdict(report), (blocks, files))


def _teller(events: EventWriter, between: Callable[[], None]) -> Callable[[str], None]:
    def told(doing: str) -> None:
        if doing != events.phase:
            events.write("phase", phase=doing)
        between()

    return told


def _tell_loaded(events: EventWriter, fault: str | None) -> None:
    if fault is not None:
        events.write("notice", code="quantization_cache", message=fault)
    if events.phase != "loading":
        events.write("phase", phase="loading")


# --- check and adapt -------------------------------------------------------------------------------------


def _check_fit(model: Any, tokenizer: Any, longest: int, events: EventWriter) -> None:
    embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings:
        raise SpecError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {embeddings}: they do not belong together",
            field="model",
        )
    context = context_length(model)
    if context is not None and longest > context:
        events.write(
            "notice",
            code="beyond_context",
            message=f"rows of {longest} tokens are longer than the {context} positions the model was built for",
        )


def _adapt(model: nn.Module, spec: JobSpec, placement: Placement) -> nn.Module:
    method = method_of(spec)
    match method:
        case LoRA() | QLoRA():
            from core.train.methods.lora import adapt_lora

            adapted = adapt_lora(model, method, autocast=placement.autocast is not None)
            if (multiple := placement.limits.rank_multiple) > 1:
                pad_ranks(adapted, multiple)
            return adapted
        case Full():
            from core.train.methods.full import adapt_full

            return adapt_full(model)
        case _ as unknown:
            assert_never(unknown)


def _fuse(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Base and adapter in one operator wherever it covers the adapter; how it came out."""
    from core.train.kernels.interface import describe
    from core.train.quant.adapters import fuse_adapters

    return {"kernels": describe(device), "adapters": asdict(fuse_adapters(model))}


def _offload(model: nn.Module, spec: JobSpec, placement: Placement, events: EventWriter) -> OptimizerOffload | None:
    """Before anything is on the device: of what all parameters are trained in, it never holds the whole."""
    match spec.memory.offload_optimizer:
        case NoOffload():
            return None
        case HostOffload(pinned=pinned):
            from core.train.memory.offload.optimizer import OptimizerOffload

            if placement.device.type == "cpu":
                message = "a CPU's memory is the host's: `memory.offload_optimizer` saves nothing here"
                events.write("notice", code="offload", message=message)
            narrow = placement.autocast if isinstance(method_of(spec), Full) else None
            return OptimizerOffload(model, placement.device, narrow=narrow, pinned=pinned)
        case _ as never:
            assert_never(never)


def _inputs(spec: JobSpec, device: torch.device, events: EventWriter) -> ActivationOffload | None:
    match spec.memory.activation_offloading:
        case ActivationsOnDevice():
            return None
        case ActivationsOnHost(pinned=pinned):
            if device.type == "cpu":
                message = "a CPU's memory is the host's: `memory.activation_offloading` copies, and saves nothing here"
                events.write("notice", code="activation_offloading", message=message)
            return ActivationOffload(device, pinned=pinned)
        case _ as never:
            assert_never(never)


def _place(
    model: nn.Module, device: torch.device, stream: Decision, loaded: _Loaded, policy: CheckpointPolicy | None
) -> StreamedModel | None:
    """The model on its device, whole or but for its blocks. `keeps`: of checkpointed blocks; None: all is kept, unless
    they are streamed."""
    match stream.where:
        case "none":
            model.to(device)
            if policy is not None:
                checkpoint_blocks(model, policy)
            return None
        case "host":
            from core.train.memory.streaming.stream import stream_from_host

            return stream_from_host(model, device, slots=stream.slots, pinned=stream.pinned, policy=policy)
        case "disk":
            from core.train.memory.streaming.stream import stream_from_files

            assert loaded.files is not None
            return stream_from_files(
                model, *loaded.files, device, slots=stream.slots, pinned=stream.pinned, policy=policy
            )
        case _ as never:
            assert_never(never)


def count_parameters(model: nn.Module) -> int:
    """All of them: packed weights count as the weights they stand for."""
    packed = [m for m in model.modules() if isinstance(m, nn.Linear) and "weight" not in m._parameters]
    return sum(p.numel() for p in model.parameters()) + sum(m.in_features * m.out_features for m in packed)
