"""From requests to rows of sessions and their log."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from api.jobs.service import Jobs
from api.sessions import schemas
from core.base import bells
from core.db.engine import Database
from core.db.tables import SessionOperation
from core.errors import Fault, NotFound, SpecError, plainly
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sessions import limits, log, ranks, records, saves
from core.jobs.policies import quotas
from core.jobs.policies.volume import VolumeLimits
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.load import storable
from core.spec.run.folder import SAVED
from core.spec.session import tensors
from core.spec.session.job import SessionSpec
from core.spec.session.verbs import OPERATION
from core.storage.layout import Layout

MOST_SEQ = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sent:
    """An operation as it came."""

    seq: int
    operation: dict[str, Any]
    tensors: bytes
    lane: str | None = None
    """Numbers of its own, in the place of the model's."""


class Sessions:
    """Sessions of one installation."""

    def __init__(self, database: Database, settings: Settings, layout: Layout) -> None:
        self._database, self._settings, self._layout = database, settings, layout
        self._jobs = Jobs(database, settings, layout)

    def checked(self, actor: Actor, document: Any) -> tuple[SessionSpec, JobSpec]:
        """The session, and its job as it would run. Raises SpecError, NoSpace."""
        if self._settings.is_remote:
            words = "sessions need a data root that is a folder; this one is an object store (EFT_DATA_ROOT)"
            raise SpecError(words, code="session_needs_folder")
        try:
            spec = SessionSpec.model_validate_json(json.dumps(storable(document)))
        except ValidationError as error:
            raise _refused(error) from error
        job = self._jobs.resolved(actor, _without_rows(spec), rowless=True)
        self._jobs.refuse_what_fits_nowhere(actor, job)
        with self._database.read() as session:
            quotas.check_priority(session, actor.project_id, job.priority)
            ranks.check_slots(session, job)
        self._layout.require_space(self._settings.min_free_bytes)
        return spec, job

    def create(self, session: Session, actor: Actor, spec: SessionSpec, job: JobSpec) -> dict[str, Any]:
        bounds = VolumeLimits.of(self._settings)
        found = records.create(session, actor, spec, job, bounds=bounds)
        limits.check_sessions(session, actor, self._settings.max_sessions)
        return schemas.session_view(found)

    def accept(self, actor: Actor, session_id: str, sent: Sent) -> tuple[records.FoundSession, SessionOperation]:
        """Write an operation into the log, or find it there. Raises NotFound, Conflict, SpecError, QueueFull,
        SessionQuota, NoSpace."""
        tensors.check_examples(tensors.count(sent.tensors), "arrays.lengths")
        with self._database.read() as session:
            records.find(session, actor, session_id)  # before anything is written
            self._check_folder(session, actor, sent.operation.get("folder"))
        self._layout.require_space(self._settings.min_free_bytes, len(sent.tensors))
        folder = self._layout.session(session_id)
        sha256, aside = log.digest(sent.operation, sent.tensors), log.put_aside(folder, sent.tensors)
        try:
            with self._database.write() as session:
                found, row = log.accept(
                    session,
                    actor,
                    folder,
                    session_id,
                    sent.seq,
                    sent.operation,
                    sha256,
                    sent.tensors,
                    aside,
                    sent.lane,
                )
            bells.ring(self._layout.bells, f"{session_id}-*", session_id)
            return found, row
        finally:
            if aside is not None:
                aside.unlink(missing_ok=True)  # of an operation that was known, or refused

    def look(
        self, actor: Actor, session_id: str, position: int
    ) -> tuple[records.FoundSession, SessionOperation, bytes]:
        """An operation as it is now, with the tensors of its result. Raises NotFound, also where these have gone after
        EFT_SESSION_RESULT_HOURS. Brings a session back that was being parked when the operation came."""
        with self._database.read() as session:
            found, row = log.get(session, actor, session_id, position)
        if row.done_at is None and found.status == "parked":
            with self._database.write() as session:
                log.bring_back(session, records.find(session, actor, session_id, lock=True), actor)
        if row.result_sha256 is None:
            return found, row, b""
        try:
            return found, row, log.result_path(self._folder(session_id), position).read_bytes()
        except FileNotFoundError as error:
            words = f"the result of operation {position} was removed, as all are after some time; it was computed"
            raise NotFound(words, field="position", code="session_result_expired") from error

    def _check_folder(self, session: Session, actor: Actor, folder: str | None) -> None:
        """An operation reads what a session of the project has saved, or what lies below EFT_MODEL_ROOTS. Raises
        NotFound, SpecError."""
        if folder is None:
            return
        field = "operation.folder"
        if (saver := self._saver(folder)) is not None:
            try:
                saves.readable(session, actor, *saver)
            except NotFound as error:
                words = "no session of this project has saved this adapter, and no other has published it"
                raise NotFound(words, field=field) from error
        elif fault := self._jobs.path_fault(folder, self._settings.model_roots, field, "EFT_MODEL_ROOTS"):
            raise SpecError(fault.message, field=field, code=fault.code)

    def _saver(self, folder: str) -> tuple[str, str] | None:
        """The session that has saved a folder, and the folder's name; symbolic links followed."""
        try:
            real = Path(os.path.realpath(folder))
        except (OSError, ValueError):
            return None
        runs = Path(os.path.realpath(self._layout.runs))
        match real.relative_to(runs).parts if folder.startswith("/") and real.is_relative_to(runs) else ():
            case (saver, "session", folders, name) if folders == SAVED:
                return saver, name
        return None

    def _folder(self, session_id: str) -> Path:
        return self._layout.session(session_id)


def read_operation(document: Any) -> Sent:
    """An operation in JSON. Raises SpecError."""
    if not isinstance(document, dict) or set(document) - {"seq", "operation", "arrays"}:
        raise SpecError("an operation is an object with `seq`, `operation` and `arrays`", code="invalid_value")
    arrays = document.get("arrays") or {}
    if not isinstance(arrays, dict) or not all(isinstance(values, list) for values in arrays.values()):
        raise SpecError("`arrays` is an object of lists of numbers", field="arrays", code="invalid_value")
    body = tensors.pack(arrays) if arrays else b""
    return Sent(_seq(document.get("seq")), checked_operation(document.get("operation")), body)


def read_tensors(body: bytes) -> Sent:
    """An operation in safetensors' form: `seq` and `operation` (JSON) are in its metadata. Raises SpecError."""
    header, data = tensors.split(body)
    about = header.pop("__metadata__", None)
    if not isinstance(about, dict) or not {"seq", "operation"} <= about.keys():
        words = "the metadata of the tensors has `seq`, and the operation as JSON in `operation`"
        raise SpecError(words, field="body", code="invalid_tensors")
    try:
        seq, operation = int(str(about["seq"])), json.loads(str(about["operation"]))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the metadata of the tensors: {error}", field="body", code="invalid_tensors") from error
    return Sent(_seq(seq), checked_operation(operation), tensors.join(header, data) if header else b"")


def checked_operation(document: Any) -> dict[str, Any]:
    """The operation with its defaults written out. Raises SpecError."""
    try:
        return OPERATION.validate_json(json.dumps(document)).model_dump(mode="json")
    except ValidationError as error:
        raise _refused(error, within="operation", skip=1) from error


def _seq(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_SEQ:
        raise SpecError(f"`seq` is a whole number from 0 to {MOST_SEQ}", field="seq", code="invalid_value")
    return value


def _without_rows(spec: SessionSpec) -> dict[str, Any]:
    return spec.as_job().model_dump(mode="json")


def _refused(error: ValidationError, within: str = "", skip: int = 0) -> SpecError:
    """A SpecError with a fault for each wrong field. `skip`: parts of places that name an arm."""
    faults = []
    for item in error.errors(include_url=False, include_input=False)[:50]:
        parts = [within, *map(str, item["loc"][skip:])] if within else [*map(str, item["loc"])]
        faults.append(Fault("invalid_value", plainly(item["msg"]), ".".join(parts) or None))
    first = faults[0]
    where = f"{first.field}: " if first.field else ""
    return SpecError(f"{where}{first.message}", field=first.field, faults=tuple(faults), code="invalid_value")
