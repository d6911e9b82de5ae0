"""The model of a job that starts from another job: a base with adapters merged into it. And reward models."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.spec.run.chain import HandedBack, ModelChain
from core.spec.run.model_cache import MODEL, merged_key
from core.spec.run.orders import RewardModelOrder
from core.train.hub import model_files
from core.train.hub.handed_back_files import checked_folder, has_tokenizer, require_fit
from core.train.hub.model_cache import CachedModel, ModelCache
from core.train.prepare.models import OnProgress, Prepared, allow_merge, prepare_model, prepare_tokenizer, prepared


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
        found = prepared(there)
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
        found = prepared(_merged(key(count), merge, folders[id(merge)], found, cache, on_progress))
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
        allow_merge(base.model_dir)
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
