"""A causal language model with packed linear layers, read shard by shard: the dense weights are never all in memory.

The skeleton is built without memory for its parameters; every tensor of the files is then read, quantised where it is a
linear layer's weight, and let go. The host needs the packed size, the layers that stay as they are, and one tensor.

Stays as it is: the output head and everything tied to it, embeddings, norms, and what the caller names. Refused by
name: Conv1D layers (their weight is transposed) and fused expert weights (three dimensions), which would leave most
of such a model dense; a base that is quantised already, unless it is NF4 as bitsandbytes writes it, which is taken as
it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from core.base.files import sha256
from core.train.kernels.format import Format
from core.train.quant import cache
from core.train.quant.fill import fill_model, names_wanted, read_tensors, weight_files
from core.train.quant.linear import QuantLinear
from core.train.quant.skeleton import finish, skeleton
from core.train.quant.targets import QuantOptions, already_quantised, choose_targets


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What was done: part of the run record."""

    format: Format
    layers: int
    """Linear layers with packed weights."""
    packed_bytes: int
    dense_bytes: int
    """What these layers would take in the run's dtype."""
    kept: dict[str, str] = field(default_factory=dict)
    """Linear layers left dense, and why."""
    source: str = "quantised"
    """`quantised` from dense files, `cache`, or `as it is` (the files were packed already)."""
    seconds: float = 0.0
    cache_fault: str | None = None
    """Why an entry of the cache could not be used, or not be written."""


def load_quantized(
    folder: Path,
    dtype: torch.dtype,
    options: QuantOptions | None = None,
    cache_dir: Path | None = None,
    *,
    between: Callable[[str], None] = lambda doing: None,
    digest: Callable[[Path], str] = sha256,
) -> tuple[nn.Module, QuantReport]:
    """A transformers causal language model from a local folder, on the CPU, in eval mode; everything that is not packed
    is in `dtype`. With `cache_dir` the packed weights are written there under a hash of the files and options, and read
    from there the next time; a cache that cannot be read or written costs time, and `cache_fault` says so. `between` is
    called after every tensor and every large file with what is being done ("loading" or "quantizing"), and may raise;
    `digest` returns a file's SHA-256. ModelError when the files cannot be read or the model cannot be quantised."""
    options = options or QuantOptions()
    started = time.perf_counter()
    model, config = skeleton(folder, dtype)
    already = already_quantised(config, options)
    targets, kept = choose_targets(model, options)
    source, read_from, key, fault = "as it is" if already else "quantised", folder, "", None
    if cache_dir is not None and not already:

        def hashed(path: Path) -> str:
            between("loading")
            return digest(path)

        key = cache.key(folder, weight_files(folder), options, dtype, hashed)
        hit, fault = cache.lookup(cache_dir, key)
        if hit is not None:
            source, read_from = "cache", hit
    doing = "quantizing" if source == "quantised" else "loading"
    how = None if already else options
    fill_model(model, read_tensors(read_from), names_wanted(model), targets, kept, dtype, how, lambda: between(doing))
    model.tie_weights()
    finish(model, folder)
    if cache_dir is not None and source == "quantised":
        between(doing)
        fault = cache.store(cache_dir, key, model, options, sorted(kept)) or fault
    report = report_of(model, options, dtype, kept, source)
    return model, replace(report, cache_fault=fault, seconds=time.perf_counter() - started)


def report_of(
    model: nn.Module, options: QuantOptions, dtype: torch.dtype, kept: dict[str, str], source: str
) -> QuantReport:
    packed = [m for m in model.modules() if isinstance(m, QuantLinear)]
    return QuantReport(
        format=options.format,
        layers=len(packed),
        packed_bytes=sum(m.quantized.nbytes for m in packed),
        dense_bytes=sum(m.in_features * m.out_features for m in packed) * dtype.itemsize,
        kept=kept,
        source=source,
    )
