"""A model on this machine: downloaded, converted from GGUF, unpacked, or checked where it lies. Torch is imported only
where weights must be converted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, assert_never

from core.errors import ModelError
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, Model, RegistryModel
from core.spec.run.model_cache import MODEL, gguf_key, unpacked_key
from core.train.base import memory_limit
from core.train.hub import download, gguf, model_files
from core.train.hub.model_cache import CachedModel, ModelCache

OnProgress = Callable[[str, int, int | None], None]
"""(phase, bytes done, bytes in all or None); phase: "downloading", "converting", "waiting" (for another job at it)."""

CONVERSION_TIMES = 40
"""Bytes of memory for each of a GGUF file: 2 bits become 32, and there are two copies while they are written."""

MERGE_TIMES, MERGE_BYTES = 2, 6 << 30
"""Memory of a merge: bytes for each of the model's files, and on top of that (torch, a shard, a layer in float32)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder in Hugging Face format that is complete, safe to load, and stays as it is."""

    model_dir: Path
    source: dict[str, Any]
    """{"type": "hub", "id", "revision", "commit"} | {"type": "local", "path", "sha256"} | {"type": "gguf", "sha256",
    "path" or "id", "file" and "commit", "dtype", …}."""
    parameters: int
    summary: dict[str, Any]
    """model_files.Summary as a dict."""
    adapter_dir: Path | None = None
    """Adapter that is to be trained further."""
    tokenizer_dir: Path | None = None
    """Folder of the tokenizer; None: `model_dir`."""

    @property
    def more_folders(self) -> dict[str, str]:
        """The folders beside `model_dir`, by name."""
        folders = {"adapter_dir": self.adapter_dir, "tokenizer_dir": self.tokenizer_dir}
        return {name: str(folder) for name, folder in folders.items() if folder is not None}


def prepare_model(
    model: Model, models_dir: Path, roots: list[Path] | None, offline: bool, on_progress: OnProgress
) -> Prepared:
    """Download, convert or check `model`. `roots` are the folders local models may lie below; None allows every path.

    Raises ModelError (the user's to solve; names the field), hub.HubUnreachable and NoSpace (the machine's).
    """
    cache = ModelCache(models_dir)
    cache.sweep()
    match model:
        case HubModel():
            hub = prepared(download.prepare_hub(model, cache, offline, on_progress))
            return _unpacked(hub, cache, on_progress, field="model.id")
        case LocalModel():
            return _unpacked(_prepare_local(model, cache, roots), cache, on_progress, field="model.path")
        case GGUFModel():
            return prepared(_prepare_gguf(model, cache, roots, offline, on_progress))
        case JobModel() | RegistryModel():
            raise _needs_service()
        case _ as never:
            assert_never(never)


def prepare_tokenizer(
    model: Model, models_dir: Path, roots: list[Path] | None, offline: bool, on_progress: OnProgress
) -> Prepared:
    """The same for what only wants to render rows: no weights are downloaded or read, unless they are in one file with
    the tokenizer (GGUF)."""
    cache = ModelCache(models_dir)
    match model:
        case HubModel():
            return prepared(download.prepare_hub_tokenizer(model, cache, offline, on_progress))
        case LocalModel():
            folder = _local_folder(model, roots)
            names = [path.name for path in folder.iterdir() if path.is_file() and download.is_small_file(path.name)]
            for name in names:
                allowed_path(str(folder / name), roots, field="model.path")
            model_files.check_config(
                model_files.read_json(folder / "config.json", field="model.path"), field="model.path"
            )
            model_files.check_tokenizer(names, field="model.path")
            return Prepared(folder, {"type": "local", "path": str(folder)}, 0, {})
        case GGUFModel():
            return prepare_model(model, models_dir, roots, offline, on_progress)
        case JobModel() | RegistryModel():
            raise _needs_service()
        case _ as never:
            assert_never(never)


def _needs_service() -> ModelError:
    return ModelError(
        "a job is known to its service alone; without one, give the folder of a model, such as the `merged` export of "
        "that job",
        field="model",
        code="model_needs_service",
    )


def _prepare_local(model: LocalModel, cache: ModelCache, roots: list[Path] | None) -> Prepared:
    """Used where it lies. The hash over its files is remembered, so that a large model is read once."""
    field, folder = "model.path", _local_folder(model, roots)
    used = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.endswith(download.NEVER)]
    for path in used:
        allowed_path(str(path), roots, field=field)
    summary = model_files.inspect(folder, field=field)
    hashes = [(path.name, cache.digest(path.resolve())) for path in used if download.is_model_file(path.name)]
    together = sha256("".join(f"{digest}  {name}\n" for name, digest in hashes).encode()).hexdigest()
    source = {"type": "local", "path": str(folder), "sha256": together}
    return Prepared(folder, source, summary.parameters, summary.as_dict())


def _unpacked(found: Prepared, cache: ModelCache, on_progress: OnProgress, *, field: str) -> Prepared:
    """The same model in 16 bits where its files are quantised in a format that is not trained over as it is."""
    config = model_files.read_json(found.model_dir / "config.json", field=field)
    packing = model_files.unpacked_before(config, field=field)
    if packing is None:
        return found
    from core.train.hub.unpack.convert import VERSION, write_unpacked

    source = found.source
    identity = source.get("sha256") or sha256(f"{source['id']}@{source['commit']}".encode()).hexdigest()
    key = unpacked_key(identity, VERSION)
    with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
        if (entry := cache.entry(key)) is None:
            on_progress("converting", 0, None)
            allow_merge(found.model_dir)
            shutil.rmtree(work / MODEL, ignore_errors=True)  # half a model is of no use

            def alive() -> None:
                on_progress("converting", 1, None)

            dtype = write_unpacked(found.model_dir, packing, work / MODEL, alive)
            made = source | {"unpacked": {"from": packing.words, "dtype": dtype}}
            entry = cache.commit(key, work, made, model_files.inspect(work / MODEL, field=field))
    found = prepared(entry)
    return replace(found, source=source | {"unpacked": entry.source["unpacked"]})


def allow_merge(folder: Path) -> None:
    """Raise this process's memory limit by what it takes to write the weights of a folder anew."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    memory_limit.allow_more(MERGE_TIMES * size + MERGE_BYTES)


def _local_folder(model: LocalModel, roots: list[Path] | None) -> Path:
    folder = allowed_path(model.path, roots, field="model.path")
    if not folder.is_dir():
        raise ModelError(
            f"{model.path} is a file; give the model's folder, or a file that ends in .gguf", field="model.path",
            code="model_unreadable",
        )  # fmt: skip
    return folder


def _prepare_gguf(
    model: GGUFModel, cache: ModelCache, roots: list[Path] | None, offline: bool, on_progress: OnProgress
) -> CachedModel:
    def waiting() -> None:
        on_progress("waiting", 0, None)

    if model.path is not None:
        path = allowed_path(model.path, roots, field="model.path")
        if not path.is_file():
            raise ModelError(f"{model.path} is not a file", field="model.path", code="model_not_found")
        gguf.check_magic(path, field="model.path")
        digest = cache.digest(path)
        source = {"type": "gguf", "path": str(path), "sha256": digest}
        return _converted(path, source, cache, on_progress, field="model.path")

    pinned = download.pin_gguf(model, cache, offline)
    entry = cache.entry(gguf_key(pinned["sha256"], gguf.CONVERTER)) if pinned["sha256"] else None
    if entry is not None:
        entry = _from({"type": "gguf"} | {key: pinned[key] for key in ("id", "file", "commit", "sha256")}, entry)
    if entry is None:
        if download.is_offline(offline):
            raise download.not_cached(f"{model.file} of {model.id}", "model.file")
        with cache.lock(f"gguf-download/{model.id}/{pinned['commit']}/{model.file}", waiting) as work:
            path, digest = download.download_gguf(pinned, cache, work, on_progress)
            pinned = pinned | {"sha256": digest}
            source = {"type": "gguf"} | {key: pinned[key] for key in ("id", "file", "commit", "sha256")}
            entry = _converted(path, source, cache, on_progress, field="model.file")
            shutil.rmtree(work)
    download.remember_gguf(model, pinned, cache)
    return entry


def _converted(
    path: Path, source: dict[str, Any], cache: ModelCache, on_progress: OnProgress, *, field: str
) -> CachedModel:
    key = gguf_key(source["sha256"], gguf.CONVERTER)
    if entry := cache.entry(key):
        return _from(source, entry)
    with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
        if entry := cache.entry(key):
            return _from(source, entry)
        on_progress("converting", 0, None)
        memory_limit.allow_more(CONVERSION_TIMES * path.stat().st_size)
        shutil.rmtree(work / MODEL, ignore_errors=True)  # half a conversion is of no use
        record = gguf.convert(path, work / MODEL, field=field)
        summary = model_files.inspect(work / MODEL, field=field)
        return cache.commit(key, work, source | {"converter": gguf.CONVERTER} | record, summary)


def _from(source: dict[str, Any], entry: CachedModel) -> CachedModel:
    """The same bytes may have been converted from another place; say where they came from this time."""
    kept = {key: entry.source[key] for key in ("converter", "dtype", "tensor_types", "transformers")}
    return CachedModel(entry.model_dir, source | kept, entry.summary)


def allowed_path(path: str, roots: list[Path] | None, *, field: str) -> Path:
    """The real path, symlinks followed, if it exists below one of `roots` (every path is allowed when that is None)."""
    real = Path(path).expanduser().resolve()
    if roots is not None and not any(real.is_relative_to(root.expanduser().resolve()) for root in roots):
        named = ", ".join(str(root) for root in roots)
        raise ModelError(
            f"{path} does not lie below a folder models may be read from ({named or 'none is set'}); move it there, "
            "or let the administrator add its folder to EFT_MODEL_ROOTS",
            field=field,
            code="model_path_not_allowed",
        )
    if not real.exists():
        raise ModelError(f"{path} does not exist on this machine", field=field, code="model_not_found")
    return real


def prepared(entry: CachedModel) -> Prepared:
    """What an entry of the cache holds."""
    return Prepared(entry.model_dir, entry.source, entry.summary["parameters"], entry.summary)
