# Written by client/unasync.py from ../aio/models.py: change that one.
"""The model registry: what jobs have made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eft.http import download as parts
from eft.http import paths
from eft.http.responses import Param
from eft.sync import download as downloads
from eft.sync import io
from eft.sync.transport import Transport
from eft.types import FINAL, Artifact

Raw = dict[str, Any]


class Models:
    """`client.models`. Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self, *, name: str | None = None, tag: str | None = None, limit: int = 20) -> list[Raw]:
        """Newest first, at most `limit`; `name`: the versions of one model."""
        found: list[Raw] = []
        after: str | None = None
        while len(found) < limit:
            params: dict[str, Param] = {
                "name": name,
                "tag": tag,
                "limit": min(200, limit - len(found)),
                "after": after,
            }
            page = self._transport.json("GET", "/models", params=params)
            found += page["data"]
            after = page["next"]
            if after is None:
                break
        return found

    def get(self, model_id: str) -> Raw:
        model: Raw = self._transport.json("GET", paths.model(model_id))
        return model

    def tag(self, model_id: str, add: Sequence[str] = (), *, remove: Sequence[str] = ()) -> Raw:
        """The model with tags added and removed."""
        body = {"add": [*add], "remove": [*remove]}
        model: Raw = self._transport.json("POST", f"{paths.model(model_id)}/tags", body=body, idempotent=True)
        return model

    def delete(self, model_id: str) -> Raw:
        """Delete its weights and exports; the job that made it stays."""
        answer: Raw = self._transport.json("DELETE", paths.model(model_id))
        return answer

    def lineage(self, model_id: str) -> list[Raw]:
        """The job that made it, then the jobs before that one, with hashes."""
        data: list[Raw] = (self._transport.json("GET", f"{paths.model(model_id)}/lineage"))["data"]
        return data

    def export(self, model_id: str, formats: Sequence[Raw]) -> Raw:
        """Have formats made of the model, each as in `export` of a job; `export_status` says how far they are."""
        path = f"{paths.model(model_id)}/exports"
        made: Raw = self._transport.json("POST", path, body={"export": [*formats]})
        return made

    def exports(self, model_id: str) -> list[Raw]:
        """All that were asked for after the training, oldest first."""
        data: list[Raw] = (self._transport.json("GET", f"{paths.model(model_id)}/exports"))["data"]
        return data

    def export_status(self, model_id: str, export_id: str) -> Raw:
        found: Raw = self._transport.json("GET", self._export(model_id, export_id))
        return found

    def cancel_export(self, model_id: str, export_id: str) -> Raw:
        path = f"{self._export(model_id, export_id)}/cancel"
        found: Raw = self._transport.json("POST", path, idempotent=True)
        return found

    def wait_for_export(self, model_id: str, export_id: str, *, interval: float = 1.0, patience: float = 300.0) -> Raw:
        """Until the export has ended; returns it. Survives a server that is away for at most `patience` seconds."""
        while True:
            look = partial(self.export_status, model_id, export_id)
            found = self._transport.persist(look, patience, None)
            if found["status"] in FINAL:
                return found
            io.sleep(interval)

    def _export(self, model_id: str, export_id: str) -> str:
        name = paths.identity(export_id, "`eft models export` prints them")
        return f"{paths.model(model_id)}/exports/{name}"

    def files(self, model_id: str) -> list[Artifact]:
        raw = self._transport.json("GET", f"{paths.model(model_id)}/files")
        return [Artifact.parse(item) for item in raw["data"]]

    def download(
        self,
        model_id: str,
        files: Sequence[Artifact] | None = None,
        *,
        into: str | os.PathLike[str],
        patience: float = 60.0,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Path]:
        """Bring files (default: all) below the folder `into`. Each is checked against its SHA-256 and appears whole or
        not at all; a download that broke off is continued. Raises DownloadError for a damaged file."""
        chosen = self.files(model_id) if files is None else files
        targets = [parts.local_path(Path(into), file.path) for file in chosen]  # all, before the first byte
        for file, target in zip(chosen, targets, strict=True):
            downloads.fetch(
                self._transport,
                f"{paths.model(model_id)}/files/{quote(file.path)}",
                target,
                size=file.bytes,
                sha256=file.sha256,
                patience=patience,
                advance=advance,
            )
        return targets
