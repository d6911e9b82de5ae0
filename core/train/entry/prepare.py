"""Bring a model onto this machine before a GPU is held: `python -m core.train.entry.prepare RUN_DIR`
(core/spec/run).

Torch is imported only when a GGUF file must be converted. SIGTERM ends it at once with EXIT_CHECKPOINTED: whatever is
complete on the disk stays, and the next try goes on from there.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, assert_never

from core.errors import EftError, ModelError, NoSpace
from core.spec.axes.data import HubDataset
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, Model, RegistryModel
from core.spec.run.chain import HandedBack, ModelChain
from core.spec.run.events import FailureClass
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.model_cache import MODEL, gguf_key, merged_key, unpacked_key
from core.spec.run.orders import PrepareOrder, RewardModelOrder
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm, leave
from core.train.export.prepare import prepare_exports
from core.train.hub import download, gguf, model_files
from core.train.hub.datasets import prepare_dataset
from core.train.hub.handed_back_files import checked_folder, has_tokenizer, require_fit
from core.train.hub.model_cache import CachedModel, ModelCache
from core.train.rollout.sandboxed.tasks import prepare_task
from core.train.tools.install import ToolsMissing, install

OnProgress = Callable[[str, int, int | None], None]
"""(phase, bytes done, bytes in all or None); phase: "downloading", "converting", "waiting" (for another job at it)."""

PROGRESS_SECONDS = 0.5
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


def prepare_tokenizer(
    model: Model, models_dir: Path, roots: list[Path] | None, offline: bool, on_progress: OnProgress
) -> Prepared:
    """The same for what only wants to render rows: no weights are downloaded or read, unless they are in one file with
    the tokenizer (GGUF)."""
    cache = ModelCache(models_dir)
    match model:
        case HubModel():
            return _prepared(download.prepare_hub_tokenizer(model, cache, offline, on_progress))
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
            hub = _prepared(download.prepare_hub(model, cache, offline, on_progress))
            return _unpacked(hub, cache, on_progress, field="model.id")
        case LocalModel():
            return _unpacked(_prepare_local(model, cache, roots), cache, on_progress, field="model.path")
        case GGUFModel():
            return _prepared(_prepare_gguf(model, cache, roots, offline, on_progress))
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


def prepare_chain(
    chain: ModelChain,
    models_dir: Path,
    runs_dir: Path,
    roots: list[Path] | None,
    offline: bool,
    on_progress: OnProgress,
    *,
    weights: bool = True,
) -> Prepared:
    """What a job starts from whose model is another job: its base model, with adapters merged into it where the chain
    says so. Raises ModelError where something of it has gone or is not what was pinned, and as `prepare_model`.

    `weights`: False for what only renders rows.
    """
    cache = ModelCache(models_dir)
    if not weights:
        return _chain_tokenizer(chain, cache, models_dir, runs_dir, roots, offline, on_progress)
    folders = {id(one): checked_folder(runs_dir, one, cache.digest) for one in chain.handed_back}

    def key(count: int) -> str:
        """The entry of the model with so many of the adapters merged into it."""
        return merged_key(chain.model_copy(update={"merges": chain.merges[:count], "adapter": None}).merged_key)

    counts = range(len(chain.merges), 0, -1)
    done, there = next(((count, one) for count in counts if (one := cache.entry(key(count)))), (0, None))
    if there is not None:
        found = _prepared(there)
    elif chain.weights is not None:
        folder = folders[id(chain.weights)]
        summary = model_files.inspect(folder, field="model.id")
        made: dict[str, Any] = {"type": "job", "job": chain.weights.job, "sha256": chain.weights.sha256}
        found = Prepared(folder, made, summary.parameters, summary.as_dict())
    else:
        assert chain.root is not None  # one of both is the base
        found = prepare_model(chain.root, models_dir, roots, offline, on_progress)
        _same_root(chain.root_source, found.source)
    for count, merge in enumerate(chain.merges[done:], done + 1):
        found = _prepared(_merged(key(count), merge, folders[id(merge)], found, cache, on_progress))
    if chain.adapter is None:
        return found
    adapter = folders[id(chain.adapter)]
    require_fit(adapter, found.model_dir)
    return replace(found, adapter_dir=adapter, tokenizer_dir=adapter if has_tokenizer(adapter) else None)


def prepare_reward_model(
    one: RewardModelOrder,
    models_dir: Path,
    runs_dir: Path | None,
    roots: list[Path] | None,
    offline: bool,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Bring a reward model here; its entry in the result. Raises as `prepare_chain`, with the field of the reward."""
    try:
        if one.chain is not None and runs_dir is not None:
            found = prepare_chain(one.chain, models_dir, runs_dir, roots, offline, on_progress)
        else:
            found = prepare_model(one.model, models_dir, roots, offline, on_progress)
            require_score(found.model_dir)
    except ModelError as error:
        field = f"{one.field}{(error.field or 'model').removeprefix('model')}"
        raise ModelError(f"the reward model `{one.reward}`: {error.message}", field=field, code=error.code) from error
    return {
        "reward": one.reward, "model_dir": str(found.model_dir), "source": found.source, **found.more_folders
    }  # fmt: skip


def require_score(folder: Path) -> None:
    """ModelError where the model in a folder has not the head of a reward model."""
    about = model_files.read_json(folder / "config.json", field="model")
    name = str((about.get("architectures") or [""])[0])
    labels = about.get("num_labels") or len(about.get("id2label") or ()) or 2  # transformers writes neither for two
    if not name.endswith("ForSequenceClassification") or labels != 1:
        raise ModelError(
            f"its config.json describes {name or 'no class'} with {labels} labels, and a reward model is a "
            "…ForSequenceClassification with one: name the `model/` of a reward model, or a job of `stage: reward`",
            field="model",
            code="not_a_reward_model",
        )


def _merged(
    key: str, merge: HandedBack, adapter: Path, base: Prepared, cache: ModelCache, on_progress: OnProgress
) -> CachedModel:
    """The entry of `base` with an adapter merged into it; made where it is not there."""
    made = {"type": "job", "job": merge.job, "sha256": merge.sha256, "base": base.source}
    with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
        if (entry := cache.entry(key)) is not None:
            return entry
        from core.train.export.merge_first import write_merged_model

        require_fit(adapter, base.model_dir)
        on_progress("converting", 0, None)
        shutil.rmtree(work / MODEL, ignore_errors=True)  # half a model is of no use
        size = sum(path.stat().st_size for path in base.model_dir.glob("*.safetensors"))
        memory_limit.allow_more(MERGE_TIMES * size + MERGE_BYTES)
        write_merged_model(base.model_dir, adapter, merge.quantization, work / MODEL)
        return cache.commit(key, work, made, model_files.inspect(work / MODEL, field="model.id"))


def _chain_tokenizer(
    chain: ModelChain,
    cache: ModelCache,
    models_dir: Path,
    runs_dir: Path,
    roots: list[Path] | None,
    offline: bool,
    on_progress: OnProgress,
) -> Prepared:
    """The tokenizer of the newest job of the chain, with the configuration of its base model."""
    newest = chain.newest
    assert newest is not None  # a chain has at least one job
    tokenizer: Path | None = checked_folder(runs_dir, newest, cache.digest)
    if tokenizer is not None and not has_tokenizer(tokenizer):
        tokenizer = None  # that of the base model
    if chain.weights is not None:
        base = Prepared(checked_folder(runs_dir, chain.weights, cache.digest), {"type": "job"}, 0, {})
    else:
        assert chain.root is not None
        base = prepare_tokenizer(chain.root, models_dir, roots, offline, on_progress)
    return replace(base, tokenizer_dir=tokenizer)


def _same_root(pinned: dict[str, Any], found: dict[str, Any]) -> None:
    for name in ("commit", "sha256"):
        if name in pinned and pinned[name] != found.get(name):
            raise ModelError(
                f"the base model is not the one that the earlier job was trained over: its {name} was {pinned[name]}, "
                f"and is {found.get(name)}; put those files back, or train that job again",
                field="model.id",
                code="model_job_changed",
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
            size = sum(path.stat().st_size for path in found.model_dir.glob("*.safetensors"))
            memory_limit.allow_more(MERGE_TIMES * size + MERGE_BYTES)
            shutil.rmtree(work / MODEL, ignore_errors=True)  # half a model is of no use

            def alive() -> None:
                on_progress("converting", 1, None)

            dtype = write_unpacked(found.model_dir, packing, work / MODEL, alive)
            made = source | {"unpacked": {"from": packing.words, "dtype": dtype}}
            entry = cache.commit(key, work, made, model_files.inspect(work / MODEL, field=field))
    found = _prepared(entry)
    return replace(found, source=source | {"unpacked": entry.source["unpacked"]})


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


def _prepared(entry: CachedModel) -> Prepared:
    return Prepared(entry.model_dir, entry.source, entry.summary["parameters"], entry.summary)


def failure_class(error: Exception) -> FailureClass:
    match error:
        case MemoryError():
            return "memory"
        case OSError() if error.errno == errno.ENOMEM:
            return "memory"
        case RuntimeError() if "allocate memory" in str(error):  # torch's, which is not to be imported for this
            return "memory"
        case download.HubUnreachable() | NoSpace() | OSError():
            return "machine"
        case EftError():
            return "user"
        case _:
            return "internal"


class _Progress:
    """Phases as they change, bytes at most twice a second."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._phase = ""
        self._last = 0.0
        self._whole = False

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        if phase != self._phase:
            self._events.write("phase", phase=phase)
            self._phase = phase
            self._last = 0.0
        now = time.monotonic()
        first_whole = done == total and not self._whole
        if phase == "downloading" and (now - self._last >= PROGRESS_SECONDS or first_whole):
            self._events.write("progress", bytes=done, total_bytes=total)
            self._last = now
            self._whole = done == total
        elif phase == "converting" and done:
            self._events.alive()


def main(arguments: list[str]) -> int:
    run_dir = run_folder("core.train.entry.prepare", "Bring a model, and hub data sets, onto the data root.", arguments)
    order = PrepareOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    arm(order.fence_seconds, held_at=order.held_at, on_stop=lambda: os._exit(EXIT_CHECKPOINTED))
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
    try:
        memory_limit.hold(order.memory_limit)
        progress = _Progress(events)
        models_dir, roots = Path(order.models_dir), [Path(root) for root in order.model_roots]
        if order.chain is not None and order.runs_dir is not None:
            runs_dir = Path(order.runs_dir)
            prepared = prepare_chain(
                order.chain, models_dir, runs_dir, roots, order.offline, progress, weights=order.weights
            )
        else:
            prepare = prepare_model if order.weights else prepare_tokenizer
            prepared = prepare(order.model, models_dir, roots, order.offline, progress)
        cache = ModelCache(Path(order.models_dir))
        if order.cache_dir is not None and (order.exports or order.tools):
            cache_dir, task_folder = Path(order.cache_dir), order.lm_eval_tasks and Path(order.lm_eval_tasks)
            progress("installing", 0, None)
            prepare_exports(
                order.exports, prepared.model_dir, cache_dir, offline=order.offline, task_folder=task_folder or None
            )
            for tools in order.tools:
                place = "stage.reward" if tools in ("math", "tasks") else "tracking"
                install(tools, cache_dir, offline=order.offline, field=place)
        runs = None if order.runs_dir is None else Path(order.runs_dir)
        scorers = [
            prepare_reward_model(one, models_dir, runs, roots, order.offline, progress) for one in order.reward_models
        ]
        datasets = []
        for one in order.datasets:
            if isinstance(one.source, HubDataset):
                paths, origin = prepare_dataset(one.source, one.field, cache, order.offline, progress)
            else:
                if order.cache_dir is None:
                    raise ToolsMissing("the order names no cache for reasoning-gym", field=one.field)
                paths, origin = prepare_task(
                    one.source, one.field, cache, Path(order.cache_dir), offline=order.offline, told=progress
                )
            datasets.append({"field": one.field, "paths": [str(path) for path in paths], "source": origin})
    except Exception as error:
        failure = failure_class(error)
        code = error.code if isinstance(error, EftError) else failure
        message = error.message if isinstance(error, EftError) else f"{type(error).__name__}: {error}"
        if failure == "memory":
            code, message = "memory_limit", f"out of memory while the model is prepared; {memory_limit.ways()}"
        field = error.field if isinstance(error, EftError) else None
        told: dict[str, Any] = {"failure": failure, "code": code, "message": message, "field": field}
        if isinstance(error, NoSpace) and error.needs_bytes is not None:
            told["needs_bytes"] = error.needs_bytes
        return tell_failure(error, events, told)
    result = {
        "model_dir": str(prepared.model_dir),
        "source": prepared.source,
        "parameters": prepared.parameters,
        "summary": prepared.summary,
        "datasets": datasets,
    }
    if scorers:
        result["reward_models"] = scorers
    result |= prepared.more_folders
    events.write("result", result=result, artifacts=[])
    return EXIT_OK


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
