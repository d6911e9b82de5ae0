# Written by client/unasync.py from ../aio/models.py: change that one.
"""The model registry: what jobs have made."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eft.http import download as parts
from eft.http import folders, paths
from eft.http.responses import Param, document_of
from eft.http.upload import Counted
from eft.sync import download as downloads
from eft.sync import io
from eft.sync.transport import Transport
from eft.types import FINAL, Artifact

Raw = dict[str, Any]
OCTETS = "application/octet-stream"


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

    def upload(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        base: str | Raw | None = None,
        patience: float = 60.0,
        advance: Callable[[int], None] | None = None,
    ) -> Raw:
        """Enter a model or a LoRA adapter that was made elsewhere, from its folder on disk; weights are safetensors.

        `base`: for an adapter, the model that it was trained over, as `model` of a job; default: the hub repository
        that its configuration names. When the line breaks, all files are sent again (under the same Idempotency-Key,
        so that the model is entered once) for as long as the server comes back within `patience` seconds.
        """
        paths_of_files = folders.files_of(Path(folder))
        said = {"name": name, "base": base if base is None or isinstance(base, str) else json.dumps(base)}
        fields = [(field, (None, value)) for field, value in said.items() if value is not None]
        key, sent = uuid.uuid4().hex, 0

        def count(number: int) -> None:
            nonlocal sent
            sent += number
            if advance is not None:
                advance(number)

        def send() -> Raw:
            count(-sent)
            with ExitStack() as stack:
                parts = [
                    ("file", (path.name, Counted(stack.enter_context(path.open("rb")), count), OCTETS))
                    for path in paths_of_files
                ]
                answer = self._transport.request(
                    "POST",
                    "/models",
                    files=[*fields, *parts],
                    headers={"Idempotency-Key": key},
                    idempotent=False,
                    timeout=600.0,  # the server answers when every tensor is checked
                )
                made: Raw = document_of(answer)
                return made

        return self._transport.persist(send, patience)

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

    def export(self, model_id: str, formats: Sequence[Raw], *, max_runtime_seconds: int | None = None) -> Raw:
        """Have formats made of the model, each as in `export` of a job; `export_status` says how far they are. It fails
        if it is not over within `max_runtime_seconds` after a worker has begun."""
        path = f"{paths.model(model_id)}/exports"
        body = {"export": [*formats], "max_runtime_seconds": max_runtime_seconds}
        made: Raw = self._transport.json("POST", path, body=body)
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
