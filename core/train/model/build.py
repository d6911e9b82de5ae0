"""The model of a run: load → quantise → check → adapt → place (or stream)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import nn

from core.base.files import remembered_sha256
from core.errors import SpecError
from core.plan.stream import Decision
from core.spec.axes.export import GGUF, Merged, PackedExport
from core.spec.axes.method import OFT, Full, LoRA, LowRank, QLoRA
from core.spec.axes.quantization import NF4, QAT, Int8, NoQuantization
from core.spec.axes.rollout.stages import PPOStage
from core.spec.axes.runtime import ActivationsOnDevice, ActivationsOnHost, HostOffload, NoOffload, NoStream
from core.spec.settled import method_of
from core.train.base.adapters import load_adapter
from core.train.base.rng import seed_all
from core.train.kernels.fused.modules import FusedParts, fuse_parts
from core.train.kernels.interface import describe
from core.train.kernels.scratch import clear_scratch
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.policy import checkpoint_blocks
from core.train.memory.offload.activations import ActivationOffload
from core.train.methods.neftune import add_noise
from core.train.model.choose_stream import choose_stream
from core.train.model.gemm_limits import pad_ranks
from core.train.model.heads import TASKS, has_head, head_name, head_of_model, pad_token_of, with_head
from core.train.model.load import context_length, given_head, load_model, packed_as, saved_dtype
from core.train.model.placement import Placement
from core.train.model.value_head import add_value_head, drop_value_head
from core.train.optim.groups import ParameterGroup
from core.train.optim.updates import DeviceUpdates, UpdateStrategy
from core.train.quant.fp8 import dense_again, to_fp8
from core.train.run import Run
from core.train.vocabulary.new_tokens import ids_of
from core.train.vocabulary.rows import grow

if TYPE_CHECKING:
    from core.train.memory.offload.optimizer import OptimizerOffload
    from core.train.memory.streaming.block_source import FileBlocks
    from core.train.memory.streaming.blocks import StreamedBlock
    from core.train.memory.streaming.stream import StreamedModel
    from core.train.quant.adapters import Fusion
    from core.train.quant.targets import QuantOptions


@dataclass(frozen=True, slots=True)
class Built:
    model: nn.Module
    groups: list[ParameterGroup]
    """Parameters that the optimizer treats alike."""
    streamed: StreamedModel | None
    """To be closed when the model is no longer computed with; None when its blocks stay on the device."""
    offload: OptimizerOffload | None
    """Keeps what is trained in host memory; None when the model keeps it. To be closed, too."""
    inputs: ActivationOffload | None
    """Holds the inputs of checkpointed blocks in host memory; None when they stay on the device. To be closed, too."""
    memory: dict[str, Any]
    """For the run record: where the blocks lie and why, and where what is trained does."""
    quantization: dict[str, Any] | None
    """For the run record: what was packed, from where, and how it computes, or what is rounded; None: nothing is."""
    fp8: dict[str, Any] | None
    """The same of layers that multiply in 8-bit floats."""
    parts: FusedParts
    """How norms, gated activations and adapters compute."""

    @property
    def updates(self) -> UpdateStrategy:
        """Where what is trained is kept and updated."""
        return self.offload or DeviceUpdates(self.model)

    def hand_back(self) -> None:
        """Make it an ordinary model again, with all that was trained in float32: call it after the last step."""
        if self.offload is not None:
            self.offload.hand_back()
        drop_value_head(self.model)
        if self.fp8 is not None:
            dense_again(self.model)
        from core.train.methods.start import write_out_starts

        write_out_starts(self.model)

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        about = {"quantization": self.quantization, "fp8": self.fp8, "memory": self.memory}
        return about | {"fused_parts": asdict(self.parts)}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on the CPU."""

    model: nn.Module
    packed: dict[str, Any] | None
    """What there is to say of its packed weights."""
    files: tuple[list[StreamedBlock], FileBlocks] | None = None
    """Its blocks, where they are mapped from files."""


def build_model(run: Run, placement: Placement, tokenizer: Any, longest: int) -> Built:
    """The model with what its method adds, on its device, every random number drawn from the job's seed. What it holds
    beside the model's own memory is closed when the run is left.

    `longest`: tokens of the longest row.
    """
    spec = run.spec
    stream = choose_stream(spec, run.model_dir, placement, longest, run.order.memory_bytes, run.order.reward_models)
    if not isinstance(spec.memory.stream, NoStream):
        words = f"frozen blocks are streamed from {stream.where}" if stream.where != "none" else "no block is streamed"
        run.notice("stream", f"{words}: {stream.reason}")
    loaded = _load(run, placement.weights, stream)
    model, packed = loaded.model, loaded.packed
    run.check_stop()
    placement.attention.fit(model)
    rounded = _round(model, run)
    in_fp8 = to_fp8(model, emulate=placement.device.type == "cpu") if placement.fp8 else None
    ids = _add_rows(model, tokenizer, run)
    _check_fit(model, tokenizer, longest, run)
    seed_all(spec.training.seed)
    if spec.stage.head != "tokens":
        model = with_head(model, spec.stage.head, pad_token_of(tokenizer))
    model, groups = _adapt(model, run, placement, ids)
    if rounded is not None:
        from core.train.methods.qat import round_adapters

        round_adapters(model)
    if isinstance(spec.stage, PPOStage):
        groups.append(add_value_head(model))
    if (alpha := spec.training.neftune_noise_alpha) is not None:
        add_noise(model, alpha)
    # torch.compile fuses the same parts by itself, and cannot look into operators of ours.
    parts = FusedParts("compiled") if spec.training.compile else fuse_parts(model, placement.device)
    fuses = parts.backend not in ("portable", "compiled")
    if packed is not None or fuses:
        adapters = _fuse(model, dense=fuses)
        if packed is not None:
            packed |= {"kernels": describe(placement.device), "adapters": asdict(adapters)}
            run.close_at_end(clear_scratch)
        parts = replace(parts, adapters=adapters.fused)
    offload = _offload(model, placement, run)
    inputs = _inputs(placement.device, run)
    policy = CheckpointPolicy(selective=spec.memory.gradient_checkpointing == "selective", inputs=inputs)
    checkpointing = bool(spec.memory.gradient_checkpointing)
    streamed = _place(model, placement.device, stream, loaded, policy if checkpointing else None)
    memory = {
        "stream": stream.as_dict() | ({} if streamed is None else streamed.about()),
        "offload_optimizer": {"where": "none"} if offload is None else offload.about(),
    }
    memory["activations"] = policy.about() if checkpointing or streamed is not None else {"kept": "all"}
    for part in (streamed, offload, inputs):
        if part is not None:
            run.close_at_end(part.close)
    return Built(model, groups, streamed, offload, inputs, memory, packed or rounded, in_fp8, parts)


def build_base(run: Run, placement: Placement, tokenizer: Any) -> tuple[nn.Module, dict[str, Any] | None]:
    """The frozen model without adapters, on its device, and what there is to say of its packed weights. SpecError for
    blocks that would be streamed."""
    if not isinstance(run.spec.memory.stream, NoStream):
        raise SpecError("a session keeps its base resident: set `memory.stream` to `none`", field="memory.stream")
    stream = choose_stream(run.spec, run.model_dir, placement, 1, run.order.memory_bytes)
    loaded = _load(run, placement.weights, stream)
    run.check_stop()
    placement.attention.fit(loaded.model)
    _check_fit(loaded.model, tokenizer, 1, run)
    disable_dropout(loaded.model)
    loaded.model.requires_grad_(False)
    loaded.model.to(placement.device)
    return loaded.model, loaded.packed


def disable_dropout(model: nn.Module) -> None:
    """Switch the model's own dropout off; that of its adapters stays as the job says (`method.lora_dropout`)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


# --- load and quantise -----------------------------------------------------------------------------------


def _load(run: Run, dtype: torch.dtype, stream: Decision) -> _Loaded:
    spec, folder = run.spec, run.model_dir
    already, given = packed_as(folder), given_head(folder, spec.stage.head)
    if given != "tokens" and (already or stream.where == "disk" or not isinstance(spec.quantization, NoQuantization)):
        raise SpecError(
            "the model's files already have the head of a reward model, and such files can be neither packed nor "
            "streamed from disk; use `method: lora` or `full`, and stream from `host`",
            field="method",
        )
    match spec.quantization:
        case None:
            raise ValueError("the spec is not resolved: quantization is missing")
        case NoQuantization() if already is None and stream.where == "disk":
            return _load_files(run, dtype, None)
        case NoQuantization() if already is None:
            return _Loaded(load_model(folder, dtype, head=given), None)
        case QAT() if already is None:
            return _Loaded(load_model(folder, dtype, head=given), None)
        case QAT():
            raise SpecError(
                f"the model's files are packed ({already}), and `quantization: qat` rounds 16-bit weights; name the "
                "16-bit model they were made from",
                field="quantization",
            )
        case NoQuantization():
            options = _options("nf4")
        case NF4(double=double, skip_modules=skip):
            options = _options("nf4", double=double, skip=tuple(skip))
        case Int8(block_size=block, skip_modules=skip):
            options = _options("int8", block=block, skip=tuple(skip))
        case _ as never:
            assert_never(never)
    if already is not None:
        _check_packed(run, already)
    if stream.where == "disk":
        return _load_files(run, dtype, options)
    return _load_packed(run, dtype, options)


def _options(format: Any, **more: Any) -> QuantOptions:
    from core.train.quant.targets import QuantOptions

    return QuantOptions(format=format, **more)


def _check_packed(run: Run, already: str) -> None:
    """Tell that the files are packed. SpecError where that rules out what the job asks for."""
    if isinstance(run.spec.method, Full):
        raise SpecError(
            f"the model's files are packed ({already}), and not all parameters can be trained in packed weights; train "
            "adapters over it (`method: qlora`), or name the 16-bit model it was made from",
            field="method",
        )
    if any(
        isinstance(item, Merged | GGUF | PackedExport) and item.merge_onto == "original" for item in run.spec.export
    ):
        raise SpecError(
            f"the model's files are packed ({already}): there are no 16-bit weights to merge onto; take "
            "`merge_onto: trained`, or name the 16-bit model it was made from",
            field="export",
        )
    run.notice(
        "already_quantized", f"the model's files are packed already ({already}); their weights are taken as they are"
    )


def _load_packed(run: Run, dtype: torch.dtype, options: QuantOptions) -> _Loaded:
    from core.train.quant.model import load_quantized

    if run.cache_dir is None:
        model, report = load_quantized(run.model_dir, dtype, options, between=_teller(run))
    else:
        model, report = load_quantized(
            run.model_dir,
            dtype,
            options,
            run.cache_dir / "packed",
            between=_teller(run),
            digest=_digests(run.cache_dir),
        )
    _tell_loaded(run, report.cache_fault)
    return _Loaded(model, asdict(report))


def _load_files(run: Run, dtype: torch.dtype, options: QuantOptions | None) -> _Loaded:
    """Load with the blocks in files, of which no more than one is ever in memory."""
    from core.train.memory.streaming.block_image import load_from_disk

    if run.cache_dir is None:
        raise SpecError(
            "blocks that are streamed from disk lie in the cache of the data root, and this run has none (`cache_dir` "
            "of its order); set `memory.stream` to `host`",
            field="memory.stream",
        )
    model, report, blocks, files = load_from_disk(
        run.model_dir,
        dtype,
        options,
        run.cache_dir / "packed",
        between=_teller(run),
        digest=_digests(run.cache_dir),
    )
    _tell_loaded(run, None if report is None else report.cache_fault)
    return _Loaded(model, None if report is None else asdict(report), (blocks, files))


def _digests(cache_dir: Path) -> Callable[[Path], str]:
    """A function from a file to its SHA-256, which it remembers below `cache_dir`."""
    notes = cache_dir / "digests"
    notes.mkdir(parents=True, exist_ok=True)
    return lambda path: remembered_sha256(path, notes)


def _teller(run: Run) -> Callable[[str], None]:
    def told(doing: str) -> None:
        if doing != run.events.phase:
            run.phase(doing)
        run.check_stop()

    return told


def _tell_loaded(run: Run, fault: str | None) -> None:
    if fault is not None:
        run.notice("quantization_cache", fault)
    if run.events.phase != "loading":
        run.phase("loading")


def _round(model: nn.Module, run: Run) -> dict[str, Any] | None:
    """Let layers round as `quantization: qat` says; what there is to say of it. None where the job has it not."""
    if not isinstance(run.spec.quantization, QAT):
        return None
    from core.train.methods.qat import to_qat

    # Adapters, and modules trained whole beside them, are handed back in float32; a whole model as its files were.
    kept_in = saved_dtype(run.model_dir) if isinstance(method_of(run.spec), Full) else torch.float32
    return to_qat(model, run.spec.quantization, kept_in)


# --- check and adapt -------------------------------------------------------------------------------------


def _add_rows(model: Any, tokenizer: Any, run: Run) -> list[int]:
    """Numbers of the job's new tokens, for which the model has rows now."""
    method = method_of(run.spec)
    if not isinstance(method, LowRank) or not method.new_tokens:
        return []
    ids = ids_of(tokenizer, method.new_tokens)
    grow(model, ids)
    return ids


def _check_fit(model: Any, tokenizer: Any, longest: int, run: Run) -> None:
    embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings:
        raise SpecError(
            f"the tokenizer has {len(tokenizer)} tokens, the model embeds {embeddings}: they do not belong together",
            field="model",
        )
    context = context_length(model)
    if context is not None and longest > context:
        run.notice(
            "beyond_context",
            f"rows of {longest} tokens are longer than the {context} positions the model was built for",
        )


def _adapt(
    model: nn.Module, run: Run, placement: Placement, ids: Sequence[int]
) -> tuple[nn.Module, list[ParameterGroup]]:
    """The model with what its method trains, and the groups of that for the optimizer. `ids`: of new tokens."""
    method, task = method_of(run.spec), TASKS[run.spec.stage.head]
    head = None if run.spec.stage.head == "tokens" else head_name(model)
    match method:
        case LoRA() | QLoRA():
            from core.train.methods import lora

            autocast = placement.autocast is not None
            adapted = lora.adapt_lora(model, method, autocast=autocast, task=task, head=head, new=ids)
            if run.adapter_dir is not None:
                load_adapter(adapted, run.adapter_dir)
            if method.started:
                from core.train.methods.start import begin_at_base

                begin_at_base(adapted, method, placement.device, run.check_stop)
            if (multiple := placement.limits.rank_multiple) > 1 and not isinstance(run.spec.quantization, QAT):
                pad_ranks(adapted, multiple)
            return adapted, lora.parameter_groups(adapted, method)
        case OFT():
            from core.train.methods import oft

            rotated = oft.adapt_oft(model, method, task=task, head=head)
            if run.adapter_dir is not None:
                load_adapter(rotated, run.adapter_dir)
            return rotated, oft.parameter_groups(rotated)
        case Full():
            from core.train.methods import full

            adapted = full.adapt_full(model, method, head_of_model(model) if has_head(model) else None)
            return adapted, full.parameter_groups(adapted)
        case _ as unknown:
            assert_never(unknown)


def _fuse(model: nn.Module, *, dense: bool) -> Fusion:
    """Base and adapter in one operator wherever it covers the adapter; how it came out."""
    from core.train.quant.adapters import fuse_adapters

    return fuse_adapters(model, dense=dense)


def _offload(model: nn.Module, placement: Placement, run: Run) -> OptimizerOffload | None:
    """Called before anything is on the device, which never holds the float32 weights of full fine-tuning as a whole."""
    match run.spec.memory.offload_optimizer:
        case NoOffload():
            return None
        case HostOffload(pinned=pinned):
            from core.train.memory.offload.optimizer import OptimizerOffload

            if placement.device.type == "cpu":
                message = "a CPU's memory is the host's: `memory.offload_optimizer` saves nothing here"
                run.notice("offload", message)
            narrow = placement.autocast if isinstance(method_of(run.spec), Full) else None
            return OptimizerOffload(model, placement.device, optimizer=run.spec.optimizer, narrow=narrow, pinned=pinned)
        case _ as never:
            assert_never(never)


def _inputs(device: torch.device, run: Run) -> ActivationOffload | None:
    match run.spec.memory.activation_offloading:
        case ActivationsOnDevice():
            return None
        case ActivationsOnHost(pinned=pinned):
            if device.type == "cpu":
                message = "a CPU's memory is the host's: `memory.activation_offloading` copies, and saves nothing here"
                run.notice("activation_offloading", message)
            return ActivationOffload(device, pinned=pinned)
        case _ as never:
            assert_never(never)


def _place(
    model: nn.Module, device: torch.device, stream: Decision, loaded: _Loaded, policy: CheckpointPolicy | None
) -> StreamedModel | None:
    """The model on its device, whole or but for its blocks. `policy`: of checkpointed blocks; None: all is kept, unless
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
