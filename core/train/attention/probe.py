"""Can this model keep packed rows apart? It is tried, not looked up: two rows alone, and packed.

Attention is not the only way for one row to reach another: a convolution or a recurrent state over the line does it
too (state-space and hybrid models), and so do positions that a model counts by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core.errors import SpecError
from core.train.attention import packed
from core.train.attention.segments import varlen
from core.train.data.dataset import TokenDataset
from core.train.engine import Engine
from core.train.logits import all_logits

ROWS = (9, 14, 5)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 4e-2
"""Largest difference that rounding may make, of the largest logit: in float32, and in 16 bits."""


def prepare_packing(engine: Engine) -> dict[str, Any]:
    """Set the model up for packed batches; what the run record says of it. SpecError when it mixes rows."""
    model: Any = engine.model
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    tried: dict[str, str] = {}
    if before == "sdpa" and base._can_set_attn_implementation():
        packed.register()
        packed.Varlen.works, why = _varlen_works(engine.device)
        base.set_attn_implementation(packed.NAME)
        for kernel in ("flash_varlen", "segments") if packed.Varlen.works else ("segments",):
            packed.Varlen.works = kernel == "flash_varlen"
            if (gap := _gap(engine)) is None:
                return {"attention": kernel} | ({"not": tried} if tried else {}) | ({"notice": why} if why else {})
            tried[kernel] = gap
        base.set_attn_implementation(before)
    if (gap := _gap(engine)) is None:
        return {"attention": f"{before} with a mask", "not": tried}
    raise SpecError(
        f"this model cannot be trained on packed rows: {gap}; take `batching: tokens`, which pads rows of like length",
        field="batching",
    )


def _gap(engine: Engine) -> str | None:
    """None when the logits of packed rows are those of the rows alone; else in which way not."""
    rows = _rows(engine.model)
    numbers = range(len(rows))
    try:
        with engine.inference() as model:
            alone = [all_logits(model, rows.collate([row], 0).to(engine.device))[0].float() for row in numbers]
            together = all_logits(model, rows.pack(numbers).to(engine.device))[0].float()
    except (TypeError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"its forward pass refuses them ({type(error).__name__}: {error})"
    found = torch.split(together, list(ROWS))
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


def _varlen_works(device: torch.device) -> tuple[bool, str | None]:
    """Whether PyTorch's variable-length flash attention runs there and is right; why not, on a GPU."""
    if device.type != "cuda":
        return False, None
    if packed.Varlen.veto is not None:
        return False, packed.Varlen.veto
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(ROWS), 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    boundaries = torch.tensor([0, *ROWS], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    try:
        ours = varlen(query, key, value, boundaries, max(ROWS), None)
        gradients = torch.autograd.grad(ours.float().square().sum(), (query, key, value))
        theirs, _ = packed.attend(nn.Module(), query, key, value, None, segments=ROWS)
        expected = torch.autograd.grad(theirs.float().square().sum(), (query, key, value))
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as error:
        return False, f"variable-length flash attention does not run here ({str(error).splitlines()[0]})"
    pairs: list[tuple[Tensor, Tensor]] = [(ours, theirs), *zip(gradients, expected, strict=True)]
    gap = max(float((a - b).float().abs().max() / b.float().abs().max()) for a, b in pairs)
    if gap > COARSE:
        return False, f"variable-length flash attention is off by {gap:.1%} here"
    return True, None
