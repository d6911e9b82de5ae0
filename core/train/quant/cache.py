"""Quantised models on disk: under a hash of what they were made from, complete or not there; and saving one for others.

A cached model is a folder in bitsandbytes' layout (int8: our own): `save_quantized` writes both it and exports.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from core import caches, removal
from core.base.files import sha256, sync
from core.spec.run.manifest import MANIFEST
from core.train.quant.int8 import INT8_METHOD
from core.train.quant.targets import QuantOptions

log = logging.getLogger("eft.train.quant")

VERSION = 1
"""Version of the cache's layout and of the arithmetic. Raise it when either changes: old entries are never read."""
STALE_SECONDS = 86400.0
_held: dict[Path, caches.Lease] = {}
"""Leases of the entries that this process has read."""


def key(
    folder: Path,
    files: Sequence[Path],
    options: QuantOptions,
    dtype: torch.dtype,
    digest: Callable[[Path], str] = sha256,
) -> str:
    """Hex digest over the files' contents, config.json, and everything that decides the packed bytes."""
    about: dict[str, Any] = {
        "version": VERSION,
        "format": options.format,
        "double": options.double,
        "block": options.block,
        "skip": sorted(options.skip),
        "dtype": str(dtype),
        "files": {file.name: digest(file) for file in [folder / "config.json", *files]},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def lookup(cache_dir: Path, key: str) -> tuple[Path | None, str | None]:
    """The folder of a complete entry, or what was wrong with it (None: there is none). A bad entry is thrown away, a
    good one is held until this process ends (core/caches.py)."""
    folder = cache_dir / key
    if not folder.is_dir():
        return None, None
    try:
        lease = caches.hold(folder / MANIFEST)
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != VERSION or manifest["key"] != key:
            fault: str | None = f"the cached packed weights are of version {manifest['version']}, this is {VERSION}"
        else:
            bad = [name for name, digest in manifest["files"].items() if sha256(folder / name) != digest]
            if not bad and lease is not None:
                _held[folder] = lease
                return folder, None
            fault = f"the cached packed weights are damaged ({bad[0]} has another SHA-256)" if bad else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        fault = f"the cached packed weights cannot be read ({error!r})"
    if fault is None or not folder.is_dir():
        return None, None  # another process has thrown it away
    log.warning("%s: %s", fault, folder)
    try:
        removal.remove(folder, ".bad-", ignore_errors=True)
    except OSError as error:
        log.warning("it cannot be thrown away: %s", error)
    return None, fault


def store(cache_dir: Path, key: str, model: nn.Module, options: QuantOptions, kept: Sequence[str]) -> str | None:
    """Write an entry; when another process was faster its entry stays. Answers why it could not be written, if so: a
    run does not need it."""
    try:
        publish(cache_dir, key, lambda aside: save_quantized(model, aside, options, kept))
    except (OSError, SafetensorError) as error:
        log.warning("the packed weights were not kept in %s: %s", cache_dir, error)
        return f"the packed weights could not be kept ({error}); the next start packs them again"
    return None


def publish(cache_dir: Path, key: str, fill: Callable[[Path], None]) -> None:
    """An entry whose files `fill` writes into a folder that it makes: synced and complete, or not there. When another
    process was faster its entry stays. OSError and SafetensorError when it cannot be written."""
    aside = cache_dir / f".new-{key}-{uuid.uuid4().hex}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _sweep(cache_dir)
        fill(aside)
        files = {file.name: sha256(file) for file in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({"version": VERSION, "key": key, "files": files}), encoding="utf-8")
        for file in [*aside.iterdir(), aside]:
            sync(file)
        try:
            aside.rename(cache_dir / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(cache_dir)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(cache_dir: Path) -> None:
    """Throw away what killed processes have left half written."""
    for left in cache_dir.glob(".*-*"):
        if time.time() - left.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def save_quantized(model: Any, folder: Path, options: QuantOptions, kept: Sequence[str]) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors` with packed weights. NF4 is written as
    bitsandbytes does: `AutoModelForCausalLM.from_pretrained` reads it where bitsandbytes is installed. `kept`: linear
    layers that are dense."""
    folder.mkdir(parents=True)
    config = model.config.to_dict()
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    config["quantization_config"] = (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": options.double,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(kept),
        }
        if options.format == "nf4"
        else {"quant_method": INT8_METHOD, "block": options.block}
    )
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str), encoding="utf-8")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    save_file(_packed_state(model), folder / "model.safetensors", metadata={"format": "pt"})


def _packed_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors as they go to a file, one name for each memory (the head of a tied model is left out)."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place in seen and tensor.numel():
            continue
        seen.add(place)
        state[name] = tensor.contiguous()
    return state
