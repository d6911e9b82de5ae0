"""A job whose model is another job: what it takes over from it, and what it is pinned to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from core.db.tables import Artifact, Job
from core.errors import Fault, NotFound, SpecError
from core.jobs.admission import lineage
from core.jobs.admission.auto_method import effective
from core.jobs.base.states import FINAL, Status
from core.spec.axes.method import OFT, Adapter, Auto
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, RegistryModel, SourceModel
from core.spec.axes.quantization import packing_of
from core.spec.job import JobSpec
from core.spec.run.chain import HandedBack, ModelChain, WeightFile
from core.spec.run.folder import RUN_RECORD_FILE

MADE_BY = ("train", "upload")
"""Kinds of rows that stand for a model."""
INHERITED = (
    *("r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "modules_to_save"),
    "new_tokens",
)
INHERITED_OFT = ("r", "oft_block_size", "target_modules", "use_cayley_neumann", "modules_to_save")
"""Fields of a method that an adapter has from its making on."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Columns of a job whose model is another job."""

    chain: dict[str, Any]
    lineage: list[dict[str, Any]]


def settle(session: Session, project_id: str, spec: JobSpec, ahead: Mapping[str, JobSpec] | None = None) -> JobSpec:
    """The job with `model.adapter` and what a continued adapter has already, before its other defaults are written out.
    Any other job stays as it is.

    `ahead`: resolved specs of jobs that are not there yet, by the ids that stand for them. Raises NotFound for a job
    that the project does not have, and SpecError if the job cannot continue from it in this way.
    """
    model = spec.model
    if not isinstance(model, JobModel):
        return spec
    if ahead is not None and model.id in ahead:
        parent = ahead[model.id]
    else:
        row = find(session, project_id, model.id)
        require_succeeded(row)
        parent = effective(row.spec, row.settled, row.adjusted or {})
    return _taken_over(spec, model, parent)


def pin(session: Session, project_id: str, spec: JobSpec) -> Pinned | None:
    """Hashes of all that the job starts from; None where its model is no job. Its parent cannot be deleted before the
    caller's transaction has ended. Raises as `settle`."""
    if not isinstance(spec.model, JobModel):
        return None
    parent = find(session, project_id, spec.model.id, lock=True)
    require_succeeded(parent)
    made_of = chain(session, parent, spec.model.adapter)
    return Pinned(made_of.model_dump(mode="json"), lineage.of_job(session, parent))


def pin_export(session: Session, job: Job) -> ModelChain:
    """What an export of a job's model starts from: the base model, and what the job has trained over it, in the place
    of an adapter. The card of the formats takes its figures from the run record. SpecError where the weights are
    gone."""
    trained = effective(job.spec, job.settled, job.adjusted or {})
    handed = handed_back(session, job, "adapter" if _trains_adapter(trained) else "model", trained)
    query = select(Artifact).where(Artifact.job_id == job.id, Artifact.path == RUN_RECORD_FILE)
    record = session.execute(query).scalar_one_or_none()
    if record is None:
        words = f"`{job.id}` has no {RUN_RECORD_FILE} to write a model card from: train it again"
        raise refused(Fault("model_job_gone", words, "model.id"))
    files = [*handed.files, WeightFile(path=record.path, bytes=record.bytes, sha256=record.sha256)]
    before = ModelChain.model_validate(job.chain) if job.chain is not None else base_of(job)
    return before.model_copy(update={"adapter": handed.model_copy(update={"files": files})})


def require(session: Session, project_id: str, chain: Mapping[str, Any], *, field: str = "model.id") -> None:
    """Raises SpecError where a job whose weights a chain names was deleted; else none of them can be, before the
    caller's transaction has ended."""
    needed = ModelChain.model_validate(chain).jobs
    query = select(Job.id).where(Job.id.in_(needed), Job.project_id == project_id).with_for_update(read=True)
    if lost := sorted(set(needed) - set(session.execute(query).scalars())):
        words = f"this job starts from the weights of `{lost[0]}`, which was deleted: train that job again"
        raise refused(Fault("model_job_gone", words, field))


def built_on(session: Session, job: Job) -> Iterator[str]:
    """Jobs that need what this one has handed back, newest first: one has not ended, or its adapter stands on a model
    into which this one's was merged, or on these weights."""
    query = select(Job.id, Job.kind, Job.status, Job.chain, Job.spec, Job.settled).where(
        Job.project_id == job.project_id,
        Job.kind != "serving",
        Job.chain.is_not(None),
        cast(Job.chain, Text).contains(job.id),
    )
    for child in session.execute(query.order_by(Job.id.desc())):
        if Status(child.status) not in FINAL:
            yield str(child.id)
            continue
        if Status(child.status) is not Status.SUCCEEDED or child.kind not in MADE_BY:
            continue
        chain = ModelChain.model_validate(child.chain)
        beneath = [*chain.merges, *([] if chain.weights is None else [chain.weights])]
        if _trains_adapter(effective(child.spec, child.settled, {})) and any(one.job == job.id for one in beneath):
            yield str(child.id)


def words_of_use(child: str, what: str) -> str:
    """Why `what` cannot be deleted, which the job or export `child` needs, and the way out."""
    if child.startswith("export-"):
        return f"`{child}` is making formats of {what}: cancel it, or wait for its end"
    if child.startswith("upload-"):
        child = f"model-{child.removeprefix('upload-')}"
    return f"`{child}` was made from {what} and needs it: delete `{child}` first"


def find(session: Session, project_id: str, job_id: str, *, lock: bool = False, field: str = "model.id") -> Job:
    """The job or upload that has made a model. Raises NotFound."""
    query = select(Job).where(Job.id == job_id, Job.project_id == project_id, Job.kind.in_(MADE_BY))
    # Shared: any number of jobs may be submitted over it at once, and it cannot be deleted meanwhile.
    row = session.execute(query.with_for_update(read=True) if lock else query).scalar_one_or_none()
    if row is None:
        raise NotFound(f"there is no job `{job_id}` in this project", field=field)
    return row


def require_succeeded(job: Job, *, field: str = "model.id") -> None:
    """Raises SpecError for a job that has not succeeded."""
    status = Status(job.status)
    if status is Status.SUCCEEDED:
        return
    if status in FINAL:
        words = f"`{job.id}` has {status.value}, so it has no model to continue from: retry it first"
    else:
        words = (
            f"`{job.id}` is {status.value}, and has no model before it succeeds: submit both as a pipeline, "
            "or wait for its end"
        )
    raise refused(Fault("model_job_not_succeeded", words, field))


def _trains_adapter(spec: JobSpec) -> bool:
    return isinstance(spec.method, Adapter)


def _taken_over(spec: JobSpec, model: JobModel, parent: JobSpec) -> JobSpec:
    method, adapter = spec.method, model.adapter
    _require_head(spec, parent)
    if isinstance(parent.method, Auto):
        return spec  # settled when the job before has started; this one is looked at again once that has succeeded
    if not isinstance(parent.method, Adapter):
        if adapter is not None:
            words = "that job trained all parameters, so it has no adapter to continue or merge: remove the field"
            raise refused(Fault("model_without_adapter", words, "model.adapter"))
        return spec
    named = "method" in spec.model_fields_set
    if adapter is None:
        adapter = "merge" if named and not isinstance(method, Adapter) else "continue"
        if adapter == "merge":
            _require_head(spec.model_copy(update={"model": model.model_copy(update={"adapter": adapter})}), parent)
    updates: dict[str, Any] = {"model": model.model_copy(update={"adapter": adapter})}
    if adapter == "continue":
        has = parent.method.handed_back()
        if isinstance(method, Adapter):  # of others the table of compatibility says why not
            updates["method"] = _continued(method, has) if named else has
        if not named and spec.quantization is None:
            updates["quantization"] = parent.quantization
    return spec.model_copy(update=updates)


def _require_head(spec: JobSpec, parent: JobSpec) -> None:
    """SpecError where the job before handed back a head that this stage cannot train further. A language model
    can be given any head."""
    has, wanted = parent.stage.head, spec.stage.head
    if has == "tokens":
        return
    if has != wanted:
        words = (
            f"that job is of `stage: {parent.stage.type}`; its model judges text, and `stage: {spec.stage.type}` "
            "cannot start from it; name the job before it"
        )
        raise refused(Fault("model_of_another_head", words, "model.id"))
    model = spec.model
    if isinstance(model, JobModel) and model.adapter == "merge":
        words = (
            f"the adapter of `stage: {parent.stage.type}` has a head of its own, which a merge would lose; "
            "continue the adapter (leave `model.adapter` out), or name the job before it"
        )
        raise refused(Fault("model_of_another_head", words, "model.adapter"))


def _continued(method: Adapter, parent: Adapter) -> Adapter:
    """The method with the fields that the adapter has. SpecError, with a fault for each that says otherwise."""
    inherited = INHERITED_OFT if isinstance(parent, OFT) else INHERITED
    if isinstance(method, OFT) is not isinstance(parent, OFT):
        words = f"the adapter to continue is one of `{parent.type}`: remove `method`, or set `model.adapter: merge`"
        raise refused(Fault("adapter_differs", words, "method"))
    faults = []
    for name in inherited:
        has, asked = getattr(parent, name), getattr(method, name)
        if name in method.model_fields_set and asked is not None and asked != has:
            words = f"the adapter to continue has `{has}`: remove it, or set `model.adapter: merge` for a new adapter"
            faults.append(Fault("adapter_differs", words, f"method.{name}"))
    if faults:
        first = faults[0]
        raise SpecError(f"{first.field}: {first.message}", field=first.field, faults=tuple(faults), code=first.code)
    return method.model_copy(update={name: getattr(parent, name) for name in inherited})


def chain(session: Session, parent: Job, adapter: str | None) -> ModelChain:
    """What a job starts from whose model is that of `parent`. SpecError where its weights are not listed."""
    trained = effective(parent.spec, parent.settled, parent.adjusted or {})
    if not _trains_adapter(trained):
        return ModelChain(weights=handed_back(session, parent, "model"))
    handed = handed_back(session, parent, "adapter", trained)
    before = ModelChain.model_validate(parent.chain) if parent.chain is not None else base_of(parent)
    if adapter == "continue":
        return before.model_copy(update={"adapter": handed})
    return before.model_copy(update={"merges": [*before.merges, handed], "adapter": None})


def base_of(parent: Job) -> ModelChain:
    """The model over which a job was trained that is no job's, at the commit that it had then."""
    model = JobSpec.model_validate(parent.spec).model
    source: dict[str, Any] = (parent.prepared or {}).get("source", {})
    root: SourceModel
    match model:
        case HubModel() | GGUFModel(id=str()) if "commit" in source:
            root = model.model_copy(update={"revision": source["commit"]})
        case HubModel() | LocalModel() | GGUFModel():
            root = model
        case JobModel() | RegistryModel():
            raise ValueError(f"{parent.id} has no chain")
    pinned: dict[str, Any] = {name: source[name] for name in ("type", "id", "commit", "sha256") if name in source}
    return ModelChain(root=root, root_source=pinned)


def handed_back(session: Session, job: Job, folder: Any, trained: JobSpec | None = None) -> HandedBack:
    """SpecError where the job's weights are not listed."""
    rows = session.execute(
        select(Artifact)
        .where(Artifact.job_id == job.id)
        .order_by(Artifact.path)
        .execution_options(populate_existing=True)
    ).scalars()
    found = [row for row in rows if row.path.startswith(f"{folder}/")]
    if not any(row.path.endswith(".safetensors") for row in found):
        words = f"`{job.id}` has no {folder} to continue from: train it again"
        raise refused(Fault("model_job_gone", words, "model.id"))
    files = [WeightFile(path=row.path, bytes=row.bytes, sha256=row.sha256) for row in found]
    packing = None if trained is None else packing_of(trained.quantization)
    return HandedBack(job=job.id, attempt=found[0].attempt, folder=folder, files=files, quantization=packing)


def refused(fault: Fault) -> SpecError:
    """The error of one fault."""
    return SpecError(f"{fault.field}: {fault.message}", field=fault.field, faults=(fault,), code=fault.code)
