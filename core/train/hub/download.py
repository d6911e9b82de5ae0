"""Models from a Hugging Face hub: pinned to a commit, only files that can be read safely, the token never logged.

Uses huggingface_hub (https://huggingface.co/docs/huggingface_hub), which resumes within a file while the process lives;
a later process goes on with the files that are complete. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honoured.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from core.base.files import sha256 as file_sha256
from core.errors import EftError, ModelError, NoSpace
from core.spec.axes.model import GGUFModel, HubModel
from core.spec.run.model_cache import MODEL, hub_key, tokenizer_key
from core.train.hub import model_files
from core.train.hub.model_cache import CachedModel, ModelCache

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

OnProgress = Callable[[str, int, int | None], None]
"""(phase, bytes done, bytes in all or None)."""

SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.model",
    "vocab*", "merges.txt", "chat_template*", model_files.INDEX_FILE,
)  # fmt: skip
"""Beside the weights nothing else of a repository is read; matched at its top level only."""
NEVER = (*model_files.PICKLE_SUFFIXES, ".py", ".pkl")
COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT = 30.0
MARGIN = 1.02
"""Room asked for beyond the download itself."""


class HubUnreachable(EftError):
    """The hub does not answer, or answers that it is ill. May be tried again."""

    code = "hub_unreachable"
    status = 503


def prepare_hub(model: HubModel, cache: ModelCache, offline: bool, on_progress: OnProgress) -> CachedModel:
    """The cache entry of a hub model, downloaded when it is not there. Needs no network when it is and `revision` is a
    commit."""
    field = "model.id"
    commit = model.revision if COMMIT.fullmatch(model.revision) else None
    ref = f"hub/{model.id}@{model.revision}"
    if commit is not None and (entry := cache.entry(hub_key(model.id, commit))):
        return entry
    if is_offline(offline):
        known = cache.read_ref(ref)
        if known is not None and (entry := cache.entry(known["key"])):
            return entry
        raise not_cached(f"{model.id} at {model.revision}", field)
    info = _model_info(model.id, model.revision)
    commit = str(info.sha)
    key = hub_key(model.id, commit)
    entry = cache.entry(key)
    if entry is None:
        with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
            entry = cache.entry(key) or _download_model(model, info, key, cache, work, on_progress)
    cache.write_ref(ref, {"key": key, "commit": commit})
    return entry


def prepare_hub_tokenizer(model: HubModel, cache: ModelCache, offline: bool, on_progress: OnProgress) -> CachedModel:
    """An entry with all that a hub model has beside its weights: some megabytes. The whole model, if that is there."""
    commit = model.revision if COMMIT.fullmatch(model.revision) else None
    ref = f"tokenizer/{model.id}@{model.revision}"
    if commit is None and is_offline(offline):
        known = cache.read_ref(f"hub/{model.id}@{model.revision}") or cache.read_ref(ref)
        commit = None if known is None else known["commit"]
    keys = () if commit is None else (hub_key(model.id, commit), tokenizer_key(model.id, commit))
    for key in keys:
        if entry := cache.entry(key):
            return entry
    if is_offline(offline):
        raise not_cached(f"the tokenizer of {model.id} at {model.revision}", "model.id")
    info = _model_info(model.id, model.revision)
    commit = str(info.sha)
    key = tokenizer_key(model.id, commit)
    entry = cache.entry(hub_key(model.id, commit)) or cache.entry(key)
    if entry is None:
        with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
            entry = cache.entry(key) or _download_tokenizer(model, info, key, cache, work, on_progress)
    cache.write_ref(ref, {"key": key, "commit": commit})
    return entry


def _download_tokenizer(
    model: HubModel, info: ModelInfo, key: str, cache: ModelCache, work: Path, on_progress: OnProgress
) -> CachedModel:
    commit, folder, field = str(info.sha), work / MODEL, "model.id"
    there = [file.rfilename for file in info.siblings or []]
    names = [name for name in there if is_small_file(name) and name != model_files.INDEX_FILE]
    forget_halves(folder)
    model_files.check_tokenizer(names, field=field)
    if "config.json" not in names:
        raise model_files.unreadable("the repository has no config.json; it is not a transformers model", field)
    meter = Meter(None, on_progress)
    for name in names:
        fetch(model.id, commit, name, folder, cache, meter)
    config = model_files.read_json(folder / "config.json", field=field)
    summary = model_files.Summary(0, 0, {}, str(config["model_type"]), model_files.check_config(config, field=field))
    shutil.rmtree(folder / ".cache")
    source = {"type": "hub", "id": model.id, "revision": model.revision, "commit": commit}
    return cache.commit(key, work, source, summary)


def pin_gguf(model: GGUFModel, cache: ModelCache, offline: bool) -> dict[str, Any]:
    """Which bytes a hub GGUF file means: {"id", "file", "commit", "sha256": str | None, "bytes": int | None}.

    `sha256` is what the hub says of a large file, None when it says nothing.
    """
    if model.id is None or model.file is None:
        raise ValueError("a local GGUF file has no place on a hub")
    ref = f"gguf/{model.id}@{model.revision}/{model.file}"
    known = cache.read_ref(ref)
    if known is not None and (COMMIT.fullmatch(model.revision) or is_offline(offline)):
        return known
    if is_offline(offline):
        raise not_cached(f"{model.file} of {model.id} at {model.revision}", "model.file")
    info = _model_info(model.id, model.revision)
    file = next((file for file in info.siblings or [] if file.rfilename == model.file), None)
    if file is None:
        there = [file.rfilename for file in info.siblings or [] if file.rfilename.endswith(".gguf")]
        raise ModelError(
            f"{model.id} has no file {model.file}; its GGUF files: {', '.join(there[:20]) or 'none'}",
            field="model.file",
            code="model_not_found",
        )
    if known is not None and known["commit"] == info.sha:
        return known  # with the hash we found ourselves, should the hub state none
    sha256 = file.lfs.sha256 if file.lfs is not None else None
    return {"id": model.id, "file": model.file, "commit": str(info.sha), "sha256": sha256, "bytes": file.size}


def remember_gguf(model: GGUFModel, pinned: dict[str, Any], cache: ModelCache) -> None:
    """So that the same request can be answered without a network."""
    cache.write_ref(f"gguf/{model.id}@{model.revision}/{model.file}", pinned)


def download_gguf(pinned: dict[str, Any], cache: ModelCache, work: Path, on_progress: OnProgress) -> tuple[Path, str]:
    """The file below `work`, and its SHA-256."""
    meter = Meter(pinned["bytes"], on_progress)
    check_room(cache.root, pinned["bytes"] or 0)
    path = fetch(pinned["id"], pinned["commit"], pinned["file"], work / "download", cache, meter)
    return path, verified(path, pinned["sha256"])


def is_offline(offline: bool) -> bool:
    """By order, or by huggingface_hub's own switches."""
    return offline or any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("EFT_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def is_small_file(name: str) -> bool:
    """Whether a file at the top of a repository or folder belongs to the model, beside its weights."""
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES) and not name.endswith(NEVER)


def is_model_file(name: str) -> bool:
    return is_small_file(name) or name.endswith(".safetensors")


def not_cached(what: str, field: str) -> ModelError:
    return ModelError(
        f"{what} is not in the model cache, and this installation works offline (EFT_OFFLINE); prepare it once with a "
        "network, or put the model below a model root and use its path",
        field=field,
        code="model_not_cached",
    )


def _model_info(repo: str, revision: str) -> ModelInfo:
    from huggingface_hub import HfApi

    with hub_errors(repo, revision):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token())
        return api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)


def _download_model(
    model: HubModel, info: ModelInfo, key: str, cache: ModelCache, work: Path, on_progress: OnProgress
) -> CachedModel:
    commit, folder, field = str(info.sha), work / MODEL, "model.id"
    files = {file.rfilename: file for file in info.siblings or [] if "/" not in file.rfilename}
    small = [name for name in files if is_small_file(name)]
    forget_halves(folder)

    meter = Meter(None, on_progress)
    # What may be refused is fetched first: nobody should wait for 15 GB to hear that they are of no use.
    for name in sorted(small, key=lambda name: (name != "config.json", name)):
        fetch(model.id, commit, name, folder, cache, meter)
        if name == "config.json":
            model_files.check_config(model_files.read_json(folder / name, field=field), field=field)
    indexed = model_files.INDEX_FILE in files
    index = model_files.read_json(folder / model_files.INDEX_FILE, field=field) if indexed else None
    weights = model_files.weight_files(list(files), index, field=field)
    model_files.check_tokenizer(small, field=field)
    if "config.json" not in files:
        raise model_files.unreadable("the repository has no config.json; it is not a transformers model", field)

    wanted = [*small, *weights]
    sizes = [files[name].size for name in wanted]
    meter.total = None if None in sizes else sum(size or 0 for size in sizes)
    missing = [name for name in weights if not (folder / name).exists()]
    check_room(cache.root, sum(files[name].size or 0 for name in missing))
    for name in weights:
        fetch(model.id, commit, name, folder, cache, meter)
    hashes = {}
    for name in weights:
        lfs = files[name].lfs
        hashes[name] = verified(folder / name, lfs.sha256 if lfs is not None else None)
    summary = model_files.inspect(folder, field=field)
    shutil.rmtree(folder / ".cache")
    for path in folder.iterdir():
        if path.name not in wanted:  # left by an earlier version of eft with another list
            path.unlink()
    source = {"type": "hub", "id": model.id, "revision": model.revision, "commit": commit}
    return cache.commit(key, work, source, summary, hashes)


def fetch(
    repo: str,
    commit: str,
    name: str,
    folder: Path,
    cache: ModelCache,
    meter: Meter,
    *,
    kind: Literal["model", "dataset"] = "model",
) -> Path:
    """One file of a repository, below `folder`."""
    from huggingface_hub import hf_hub_download

    with hub_errors(repo, commit):
        path = hf_hub_download(
            repo,
            name,
            repo_type=kind,
            revision=commit,
            local_dir=folder,
            cache_dir=cache.root / ".hf",  # never the user's own cache: nothing outside models_dir is read or written
            token=token(),
            endpoint=os.environ.get("HF_ENDPOINT"),
            etag_timeout=TIMEOUT,
            tqdm_class=meter.bar(),
        )
    meter.file_done(Path(path).stat().st_size)
    return Path(path)


def forget_halves(folder: Path) -> None:
    """huggingface_hub names half a file anew each time, so what a killed process left is of no more use."""
    for half in (folder / ".cache").rglob("*.incomplete"):
        half.unlink()


def verified(path: Path, expected: str | None) -> str:
    sha256 = file_sha256(path)
    if expected is not None and sha256 != expected:
        path.unlink()
        raise HubUnreachable(
            f"{path.name} arrived damaged (SHA-256 {sha256}, the hub says {expected}) and is fetched again on a retry"
        )
    return sha256


def check_room(folder: Path, need: int, what: str = "model") -> None:
    free = shutil.disk_usage(folder).free
    if need * MARGIN > free:
        raise NoSpace(
            f"the {what} needs {need / 1e9:.1f} GB more, and {folder} has {free / 1e9:.1f} GB left; free some space or "
            "move EFT_DATA to a larger disk",
            field="model",
            needs_bytes=int(need * MARGIN),
        )


def token() -> str | bool:
    """From the environment only; False keeps huggingface_hub from looking into the home folder."""
    return os.environ.get("HF_TOKEN") or False


class Meter:
    """Adds up the bytes of several files for `on_progress`, by way of the tqdm bars huggingface_hub draws."""

    def __init__(self, total: int | None, on_progress: OnProgress) -> None:
        self.total = total
        self._on_progress = on_progress
        self._complete = 0
        self._current = 0

    def bar(self) -> Any:
        from tqdm.std import tqdm  # type: ignore[import-untyped]

        meter = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(kwargs | {"disable": True}))

            def update(self, n: float | None = 1) -> bool | None:
                meter._advance(int(n or 0))
                return None

        return Bar

    def file_done(self, size: int) -> None:
        self._complete += size
        self._current = 0
        self._tell()

    def _advance(self, count: int) -> None:
        self._current += count
        self._tell()

    def _tell(self) -> None:
        done = self._complete + self._current
        self._on_progress("downloading", done, None if self.total is None else max(done, self.total))


@contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Say in our words whose fault it was: a wrong name or a closed door is the user's, all else may pass."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its conditions on the hub and give the worker a token that may read it "
            "(HF_TOKEN)",
            field="model.id",
            code="model_gated",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo}, or it is private and the worker has no token that may read it (HF_TOKEN)",
            field="model.id",
            code="model_not_found",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"{repo} has no revision {revision}; give a branch, a tag or a full commit",
            field="model.revision",
            code="model_revision_not_found",
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(
            f"{repo!r} is not a repository id ({error})", field="model.id", code="model_not_found"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ModelError(
                f"the hub refuses {repo} ({status}): check the worker's token (HF_TOKEN)",
                field="model.id",
                code="model_gated",
            ) from error
        raise HubUnreachable(f"the hub failed on {repo} ({_root(error)})", field="model.id") from error
    except (errors.LocalEntryNotFoundError, errors.FileMetadataError, httpx.HTTPError, ConnectionError) as error:
        raise HubUnreachable(
            f"the hub at {_host()} cannot be reached for {repo} ({_root(error)}). Without a network: name a mirror "
            "with HF_ENDPOINT, set EFT_OFFLINE=true if the box has the model already, or give the job a folder below "
            "EFT_MODEL_ROOTS as its `model`",
            field="model.id",
        ) from error


def _host() -> str:
    """Without what a mirror's address may hold of a password."""
    parts = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def _root(error: BaseException) -> str:
    """The first cause in one line; the full chain is in the log."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"[:300]
