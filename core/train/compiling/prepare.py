"""`training.compile`: compile the blocks of a run's model before its first step, and say which stay as they are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from core.errors import ModelError
from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.job import JobSpec
from core.train.batch import IGNORE_INDEX, Batch
from core.train.compiling.cache import compiled_code, compiler_here, key
from core.train.compiling.regions import Compiler, Region, reason_of
from core.train.engine import Engine
from core.train.memory.streaming.blocks import find_blocks
from core.train.model.compute import Compute
from core.train.model.load import context_length
from core.train.quant.linear import QuantLinear
from core.train.run import Run

ROWS = 3
TOKENS = (131, 61, 29, 13)
"""The batch that is compiled for: the most tokens that the model has positions for. Prime numbers, since a width of the
model that equals one of them would be taken for a number of rows or tokens."""
FOR_TORCH: dict[str, Any] = {
    "specialize_float": True,  # else `dynamic` makes tensors of a block's constants
    "recompile_limit": 16,  # kinds of blocks in one model
}
NO_COMPILER = "there is no C++ compiler on the PATH (`g++`, or what CXX names)"


@dataclass(frozen=True, slots=True)
class CompiledBlocks:
    """What became of `training.compile` in a run."""

    record: dict[str, Any]
    """For the run record; completed while the run goes on."""

    def fingerprint(self) -> dict[str, Any]:
        """What a run that resumes must have in common with this one to compute the same bits."""
        return {name: self.record[name] for name in ("graphs", "eager", "machine")}


def compile_blocks(run: Run, compute: Compute, engine: Engine, why_not: str | None) -> CompiledBlocks | None:
    """Compile the blocks of the engine's model, as far as that can be done, until the run is left; None where the job
    does not ask for it. Each block that stays as it was is told in a notice. Weights, gradients and random numbers stay
    as they are.

    `why_not`: what rules it out for the whole model.
    """
    if not run.spec.training.compile:
        return None
    run.phase("compiling")
    began = time.perf_counter()
    device = compute.placement.device
    compiler_words = compiler_here() if device.type == "cpu" else f"triton {_triton()}"
    machine = {"arch": compute.placement.arch, "torch": str(torch.__version__), "compiler": compiler_words}
    several = _several_rows(run.spec)
    if why_not is None and compiler_words is None:
        why_not = NO_COMPILER
    if limited := compute.placement.limits.fp32_rows or compute.placement.limits.output_bytes:
        why_not = why_not or f"this card's matrix products are made in parts ({limited:,})"
    compiler = Compiler(several_rows=several, sign_of_life=run.events.alive)
    regions: list[Region] = []
    try:
        blocks = find_blocks(engine.model)
    except ModelError:
        blocks, why_not = [], "transformers marks no list of layers of this model as its blocks"
    about: dict[str, Any] = {"batches": "of several rows" if several else "of one row", "blocks": len(blocks)}
    if why_not is None:
        about |= _compile(run, engine, compiler, regions, blocks, machine)
    eager = {region.name: region.why_eager for region in regions if region.why_eager is not None}
    if why_not is not None:
        eager = {name: why_not for name, _ in blocks} or {"all": why_not}
    about |= {"compiled": len(blocks) - len(eager) if blocks else 0, "graphs": list(compiler.graphs)}
    about |= {"eager": _by_reason(eager.items()), "machine": machine, "without_code": []}
    about["seconds"] = round(time.perf_counter() - began, 1)
    _tell(run, about)
    compiler.close(lambda block, reason: _tell_without_code(run, about, block, reason))
    run.check_stop()
    return CompiledBlocks(about)


def _compile(
    run: Run,
    engine: Engine,
    compiler: Compiler,
    regions: list[Region],
    blocks: list[tuple[str, nn.Module]],
    machine: dict[str, Any],
) -> dict[str, Any]:
    """Compile, with `regions` in place of the blocks until the run is left; entries of the run record."""
    spec = run.spec
    parts = {
        name: value if value is None or isinstance(value, str | bool) else value.model_dump(mode="json")
        for name, value in (
            ("method", spec.method),
            ("quantization", spec.quantization),
            ("attention", spec.training.attention),
            ("precision", spec.training.precision),
            ("checkpointing", spec.memory.gradient_checkpointing),
            ("several_rows", compiler.several_rows),
            ("head", spec.stage.head),
        )
    }
    stack = ExitStack()
    run.close_at_end(stack.close)
    fault, found = stack.enter_context(compiled_code(run.cache_dir, key(machine, run.model_dir, parts)))
    if fault is not None:
        run.notice("compile_cache", f"compiled blocks are not kept for the next attempt: {fault}")
    for name, block in blocks:
        if any(parameter.requires_grad for parameter in block.parameters()):
            regions.append(Region(name, block, compiler))
            stack.callback(regions[-1].release)
    _share_maps(engine.model)
    failed = try_blocks(engine, compiler)
    for region in regions:
        if region.why_eager is None and failed is not None:
            region.why_eager = failed
    if regions and not compiler.graphs:
        for region in regions:
            region.why_eager = region.why_eager or "torch compiled nothing of it, and gave no reason"
    trained = {region.name for region in regions}
    return {
        "cache": "none" if fault is not None else "found" if found else "new",
        "without_gradient": [name for name, _ in blocks if name not in trained],
    }


def try_blocks(engine: Engine, compiler: Compiler) -> str | None:
    """A forward and a backward over a batch of the shape that all attempts have; why the backward failed, if so."""
    batch = _batch(engine, ROWS if compiler.several_rows else 1)
    devices = [engine.device] if engine.device.type == "cuda" else []
    trained = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    with torch.random.fork_rng(devices=devices), torch._dynamo.config.patch(FOR_TORCH):
        with engine.training_pass():
            loss = engine.policy.cross_entropy(batch) if _writes(engine) else engine.policy.scores(batch).sum()
        try:
            # Not `backward`: gradients of nothing real must not be added up, nor seen by hooks of an optimizer.
            torch.autograd.grad(loss, trained, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"its backward cannot be compiled: {reason_of(error)}"
    return None


def _share_maps(model: nn.Module) -> None:
    """Let packed layers with equal tables hold one tensor. Weights that were just packed do, those that were read from
    the cache do not, and the code of a block depends on which of its inputs are the same tensor."""
    first: torch.Tensor | None = None
    for module in model.modules():
        if not isinstance(module, QuantLinear) or module.nested_map is None:
            continue
        if first is None:
            first = module.nested_map
        elif torch.equal(first, module.nested_map):
            module.nested_map = first


def _writes(engine: Engine) -> bool:
    from core.train.model.heads import has_head

    return not has_head(engine.model)


def _batch(engine: Engine, rows: int) -> Batch:
    room: Any = context_length(engine.model) or TOKENS[0]
    tokens = next((each for each in TOKENS if each <= room), TOKENS[-1])
    vocabulary = int(engine.model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    ids = (torch.arange(rows * tokens) * 7919 + 11).remainder(vocabulary).view(rows, tokens)
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    return Batch(ids, labels, (tokens,) * rows, rows * (tokens - 1)).to(engine.device)


def _several_rows(spec: JobSpec) -> bool:
    """Whether batches of the run have more than one row, as a rule."""
    match spec.batching:
        case Rows():
            return spec.training.per_device_train_batch_size * spec.stage.sequences > 1
        case Tokens():
            return True
        case Packed():
            raise ValueError("packed rows are not compiled (core/plan/rules/table.py)")


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


def _by_reason(eager: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in eager:
        found.setdefault(reason, []).append(name)
    return found


def _tell(run: Run, about: dict[str, Any]) -> None:
    for reason, names in about["eager"].items():
        which = names[0] if len(names) == 1 else f"{len(names)} of {about['blocks']} blocks ({names[0]} …)"
        run.notice("compile_fallback", f"{which}: not compiled, computed as without `training.compile`: {reason}")


def _tell_without_code(run: Run, about: dict[str, Any], block: str, reason: str) -> None:
    if not about["without_code"]:
        words = f"a batch was computed without compiled code at {block}, as any other of its shape will be"
        run.notice("compile_fallback", f"{words}: {reason}")
    about["without_code"].append({"block": block, "why": reason})
