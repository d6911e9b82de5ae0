"""Tokenised rows on disk, under a hash of all that they are made from: complete or not there, mapped into memory.

    tokens/<what the rows are>/<how they are rendered>/    about.json and one file an array

The first hash covers the content of the data files and how they are read, the second is of the renderer's fingerprint;
max_length and truncation are no part of either, since they only choose spans of the tokens. An entry whose files do not
have the hashes that were written with them, or that another version wrote, is thrown away and made anew. Of two jobs
that make the same entry at once the second keeps the first one's. Rows in use hold their entry (core/caches.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core import caches, removal
from core.base.files import remembered_sha256, sha256, sync, write_json
from core.spec.axes.data import RowFormat
from core.spec.run.orders import DataOrder
from core.train.data.dataset import TokenDataset

VERSION = 3
"""Version of the files' layout and of how rows are read. Raise it when either changes."""
ARRAYS = {"ids": np.int32, "learned": np.bool_, "starts": np.int64, "ends": np.int64, "lines": np.int64}
VALUES, TOKEN_VALUES = "values.", "token_values."
"""How the names of further files begin, one for each number of examples and of tokens (float32)."""
ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class TokenisedRows:
    """All rows of an order as tokens, before truncation."""

    dataset: TokenDataset
    format: RowFormat
    cut_prompts: int
    rows: int
    """Rows in the files, including those without a token, which the dataset leaves out."""


class TokenCache:
    """A folder of entries. `faults` says what did not work: a run goes on without the cache, its owner should know."""

    def __init__(self, cache_dir: Path) -> None:
        self._root = cache_dir / "tokens"
        self._digests = cache_dir / "digests"
        self.faults: list[str] = []

    def source_key(self, order: DataOrder) -> str:
        """Hash of the files' content and of how they are read. OSError when a file cannot be read."""
        self._digests.mkdir(parents=True, exist_ok=True)
        about = order.model_dump(mode="json")
        for source in about["sources"]:
            source["paths"] = [remembered_sha256(Path(path), self._digests) for path in source["paths"]]
        return _hash({"version": VERSION, "order": about})

    def format_of(self, source: str) -> RowFormat | None:
        """The format of these rows, if they have been read before."""
        for about in sorted((self._root / source).glob(f"[!.]*/{ABOUT}")):
            try:
                known: RowFormat = json.loads(about.read_bytes())["format"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # `load` throws it away
            return known
        return None

    def load(self, source: str, fingerprint: str) -> TokenisedRows | None:
        """A complete entry; None when there is none (any more)."""
        folder = self._folder(source, fingerprint)
        if not folder.is_dir():
            return None
        lease: caches.Lease | None = None
        try:
            lease = caches.hold(folder / ABOUT)
            if lease is None:
                raise ValueError("it has no list of its files")
            about = json.loads((folder / ABOUT).read_bytes())
            if about["version"] != VERSION:
                raise ValueError(f"it is of version {about['version']}, this is {VERSION}")
            names = [*ARRAYS, *about["values"], *about["token_values"]]
            self._digests.mkdir(parents=True, exist_ok=True)
            found = {name: remembered_sha256(folder / name, self._digests) for name in names}  # ranks share the files
            bad = [name for name in names if found[name] != about["files"][name]]
            if bad:
                raise ValueError(f"{bad[0]} has another SHA-256")
            mapped: dict[str, Any] = {name: _mapped(folder / name, kind) for name, kind in ARRAYS.items()}
            dataset = TokenDataset(
                **mapped,
                sequences=about["sequences"],
                values={name.removeprefix(VALUES): _mapped(folder / name, np.float32) for name in about["values"]},
                token_values={
                    name.removeprefix(TOKEN_VALUES): _mapped(folder / name, np.float32)
                    for name in about["token_values"]
                },
            )
            dataset.held = lease
            return TokenisedRows(dataset, about["format"], about["cut_prompts"], about["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not folder.is_dir():
                return None  # thrown away by somebody else meanwhile
            self.faults.append(f"cached tokens are made anew ({error})")
            if lease is not None:
                lease.close()
            with suppress(OSError):  # another process was faster
                removal.remove(folder, ".bad-", ignore_errors=True)
            return None

    def keep(self, source: str, fingerprint: str, tokens: TokenisedRows) -> TokenisedRows:
        """The same tokens, on disk now; those in memory where that did not work."""
        folder = self._folder(source, fingerprint)
        aside = folder.with_name(f".new-{folder.name}-{uuid.uuid4().hex}")
        try:
            aside.mkdir(parents=True)
            dataset = tokens.dataset
            values = {VALUES + name: array for name, array in dataset.values.items()}
            token_values = {TOKEN_VALUES + name: array for name, array in dataset.token_values.items()}
            arrays = {name: getattr(dataset, name) for name in ARRAYS} | values | token_values
            for name, array in arrays.items():
                np.ascontiguousarray(array).tofile(aside / name)
            about = {
                "version": VERSION,
                "format": tokens.format,
                "cut_prompts": tokens.cut_prompts,
                "rows": tokens.rows,
                "sequences": dataset.sequences,
                "values": sorted(values),
                "token_values": sorted(token_values),
                "files": {name: sha256(aside / name) for name in arrays},
            }
            write_json(aside / ABOUT, about)
            for path in [*aside.iterdir(), aside]:
                sync(path)
            try:
                aside.rename(folder)
            except OSError:  # the name is taken: another process was faster
                if not folder.is_dir():
                    raise
            else:
                sync(folder.parent)
        except OSError as error:
            self.faults.append(f"the tokens could not be kept ({error}); the next job makes them again")
            return tokens
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return self.load(source, fingerprint) or tokens

    def _folder(self, source: str, fingerprint: str) -> Path:
        return self._root / source / _hash(fingerprint)


def _mapped(path: Path, kind: Any) -> Any:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
