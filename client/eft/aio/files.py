"""Files on the server, what training would make of them, and what jobs hand back."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eft.aio import download as downloads
from eft.aio import io
from eft.aio.transport import AsyncTransport
from eft.errors import LocalError, Unreachable
from eft.http import download as parts
from eft.http import paths
from eft.http.responses import Param, document_of
from eft.http.upload import Counted
from eft.types import FINAL, Artifact, File

SENDS = 3
"""Times that a file is sent before an upload is given up; before each further one the server is asked for it."""


class AsyncFiles:
    _transport: AsyncTransport

    async def upload(
        self,
        path: str | os.PathLike[str],
        *,
        filename: str | None = None,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        patience: float = 60.0,
        advance: Callable[[int], None] | None = None,
    ) -> File:
        """Send a training file (JSON Lines, JSON, CSV or Parquet) from disk, never all of it in memory. The server
        checks every row. `format`: needed only where rows fit two; `columns`: from its names to the file's.

        When the line breaks, it waits for the server (`patience` seconds), asks by checksum whether the file has
        arrived after all, and only if not sends it again. `advance` is told bytes; what is sent again counts back.
        """
        source = Path(path)
        name = filename or source.name
        fields = [  # what says how to read the rows comes before them
            *([("format", (None, format))] if format is not None else []),
            *([("columns", (None, json.dumps(dict(columns))))] if columns else []),
        ]
        sent = 0

        def count(number: int) -> None:
            nonlocal sent
            sent += number
            if advance is not None:
                advance(number)

        sha256 = ""
        for left in reversed(range(SENDS)):
            try:
                stream = source.open("rb")
            except OSError as error:
                raise LocalError(f"{source}: {error.strerror or error}") from error
            with stream:
                try:
                    answer = await self._transport.request(
                        "POST",
                        "/files",
                        files=[*fields, ("file", (name, Counted(stream, count), "application/octet-stream"))],
                        idempotent=False,  # again below, once it is known whether it has arrived
                        timeout=600.0,  # the server answers when all lines are checked
                    )
                    return File.parse(document_of(answer))
                except Unreachable:
                    if left == 0 or patience <= 0:
                        raise
            sha256 = sha256 or await io.run(partial(parts.digest, source))
            known = await self._transport.persist(partial(self.find_file, sha256, name=name, columns=columns), patience)
            if known is not None:
                return known
            count(-sent)
        raise AssertionError("unreachable: the last try returns or raises")

    async def find_file(
        self, sha256: str, *, name: str | None = None, columns: Mapping[str, str] | None = None
    ) -> File | None:
        """The project's file of these very bytes (and name), read by the same columns; None: it has none."""
        async for file in self.files(sha256=sha256):
            read_by = (file.raw.get("report") or {}).get("columns") or None
            if (name is None or file.filename == name) and read_by == (dict(columns) if columns else None):
                return file
        return None

    async def files(self, *, sha256: str | None = None) -> AsyncIterator[File]:
        """All files of the project, or those with these very bytes, newest first."""
        after: str | None = None
        while True:
            params: dict[str, Param] = {"sha256": sha256, "after": after, "limit": 100}
            raw = await self._transport.json("GET", "/files", params=params)
            for item in raw["data"]:
                yield File.parse(item)
            after = raw.get("next")
            if not raw.get("has_more") or after is None:
                return

    async def file(self, file_id: str) -> File:
        return File.parse(await self._transport.json("GET", paths.file(file_id)))

    async def delete_file(self, file_id: str) -> None:
        await self._transport.request("DELETE", paths.file(file_id))

    @asynccontextmanager
    async def file_content(self, file_id: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._transport.stream("GET", f"{paths.file(file_id)}/content") as response:
            yield response.aiter_bytes(1 << 20)

    async def preview(self, file_id: str, job: dict[str, Any], *, patience: float = 300.0) -> dict[str, Any]:
        """What training with the options of `job` (a job without `data.train`) would make of a file: waits for a worker
        to find it out, and answers the preview, whether it has succeeded or failed."""
        first = await self._transport.json("POST", f"{paths.file(file_id)}/preview", body=job, idempotent=True)
        answer: dict[str, Any] = first
        path = f"{paths.file(file_id)}/previews/{quote(answer['id'], safe='')}"
        params: dict[str, Param] = {"wait": 20}
        while answer["status"] not in FINAL:
            look = partial(self._transport.json, "GET", path, params=params)
            answer = await self._transport.persist(look, patience)
        return answer

    # --- artifacts

    async def artifacts(self, job_id: str) -> list[Artifact]:
        raw = await self._transport.json("GET", f"{paths.job(job_id)}/artifacts")
        return [Artifact.parse(item) for item in raw["data"]]

    async def download(
        self,
        job_id: str,
        artifacts: Sequence[Artifact] | None = None,
        *,
        into: str | os.PathLike[str],
        patience: float = 60.0,
        on_start: Callable[[Artifact], None] = lambda artifact: None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Path]:
        """Bring artifacts (default: all) below the folder `into`, under the paths they have in the job.

        Each is checked against its SHA-256 and appears whole or not at all; a download that broke off is gone on with.
        Raises DownloadError for a damaged file or a path that leads out of `into`.
        """
        folder = Path(into)
        chosen = await self.artifacts(job_id) if artifacts is None else artifacts
        targets = [parts.local_path(folder, artifact.path) for artifact in chosen]  # all, before the first byte
        for artifact, target in zip(chosen, targets, strict=True):
            on_start(artifact)
            await downloads.fetch(
                self._transport,
                f"{paths.job(job_id)}/artifacts/{quote(artifact.path)}",
                target,
                size=artifact.bytes,
                sha256=artifact.sha256,
                patience=patience,
                advance=advance,
            )
        return targets
