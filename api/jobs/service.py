"""From a request body to a queued job: parse, look up, resolve, refuse what cannot run, store once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from pydantic_core import to_json
from sqlalchemy.orm import Session

from api.checkpoints import beginning
from api.errors import UnsupportedMediaType, printable
from api.http import idempotency
from api.jobs import advice, after, plan
from api.jobs.schemas import job_view
from api.jobs.sizing import sized
from api.notices import service as webhooks
from core.db.engine import Database
from core.db.tables import File
from core.errors import Fault, NotFound, SpecError
from core.jobs.admission import auto_method, parents
from core.jobs.admission.rollouts import reward_models, trials
from core.jobs.lifecycle.submit import Actor, find, retry, submit
from core.jobs.policies import quotas
from core.jobs.policies.volume import VolumeLimits
from core.jobs.views import handles, queries
from core.plan.compatibility import check
from core.settings import Settings
from core.spec import hints
from core.spec.axes.data import (
    UNSENT,
    FileSource,
    GameRows,
    Generated,
    HubDataset,
    Mixture,
    PathSource,
    Single,
    Source,
    TaskRows,
    singles,
)
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, RegistryModel
from core.spec.axes.rollout.models import model_rewards
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.job import JobSpec
from core.spec.load import load_json, load_yaml, parse_job
from core.spec.resolve import resolve
from core.storage.layout import Layout

JSON_TYPES = ("application/json",)
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
SAME_ROWS = "these are the training rows; held-out rows must be others, or the evaluation says nothing"


@dataclass(frozen=True, slots=True)
class Submission:
    """What came over the wire."""

    body: bytes
    content_type: str
    path: str
    idempotency_key: str | None = None

    def once(self, document: Any) -> OnlyOnce | None:
        """Fingerprints of the document, and of the bytes, by which rows of an earlier version tell requests apart."""
        if self.idempotency_key is None:
            return None
        parts = (self.path.encode(), self.content_type.encode(), self.body)
        whole = hashlib.sha256(b"\0".join(parts)).hexdigest()
        return OnlyOnce(self.idempotency_key, (idempotency.fingerprint(self.path, document), whole))


@dataclass(frozen=True, slots=True)
class OnlyOnce:
    """The idempotency of a request: a second one with the same key and a known fingerprint gets the first answer."""

    key: str
    fingerprints: tuple[str, ...]
    """The first is stored; the others are accepted too."""


@dataclass(frozen=True, slots=True)
class SubmitReply:
    status: int
    body: dict[str, Any]
    replayed: bool = False


class Jobs:
    """Making jobs in one installation."""

    def __init__(self, database: Database, settings: Settings, layout: Layout) -> None:
        self._database = database
        self._settings = settings
        self._layout = layout

    def create(self, actor: Actor, sent: Submission, *, dry_run: bool = False) -> SubmitReply:
        """As `create_from_document`, from the bytes of a request. Raises UnsupportedMediaType too."""
        if sent.idempotency_key is not None:
            idempotency.checked(sent.idempotency_key)
        document = decode(sent.body, sent.content_type)
        return self.create_from_document(actor, document, once=sent.once(document), dry_run=dry_run)

    def create_from_document(
        self, actor: Actor, document: Any, *, once: OnlyOnce | None = None, dry_run: bool = False
    ) -> SubmitReply:
        """Check a job spec and put it in the queue, whatever contract it came by. `once`: what makes a second request
        the same as the first; None: every call makes a job.

        Raises SpecError, NoSpace, BadRequest, IdempotencyKeyReused; nothing is stored then.
        """
        key = None if once is None else idempotency.checked(once.key)
        asked = () if once is None else once.fingerprints
        if dry_run:
            checked = self.resolved(actor, document, unsent=True)
            with self._database.read() as session:
                quotas.check_priority(session, actor.project_id, checked.priority)
                planned, words = plan.view(session, actor.project_id, checked, free=self._free())
                told = advice.notices(session, actor.project_id, checked, planned)
            resolved = checked.model_dump(mode="json")
            body = {"spec": resolved, "dry_run": True, "plan": planned, "plan_reason": words, "notices": told}
            return SubmitReply(200, body)
        # Before anything is checked: the answer to a retry does not change because the disk has filled up since.
        if key is not None:
            with self._database.read() as session:
                known = idempotency.known(session, actor, key, *asked)
            if known is not None:
                return SubmitReply(*known, replayed=True)
        spec = self.resolved(actor, document)
        self.refuse_what_fits_nowhere(actor, spec)
        self._layout.require_space(self._settings.min_free_bytes)
        with self._database.read() as session:
            planned = plan.view(session, actor.project_id, spec, free=None)[0] if spec.method.type == "auto" else None
            told = advice.notices(session, actor.project_id, spec, planned)
        with self._database.write() as session:
            if key is not None and not idempotency.take(session, actor, key, asked[0]):
                known = idempotency.known(session, actor, key, *asked)
                assert known is not None  # the row that kept us from taking the key
                return SubmitReply(*known, replayed=True)
            self.hold_files(session, actor, spec)
            shown = json.loads(to_json(document, inf_nan_mode="strings"))  # YAML knows values that JSON does not
            job = submit(session, actor, spec, submitted=shown, bounds=VolumeLimits.of(self._settings))
            body = job_view(job, training_attempts=0) | {"notices": told}
            if key is not None:
                idempotency.keep(session, actor, key, body)
            return SubmitReply(201, body)

    def hold_files(self, session: Session, actor: Actor, spec: JobSpec) -> None:
        """Look up its files again, and hold them: nobody deletes them before the job is there."""
        for field, source in _sources(spec):
            if isinstance(source, FileSource):
                _file(session, actor, source, field, share=True)

    def to_try(self, actor: Actor, document: Any) -> JobSpec:
        """The spec of a job whose rewards are to be tried. Raises SpecError, NoSpace."""
        spec = self.resolved(actor, document, trial=True)
        if not isinstance(spec.stage, RolloutStage):
            raise SpecError(
                f"`stage: {spec.stage.type}` has no rewards to try; those with `stage.reward` have", field="stage"
            )
        self.refuse_what_fits_nowhere(actor, spec)
        self._layout.require_space(self._settings.min_free_bytes)
        return spec

    def check_retry(self, actor: Actor, job_id: str) -> None:
        """Before the transaction. Raises NotFound, NoSpace; SpecError where it fits nowhere."""
        self._layout.require_space(self._settings.min_free_bytes)
        with self._database.read() as session:
            old = find(session, actor, job_id)
            spec = auto_method.effective(old.spec, old.settled, old.adjusted or {})
        self.refuse_what_fits_nowhere(actor, spec)

    def retry(self, session: Session, actor: Actor, job_id: str, *, max_runtime_seconds: int | None) -> dict[str, Any]:
        """Retry a failed or cancelled job. Raises NotFound, Conflict; SpecError without its files."""
        limits = VolumeLimits.of(self._settings)
        again = retry(session, actor, job_id, limits, max_runtime_seconds=max_runtime_seconds)
        self.hold_files(session, actor, JobSpec.model_validate(again.spec))
        return job_view(again, training_attempts=0)

    def refuse_what_fits_nowhere(self, actor: Actor, spec: JobSpec) -> None:
        """Raises SpecError where it is known that no node can take it, now or later."""
        if not self._settings.memory_check:
            return
        with self._database.read() as session:
            refused = plan.refusal(session, actor.project_id, spec)
        if refused is not None:
            raise refused

    def _free(self) -> int | None:
        """Bytes left on the data root; None: it is an object store."""
        return None if self._settings.is_remote else shutil.disk_usage(self._layout.root).free

    def resolved(
        self,
        actor: Actor,
        document: Any,
        *,
        preview: bool = False,
        unsent: bool = False,
        ahead: Mapping[str, JobSpec] | None = None,
        rowless: bool = False,
        trial: bool = False,
    ) -> JobSpec:
        """The spec as it would run; `preview`: its rows are to be rendered, nothing is to be trained; `unsent`: it may
        name files that are not uploaded yet (core/spec/axes/data.py, UNSENT); `ahead`: resolved specs of jobs that it
        may name and that are not there yet, by the ids that stand for them; `rowless`: it is a session, whose training
        file stands for none; `trial`: its rewards are to be tried.

        Raises SpecError, with a fault for every wrong field, and NotFound where its model is a job or an entry of the
        registry that the project does not have.
        """
        spec = self._with_formats(actor, parse_job(document), unsent=unsent)
        faults = [*self._path_faults(spec, rowless=rowless), *self._notify_faults(actor, spec)]
        with self._database.read() as session:
            spec = handles.named_models(session, actor, spec)
            spec = parents.settle(session, actor.project_id, spec, ahead)
            if not preview:
                reward_models.check(session, actor.project_id, spec, ahead)
            spec = after.settled(session, actor, spec)
            spec = beginning.settled(session, actor, spec, self._settings)
            spec = sized(session, actor.project_id, resolve(spec))
            if not preview:
                beginning.check(session, actor, spec)
            if not (preview or trial) and (fault := trials.refusal(session, actor.project_id, spec)) is not None:
                faults.append(fault)
        faults += check(spec, preview=preview)
        if faults:
            first, more = faults[0], f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise SpecError(
                f"{first.field}: {first.message}{more}", field=first.field, faults=tuple(faults), code=first.code
            )
        return spec

    def _with_formats(self, actor: Actor, spec: JobSpec, *, unsent: bool) -> JobSpec:
        """Uploaded files are looked up, and what their rows are is written into the spec."""
        hashes: dict[str, list[str]] = {"data.train": [], "data.eval": []}
        updates: dict[str, Any] = {}
        with self._database.read() as session:

            def known(source: Single, field: str) -> Single:
                if not isinstance(source, FileSource):
                    return source
                part = hashes["data.eval" if field.startswith("data.eval") else "data.train"]
                if unsent and source.id.startswith(UNSENT):
                    part.append(source.id)
                    return source
                row = _file(session, actor, source, field)
                part.append(row.sha256)
                return _as_uploaded(source, row, field)

            updates["train"] = _each(spec.data.train, "data.train", known)
            if spec.data.eval is not None:
                updates["eval"] = _each(spec.data.eval, "data.eval", known)
        if set(hashes["data.train"]) & set(hashes["data.eval"]):
            raise _refused(Fault("same_rows", SAME_ROWS, "data.eval"))
        return spec.model_copy(update={"data": spec.data.model_copy(update=updates)})

    def _path_faults(self, spec: JobSpec, *, rowless: bool = False) -> list[Fault]:
        """What the job names by path must lie below the roots, symbolic links followed."""
        faults: list[Fault | None] = []
        match spec.model:
            case LocalModel(path=path) | GGUFModel(path=str(path)):
                faults.append(self.path_fault(path, self._settings.model_roots, "model.path", "EFT_MODEL_ROOTS"))
            case GGUFModel() | HubModel() | JobModel() | RegistryModel():
                pass
        for field, _, reward in model_rewards(spec.stage):
            if isinstance(reward.model, LocalModel):
                roots = self._settings.model_roots
                faults.append(self.path_fault(reward.model.path, roots, f"{field}.path", "EFT_MODEL_ROOTS"))
        for field, source in [] if rowless else _sources(spec):
            if isinstance(source, PathSource):
                roots = self._settings.data_roots
                faults.append(self.path_fault(source.path, roots, f"{field}.path", "EFT_DATA_ROOTS"))
        trained = {os.path.realpath(one.path) for _, one in singles(spec.data.train, "") if isinstance(one, PathSource)}
        problems = {one.problems_of() for _, one in singles(spec.data.train, "") if isinstance(one, Generated)}
        for field, source in singles(spec.data.eval, "data.eval") if spec.data.eval is not None else ():
            if isinstance(source, PathSource) and os.path.realpath(source.path) in trained:
                faults.append(Fault("same_rows", SAME_ROWS, f"{field}.path"))
            if isinstance(source, Generated) and source.problems_of() in problems:
                faults.append(Fault("same_rows", f"{SAME_ROWS}: give them another `seed`", f"{field}.seed"))
        return [fault for fault in faults if fault is not None]

    def _notify_faults(self, actor: Actor, spec: JobSpec) -> list[Fault]:
        """Whom it tells must be the project's."""
        if not spec.notify:
            return []
        with self._database.read() as session:
            strange = webhooks.unknown(session, actor, spec.notify)
        return [
            Fault("webhook_not_found", f"there is no webhook `{webhook_id}` in this project", "notify")
            for webhook_id in strange
        ]

    def path_fault(self, path: str, roots: Sequence[Path], field: str, setting: str) -> Fault | None:
        """What is wrong with a path that must lie below these roots, symbolic links followed."""
        if not path.startswith("/"):
            full = f"give the full path, from `/` on, below one of the folders in {setting}"
            words = hints.of_source(path) if field.startswith("data.") else full
            return Fault("path_not_allowed", words, field)
        upload = ""
        if field.startswith("data."):
            upload = "; a path without `/` in front is a file beside the job file, which `eft submit` uploads"
        if not roots:
            words = f"paths are not allowed here; the administrator can allow folders with {setting}{upload}"
            return Fault("path_not_allowed", words, field)
        try:
            real = Path(os.path.realpath(path))
            for root in roots:
                real_root = Path(os.path.realpath(root))
                if real.is_relative_to(real_root) and not self._is_somebodys(real, real_root):
                    # A root that only the workers have cannot be looked into from here.
                    if real_root.is_dir() and not real.exists():
                        return Fault("path_not_found", f"there is nothing at `{printable(path)}`", field)
                    return None
        except (OSError, ValueError):  # a link on the way that may not be read, a name that no file system has
            pass
        words = f"`{printable(path)}` is below none of the folders in {setting}{upload}"
        return Fault("path_not_allowed", words, field)

    def _is_somebodys(self, real: Path, root: Path) -> bool:
        """Every project's files and artifacts lie on the data root: one drawn around it opens none of them."""
        layout = self._layout
        ours = Path(os.path.realpath(layout.root))
        inside = (layout.files, layout.uploads, layout.models, layout.cache, layout.runs)
        return real.is_relative_to(ours) and (
            ours.is_relative_to(root) or any(real.is_relative_to(os.path.realpath(folder)) for folder in inside)
        )


def decode(body: bytes, content_type: str) -> Any:
    """The document that a body of this media type holds."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in JSON_TYPES:
        return load_json(body)
    if media_type in YAML_TYPES:
        return load_yaml(body)
    named = f"not `{printable(media_type)}`" if media_type else "and the request has none"
    raise UnsupportedMediaType(
        f"a job is sent as `Content-Type: application/json` or `application/yaml`, {named}", field="content-type"
    )


def _sources(spec: JobSpec) -> list[tuple[str, Single]]:
    found = singles(spec.data.train, "data.train")
    return [*found, *singles(spec.data.eval, "data.eval")] if spec.data.eval is not None else found


def _each(source: Source, field: str, change: Callable[[Single, str], Single]) -> Source:
    """The source with every single one in it changed."""
    match source:
        case Mixture():
            changed = [
                weighted.model_copy(update={"source": change(one, place)})
                for weighted, (place, one) in zip(source.sources, singles(source, field), strict=True)
            ]
            return source.model_copy(update={"sources": changed})
        case FileSource() | PathSource() | HubDataset() | TaskRows() | GameRows():
            return change(source, field)
        case _ as never:
            assert_never(never)


def _as_uploaded(source: FileSource, row: File, field: str) -> FileSource:
    """The source with what the upload has found out. Another mapping than the upload's makes other rows of it."""
    columns = (row.report or {}).get("columns", {})
    if source.columns and source.columns != columns:
        return source
    if source.format not in ("auto", row.format):
        words = f"the rows of this file are `{row.format}`, not `{source.format}`; leave `format` out"
        raise _refused(Fault("format_mismatch", words, f"{field}.format"))
    return source.model_copy(update={"format": row.format, "columns": columns})


def _file(session: Session, actor: Actor, source: FileSource, field: str, *, share: bool = False) -> File:
    lock: Literal["share"] | None = "share" if share else None
    try:
        return queries.find_file(session, actor.project_id, source.id, field=field, lock=lock)
    except NotFound as error:
        raise _refused(Fault("file_not_found", error.message, field)) from error


def _refused(fault: Fault) -> SpecError:
    return SpecError(f"{fault.field}: {fault.message}", field=fault.field, faults=(fault,), code=fault.code)
