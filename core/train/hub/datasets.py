"""Data sets from a Hugging Face hub: pinned to a commit, data files only, cached as models are.

Which files: those that `files` names; else those of the subset and split that the data set's card declares (`configs`,
https://huggingface.co/docs/hub/datasets-manual-configuration); else those with the split's name in their path. Where
that leaves a choice, the job has to make it. Files of containers that uploads do not have, and slices of a split, are
written as JSON Lines (`rows.py`). No code of a repository is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.base.files import sha256 as file_sha256
from core.errors import DataError, ModelError
from core.spec.axes.data import HubDataset
from core.spec.run.model_cache import MODEL, dataset_key
from core.train.hub import download, rows
from core.train.hub.download import COMMIT, OnProgress
from core.train.hub.model_cache import CachedModel, ModelCache

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo

_CARD_ONLY = ("config_name", "data_files", "data_dir", "default", "description", "drop_labels", "version")
"""Entries of a card's subset that say which files it has; all others say how to read them."""
_ABOUT = ("dataset_infos.json", "dataset_dict.json", "state.json", "dataset_info.json")
"""JSON files that describe a data set and hold none of its rows."""
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache entry holds."""

    files: list[str]
    """Names in the repository, in the order of the rows."""
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepare_dataset(
    source: HubDataset, field: str, cache: ModelCache, offline: bool, on_progress: OnProgress
) -> tuple[list[Path], dict[str, Any]]:
    """The files of a data set, downloaded when they are not there, and where they came from. Needs no network when they
    are and `revision` is a commit.

    Raises DataError (the user's to solve), hub.HubUnreachable and NoSpace.
    """
    selection: list[Any] = [source.config, source.split, source.files]
    if "[" in source.split:
        selection.append(sorted(source.columns.items()))  # cells of a CSV file are read by the names of their columns
    chosen = hashlib.sha256(json.dumps(selection).encode()).hexdigest()[:16]
    ref = f"data/{source.id}@{source.revision}/{chosen}"
    known = cache.read_ref(ref)
    if known is not None and (COMMIT.fullmatch(source.revision) or download.is_offline(offline)):
        entry = cache.entry(known["key"])
        if entry is not None:
            return _found(entry)
    if download.is_offline(offline):
        words = f"{source.id} at {source.revision} is not on the data root, and this installation works offline"
        raise DataError(
            f"{words} (EFT_OFFLINE); prepare it once with a network", field=field, code="dataset_not_cached"
        )
    info = _info(source, field)
    commit = str(info.sha)
    key = dataset_key(source.id, commit, chosen)
    entry = cache.entry(key)
    if entry is None:
        with cache.lock(key, lambda: on_progress("waiting", 0, None)) as work:
            entry = cache.entry(key) or _download(source, field, info, key, cache, work, on_progress)
    cache.write_ref(ref, {"key": key, "commit": commit})
    return _found(entry)


def _found(entry: CachedModel) -> tuple[list[Path], dict[str, Any]]:
    return sorted(entry.model_dir.iterdir()), entry.source


def _info(source: HubDataset, field: str) -> DatasetInfo:
    from huggingface_hub import HfApi

    with _data_errors(field), download.hub_errors(source.id, source.revision):
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=download.token())
        return api.dataset_info(source.id, revision=source.revision, files_metadata=True, timeout=download.TIMEOUT)


def _download(
    source: HubDataset, field: str, info: DatasetInfo, key: str, cache: ModelCache, work: Path, on_progress: OnProgress
) -> CachedModel:
    sizes = {file.rfilename: file for file in info.siblings or []}
    configs = info.card_data.get("configs") if info.card_data is not None else None
    parts = choose_parts(source, list(sizes), configs, field)
    names = list(dict.fromkeys(name for part in parts for name in part.files))
    total = sum(sizes[name].size or 0 for name in names)
    download.check_room(cache.root, total, "data set")
    download.forget_halves(work / "download")
    meter = download.Meter(total or None, on_progress)
    folder = work / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hashes: dict[str, str] = {}
    fetched: dict[str, Path] = {}
    digests: dict[str, str] = {}
    for name in names:
        with _data_errors(field):
            path = download.fetch(source.id, str(info.sha), name, work / "download", cache, meter, kind="dataset")
        lfs = sizes[name].lfs
        digests[name] = download.verified(path, lfs.sha256 if lfs is not None else None)
        fetched[name] = path
    at, columns = 0, {str(ours): theirs for ours, theirs in source.columns.items()}
    for part in parts:
        if part.slice is None and all(rows.is_read_as_it_is(name, part.options) for name in part.files):
            for name in part.files:
                flat = f"{at:05d}{Path(name).suffix}"  # flat folders: the order of names is that of the rows
                os.link(fetched[name], folder / flat)
                hashes[flat], at = digests[name], at + 1
            continue
        flat = f"{at:05d}.jsonl"
        files = [(name, fetched[name]) for name in part.files]
        count = rows.write_rows(
            files,
            part.options,
            columns,
            part.slice,
            folder / flat,
            field,
            lambda done: on_progress("converting", done, None),
        )
        if not count:
            words = f"`{source.split}` of {source.id} has no rows in {', '.join(part.files[:SHOWN])}"
            raise DataError(words, field=f"{field}.split", code="dataset_not_found")
        hashes[flat], at = file_sha256(folder / flat), at + 1
    shutil.rmtree(work / "download")
    origin = {"type": "hub", "id": source.id, "revision": source.revision, "commit": str(info.sha), "files": names}
    if source.split != "train":
        origin["split"] = source.split
    return cache.commit(key, work, origin, Contents(names, total), hashes)


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """Files of one split."""

    files: list[str]
    """In the order of the rows."""
    slice: str | None
    """Such as `:10%`; None: all rows."""
    options: dict[str, Any]
    """How the card says to read them, by the names of `datasets`."""


def choose_parts(source: HubDataset, names: list[str], configs: Any, field: str) -> list[SplitFiles]:
    """The files of every split that the source names, in its order. Raises DataError as `choose`."""
    found = []
    for written in source.split.split("+"):
        split, _, rest = written.partition("[")
        one = source.model_copy(update={"split": split})
        options = {} if source.files or not configs else _options(one, configs, field)
        found.append(SplitFiles(choose(one, names, configs, field), rest[:-1] if rest else None, options))
    return found


def _options(source: HubDataset, configs: Any, field: str) -> dict[str, Any]:
    """What the card says about how to read the files of the subset."""
    declared = _subset(source, configs, field)[1]
    return {str(key): value for key, value in declared.items() if key not in _CARD_ONLY}


def choose(source: HubDataset, names: list[str], configs: Any, field: str) -> list[str]:
    """Which files of a repository the rows are in. Raises DataError when there are none, or more than one way."""
    data = sorted(name for name in names if rows.suffix_of(name) and Path(name).name not in _ABOUT)
    if not data:
        raise _refused(source, f"has no {', '.join(rows.READERS)} file", names, f"{field}.id")
    if source.files:
        found: list[str] = []
        for pattern in source.files:
            matching = [name for name in data if fnmatch(name, pattern) and name not in found]
            if not matching:
                raise _refused(source, f"has no data file `{pattern}`", data, f"{field}.files")
            found += matching
        return found
    if configs:
        return _declared(source, data, configs, field)
    below = [name for name in data if source.config is None or name.startswith(f"{source.config}/")]
    if not below:
        raise _refused(source, f"has no folder `{source.config}`", data, f"{field}.config")
    word = re.compile(rf"(?:^|[/._-]){re.escape(source.split)}(?:[/._-]|$)")
    found = [name for name in below if word.search(name)]
    found = [
        name for name in found if name.endswith(rows.AS_THEY_ARE)
    ] or found  # others may be the same rows once more
    if not found:
        raise _refused(
            source, f"has no file of the split `{source.split}`; name them as `files`", below, f"{field}.split"
        )
    tops = {name.partition("/")[0] if "/" in name else "" for name in found}
    if source.config is None and len(tops) > 1:
        subsets = ", ".join(sorted(top or "(the top)" for top in tops))
        words = f"{source.id} has files of `{source.split}` in several folders ({subsets}); choose one as `config`"
        raise DataError(words, field=f"{field}.config", code="dataset_ambiguous")
    return found


def _declared(source: HubDataset, data: list[str], configs: Any, field: str) -> list[str]:
    """As the card says."""
    name, declared = _subset(source, configs, field)
    files = declared.get("data_files")
    splits: dict[str, list[str]] = {}
    for one in files if isinstance(files, list) else [files]:
        if isinstance(one, dict):
            paths = one.get("path")
            splits.setdefault(str(one.get("split", "train")), []).extend(
                [paths] if isinstance(paths, str) else paths or []
            )
        elif isinstance(one, str):
            splits.setdefault("train", []).append(one)
    if source.split not in splits:
        words = f"`{name}` of {source.id} has no split `{source.split}`; it has {', '.join(splits) or 'none'}"
        raise DataError(words, field=f"{field}.split", code="dataset_not_found")
    found = [file for pattern in splits[source.split] for file in data if fnmatch(file, str(pattern))]
    if not found:
        raise _refused(source, f"has none of the files its card names ({splits[source.split]})", data, f"{field}.split")
    return list(dict.fromkeys(found))


def _subset(source: HubDataset, configs: Any, field: str) -> tuple[str, dict[str, Any]]:
    """The subset that the source names, or the only one, and what the card says of it."""
    by_name = {str(one.get("config_name", "default")): one for one in configs if isinstance(one, dict)}
    name = source.config or ("default" if "default" in by_name and len(by_name) > 1 else None)
    if name is None and len(by_name) == 1:
        name = next(iter(by_name))
    if name is None:
        words = f"{source.id} has several subsets ({', '.join(by_name)}); choose one as `config`"
        raise DataError(words, field=f"{field}.config", code="dataset_ambiguous")
    if name not in by_name:
        words = f"{source.id} has no subset `{name}`; it has {', '.join(by_name)}"
        raise DataError(words, field=f"{field}.config", code="dataset_not_found")
    return name, by_name[name]


def _refused(source: HubDataset, words: str, names: list[str], field: str) -> DataError:
    there = f"{', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''}" or "nothing"
    return DataError(f"{source.id} {words}; there is {there}", field=field, code="dataset_not_found")


@contextmanager
def _data_errors(field: str) -> Iterator[None]:
    """The hub's answers about a repository, in the words of the data axis."""
    try:
        yield
    except ModelError as error:
        message = error.message.replace("no model", "no data set")
        place = f"{field}.revision" if (error.field or "").endswith("revision") else f"{field}.id"
        raise DataError(message, field=place, code=error.code.replace("model", "dataset")) from error
