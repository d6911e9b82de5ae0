"""Can this model keep packed rows apart? It is tried, not looked up: two rows alone, and packed.

Attention is not the only way for one row to reach another: a convolution or a recurrent state over the line does it
too (state-space and hybrid models), and so do positions that a model counts by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from core.errors import SpecError
from core.train.attention import packed
from core.train.attention.segments import TORCH, apart, varlen
from core.train.batch import Batch
from core.train.data.dataset import TokenDataset
from core.train.engine import Engine
from core.train.logits import all_logits

SEGMENTS = "segments"
"""SDPA once a row."""
ROWS = (9, 14, 5)
PROMPTS = (6, 4)
PAIRS = ((9, 14), (12, 5))
"""Tokens of prompts, and of the answers to them with the prompt."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 4e-2
"""Largest difference that rounding may make, of the largest logit: in float32, and in 16 bits."""


def prepare_packing(engine: Engine) -> dict[str, Any]:
    """Set the model up for packed batches; what the run record says of it. SpecError when it mixes rows."""
    base = _base(engine)
    before = base.config._attn_implementation
    tried: dict[str, str] = {}
    if before == "sdpa" and base._can_set_attn_implementation():
        packed.register()
        kernels, why = _varlen_kernels(engine.device, _head_width(base))
        base.set_attn_implementation(packed.NAME)
        for kernel in (*kernels, None):
            packed.Varlen.by = kernel
            if (gap := _gap(engine)) is None:
                found = {"attention": kernel or SEGMENTS} | ({"not": tried} if tried else {})
                return found | ({"notice": why} if why else {})
            tried[kernel or SEGMENTS] = gap
        base.set_attn_implementation(before)
    if (gap := _gap(engine)) is None:
        return {"attention": f"{before} with a mask", "not": tried}
    raise SpecError(
        f"this model cannot be trained on packed rows: {gap}; take `batching: tokens`, which pads rows of like length",
        field="batching",
    )


def prepare_padded(engine: Engine) -> dict[str, Any] | None:
    """Have a library compute attention of padded rows, where one passed the device's self-test; what the run record
    says of it. None: there is no such library, or the model's attention cannot be replaced."""
    base = _base(engine)
    before, varlen = base.config._attn_implementation, packed.Varlen
    if not varlen.libraries or before != "sdpa" or not base._can_set_attn_implementation():
        return None
    rows = _rows(engine.model)
    batch = rows.collate(range(len(rows)), 0, [0]).to(engine.device)
    wanted = _logits(engine, batch)
    packed.register()
    base.set_attn_implementation(packed.NAME)
    varlen.padded = True
    tried: dict[str, str] = {}
    for kernel in varlen.libraries:
        varlen.by = kernel
        gap = _varlen_gap(engine.device, ROWS, ROWS, kernel, _head_width(base))
        if gap is None:
            try:
                gap = _apart_by(engine, wanted, _logits(engine, batch))
            except (TypeError, NotImplementedError, RuntimeError, ValueError) as error:
                gap = _refusal(error)
        if gap is None:
            return {"attention": kernel} | ({"not": tried} if tried else {})
        tried[kernel] = gap
    varlen.by, varlen.padded = None, False
    base.set_attn_implementation(before)
    return {"attention": before, "not": tried}


def share_prompts(engine: Engine, longest: int) -> str | None:
    """Find out whether the prompt of a pair can be computed once for both answers, after `prepare_packing`. None: yes;
    else why not. `longest`: tokens of the longest sequence of the run."""
    base = _base(engine)
    if base.config._attn_implementation != packed.NAME:
        return "its attention cannot be replaced by one that knows them"
    with packed.windows() as windows:
        gap = _gap(engine, pairs=True)
    if gap is None and windows and longest > min(windows):
        gap = f"a layer looks back {min(windows)} tokens, and the longest sequence has {longest}"
    if gap is None and packed.Varlen.by is not None:
        gap = _shared_varlen_gap(engine.device, packed.Varlen.by, _head_width(base))
    return gap


def _gap(engine: Engine, *, pairs: bool = False) -> str | None:
    """None when the logits of packed rows are those of the rows alone; else in which way not. `pairs`: the rows are
    pairs whose prompt is in the line once."""
    rows = _pairs(engine.model) if pairs else _rows(engine.model)
    numbers, places = range(len(rows)), range(rows.sequences)
    try:
        each = [rows.collate([row], 0, [place]) for row in numbers for place in places]
        alone = [_logits(engine, batch.to(engine.device))[0] for batch in each]
        return _apart_by(engine, alone, _logits(engine, rows.pack(numbers).to(engine.device)))
    except (TypeError, NotImplementedError, RuntimeError, ValueError) as error:
        return _refusal(error)


def _base(engine: Engine) -> Any:
    model: Any = engine.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refusal(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"its forward pass refuses them ({type(error).__name__}: {error})"


def _logits(engine: Engine, batch: Batch) -> list[Tensor]:
    """Those of each row, float32 [tokens, vocabulary]."""
    with engine.inference() as model:
        found = all_logits(model, batch).float()
    if not batch.packed:
        return [row[:tokens] for row, tokens in zip(found, batch.lengths, strict=True)]
    line = found[0] if batch.shared is None else found[0].index_select(0, batch.shared.places)
    return list(torch.split(line, list(batch.lengths)))


def _apart_by(engine: Engine, alone: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """None when two computations of the rows' logits agree up to rounding; else by how much they differ."""
    largest = max(float(logits.abs().max()) for logits in alone)
    gap = max(float((a - b).abs().max()) for a, b in zip(alone, found, strict=True)) / max(largest, 1e-30)
    computed = engine.autocast or next(p.dtype for p in engine.model.parameters() if p.is_floating_point())
    allowed = TOLERANCE.get(computed, COARSE)
    if gap <= allowed:
        return None
    return f"its logits then differ by {gap:.1%} of the largest (rounding may make {allowed:.1%})"


def _rows(model: nn.Module) -> TokenDataset:
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    ids = (np.arange(sum(ROWS)) * 7919 + 11) % vocabulary
    ends = np.cumsum(ROWS)
    flags = np.ones(len(ids), dtype=np.bool_)
    return TokenDataset(ids.astype(np.int32), flags, ends - np.array(ROWS), ends, np.arange(len(ROWS)))


def _pairs(model: nn.Module) -> TokenDataset:
    rows = _rows(model)
    parts: list[npt.NDArray[np.int32]] = []
    for pair, (prompt, answers) in enumerate(zip(PROMPTS, PAIRS, strict=True)):
        for place, tokens in enumerate(answers):
            own = (np.arange(tokens - prompt) * 4421 + 100 * pair + 50 * place) % rows.ids.max()
            parts.append(np.concatenate([rows.ids[pair : pair + prompt], own]).astype(np.int32))
    ends = np.cumsum([len(part) for part in parts])
    ids, starts = np.concatenate(parts), ends - [len(part) for part in parts]
    flags = np.ones(len(ids), dtype=np.bool_)
    found = TokenDataset(ids, flags, starts, ends, np.arange(len(PAIRS)), sequences=2)
    found.share_prompts = True
    return found


def _head_width(base: Any) -> int:
    """Numbers of a head of attention, on which kernels have limits; 64 where the config does not say."""
    config = base.config.get_text_config()
    width = getattr(config, "head_dim", None)
    if isinstance(width, int):
        return width
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 64


def _varlen_kernels(device: torch.device, width: int) -> tuple[list[str], str | None]:
    """The variable-length kernels that run there and are right, best first, and why others are not used, on a GPU."""
    if device.type != "cuda":
        return [], None
    found, reasons = [], []
    for kernel in (*packed.Varlen.libraries, TORCH):
        gap = packed.Varlen.veto if kernel == TORCH else None
        if gap is None and (gap := _varlen_gap(device, ROWS, ROWS, kernel, width)) is None:
            found.append(kernel)
        elif gap is not None:
            reasons.append(gap)
    return found, "; ".join(reasons) or None


def _shared_varlen_gap(device: torch.device, kernel: str, width: int) -> str | None:
    """None when that kernel is right for rows with more keys than queries, too."""
    keys = [tokens for pair in PAIRS for tokens in pair]
    queries = [
        tokens - (prompt if place else 0)
        for prompt, pair in zip(PROMPTS, PAIRS, strict=True)
        for place, tokens in enumerate(pair)
    ]
    return _varlen_gap(device, queries, keys, kernel, width)


def _varlen_gap(
    device: torch.device, queries: Sequence[int], keys: Sequence[int], kernel: str, width: int
) -> str | None:
    """None when the kernel over rows of so many queries and keys gives what SDPA gives for each of them, forward and
    backward; else in which way not."""
    what = "variable-length flash attention" + ("" if kernel == TORCH else f" by {kernel}")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for heads, tokens in ((4, sum(queries)), (2, sum(keys)), (2, sum(keys)))
    )
    lengths = [
        (torch.tensor([0, *each], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), max(each))
        for each in (queries, keys)
    ]
    try:
        ours = varlen(query, key, value, lengths[0], lengths[1], None, kernel)
        gradients = torch.autograd.grad(ours.float().square().sum(), (query, key, value))
        theirs = apart(query, key, value, queries, None, key_segments=keys)
        expected = torch.autograd.grad(theirs.float().square().sum(), (query, key, value))
    except (ImportError, RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        return f"{what} does not run here ({(str(error).splitlines() or [type(error).__name__])[0]})"
    pairs: list[tuple[Tensor, Tensor]] = [(ours, theirs), *zip(gradients, expected, strict=True)]
    gap = max(float((a - b).detach().float().abs().max() / b.detach().float().abs().max()) for a, b in pairs)
    return f"{what} is off by {gap:.1%} here" if gap > COARSE else None
