"""Jobs, the files they train on, their attempts, and the events and results of these."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from core.db.engine import db_now
from core.db.tables.base import Base, Id, Owned

QUEUED = "status = 'queued'"

_ON_TRAINING_SLOTS = "kind IN ('train', 'session', 'serving', 'trial')"
WAITS_FOR = {
    "prepare": f"{QUEUED} AND unmet = 0 AND {_ON_TRAINING_SLOTS} AND prepared IS NULL",
    "train": f"{QUEUED} AND unmet = 0 AND {_ON_TRAINING_SLOTS} AND prepared IS NOT NULL",
    "preview": f"{QUEUED} AND kind = 'preview'",
    "export": f"{QUEUED} AND kind = 'export'",
}
"""What a waiting job waits for a slot to do. Written out, not bound: SQLite takes a partial index for a query only when
it can see in the query's words that the index has all of its rows."""

BOUNDED = f"{WAITS_FOR['train']} AND bound_seconds IS NOT NULL"
"""Those that may go ahead of a job for which slots are kept (core/jobs/scheduling/gang_scheduling.py)."""

AFTER_OTHERS = "unmet > 0 AND status IN ('queued', 'paused')"
"""Jobs that wait for the end of others (core/jobs/admission/dependencies.py)."""

PREVIEWS = "kind = 'preview'"
EXPORTS = "kind = 'export'"
TRIALS = "kind = 'trial'"
UNTRACED = "finished_at IS NOT NULL AND traced_at IS NULL"


def _queue_key(context: Any) -> str:
    """Key of a plain job of priority 0, for rows that core.jobs.lifecycle.submit has not made."""
    given = context.get_current_parameters()
    return f"{given['accelerator']}|{given['project_id']}|{given['owner_id']}|100"


class File(Owned, Base):
    __tablename__ = "files"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    filename: Mapped[str] = mapped_column(String(255))
    """As the user named it; never part of a path."""
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    rows: Mapped[int] = mapped_column(Integer)
    format: Mapped[str] = mapped_column(String(32))
    report: Mapped[dict[str, Any] | None]
    """What the check of the upload found (core/data/check.py)."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    __table_args__ = (Index(None, "project_id", "id"), Index(None, "project_id", "sha256"))


class Job(Owned, Base):
    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), insert_default="train")
    """train, or preview: rendering a file as that training would, on a slot without a GPU
    (core/jobs/lifecycle/previews.py); or export: formats of a model (core/jobs/lifecycle/registry/exports.py);
    or upload: a model that was made elsewhere (core/jobs/lifecycle/registry/uploads.py), which never waits."""
    name: Mapped[str | None] = mapped_column(String(100))
    tags: Mapped[list[Any]] = mapped_column(insert_default=list)
    """Words to find it by; those of the spec until people change them (core/jobs/lifecycle/changes.py)."""
    note: Mapped[str | None] = mapped_column(Text)
    archived_at: Mapped[float | None] = mapped_column(Float)
    """Since when lists leave it out; null: they show it."""
    spec: Mapped[dict[str, Any]]
    """Resolved: what will run, with every default written out."""
    submitted: Mapped[dict[str, Any] | None]
    """As it was sent, before any default; null for steps of pipelines, runs of sweeps and jobs that eft makes."""
    accelerator: Mapped[str] = mapped_column(String(8))
    """Kind of slot it asks for: any, gpu, cpu."""
    priority: Mapped[int] = mapped_column(Integer, insert_default=0)
    queue_key: Mapped[str] = mapped_column(String(1024), insert_default=_queue_key)
    """Key of the line in which the job waits: needs, project, owner and priority (core/jobs/scheduling/queue_order.py).
    Within a line, the oldest goes first."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    retry_of: Mapped[str | None] = mapped_column(Id, ForeignKey("jobs.id"), index=True)
    resume_from: Mapped[list[Any]]
    """Earlier jobs whose checkpoints it may go on from, oldest first: [{"job", "attempts"}]."""

    chain: Mapped[dict[str, Any] | None]
    """What a model of `type: job` is made of, with the hashes of the weights (core/spec/run/chain.py)."""
    lineage: Mapped[list[Any] | None]
    """The jobs behind the model as they were when this one was submitted, nearest first
    (core/jobs/admission/lineage.py)."""
    reward_models: Mapped[list[Any] | None]
    """What the reward models that jobs have trained are made of, with the hashes of the weights
    (core/spec/run/chain.py, RewardModelPin)."""
    pipeline_id: Mapped[str | None] = mapped_column(Id, index=True)
    """The pipeline that it is a step of."""

    sweep_id: Mapped[str | None] = mapped_column(Id, index=True)
    """The sweep that it is a run of."""
    sweep_point: Mapped[dict[str, Any] | None]
    """Fields in which it differs from the other runs, with their values."""

    adjusted: Mapped[dict[str, Any] | None]
    """What runs changed for want of memory: {"training.per_device_train_batch_size": 4, …}; `spec` stays as it was."""
    settled: Mapped[dict[str, Any] | None]
    """What `method: auto` came to at the job's first start, and why (core/jobs/admission/auto_method.py); never changed
    again."""

    status: Mapped[str] = mapped_column(String(16))
    """Written by core.jobs.base.transitions alone."""
    reason: Mapped[str] = mapped_column(Text, insert_default="")
    """Why it is where it is, for people."""
    stop_requested: Mapped[str | None] = mapped_column(String(16))
    prepared: Mapped[dict[str, Any] | None]
    """Where the model lies on the data root, once it does."""

    attempt: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Number of claims, and the fencing token: a worker with an older one cannot write."""
    machine_failures: Mapped[int] = mapped_column(Integer, insert_default=0)
    losses: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Workers that vanished under it, one after the other, without a further checkpoint between them."""
    full_disks: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Attempts that ended for want of room, counted like `losses`."""
    furthest_step: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Step of the furthest checkpoint that was reported."""
    needs_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What its last attempt found no room for on the data root; it waits until that much is free."""
    not_before: Mapped[float | None] = mapped_column(Float)
    unmet: Mapped[int] = mapped_column(Integer, insert_default=0)
    """How many jobs it still waits for (JobDependency); it stands in no line before this is 0."""
    node: Mapped[str | None] = mapped_column(String(255))
    worker: Mapped[str | None] = mapped_column(Id)
    lease_until: Mapped[float | None] = mapped_column(Float)

    event_seq: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Number of the newest event; counted under this row's lock, so that events appear in their order."""
    progress: Mapped[dict[str, Any] | None]
    progress_at: Mapped[float | None] = mapped_column(Float)
    """When that was told."""
    bound_seconds: Mapped[float | None] = mapped_column(Float)
    """What it will hold its slots at the most, as known while it waits (core/jobs/scheduling/runtime_estimates.py);
    null: unknown."""
    reserved_at: Mapped[float | None] = mapped_column(Float)
    """Since when slots are kept for it, which needs more than were free (core/jobs/scheduling/gang_scheduling.py)."""
    reserved_node: Mapped[str | None] = mapped_column(String(255))
    preempted: Mapped[dict[str, Any] | None]
    """It was asked to leave for another job: {"job", "project", "priority", "at"} (core/jobs/scheduling/preempt.py);
    null again once it runs."""
    result: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    traced_at: Mapped[float | None] = mapped_column(Float)
    """When the collector of EFT_OTLP_ENDPOINT took its trace, or refused it for good (api/otlp)."""
    __table_args__ = (
        Index(
            "ix_jobs_untraced",
            "finished_at",
            "id",
            sqlite_where=text(UNTRACED),
            postgresql_where=text(UNTRACED),
        ),
        Index(None, "project_id", "id"),
        Index(
            "ix_jobs_queue",
            "created_at",
            "id",
            sqlite_where=text("status = 'queued'"),
            postgresql_where=text("status = 'queued'"),
        ),
        *(
            Index(
                f"ix_jobs_waits_{what}",
                "queue_key",
                "created_at",
                "id",
                sqlite_where=text(waits),
                postgresql_where=text(waits),
            )
            for what, waits in {**WAITS_FOR, "bounded": BOUNDED}.items()
        ),
        Index(
            "ix_jobs_waiting",
            "project_id",
            "kind",
            sqlite_where=text(QUEUED),
            postgresql_where=text(QUEUED),
        ),
        Index(
            "ix_jobs_after",
            "id",
            sqlite_where=text(AFTER_OTHERS),
            postgresql_where=text(AFTER_OTHERS),
        ),
        Index(
            "ix_jobs_previews",
            "project_id",
            "id",
            sqlite_where=text(PREVIEWS),
            postgresql_where=text(PREVIEWS),
        ),
        Index(
            "ix_jobs_exports",
            "project_id",
            "id",
            sqlite_where=text(EXPORTS),
            postgresql_where=text(EXPORTS),
        ),
        Index(
            "ix_jobs_trials",
            "project_id",
            "id",
            sqlite_where=text(TRIALS),
            postgresql_where=text(TRIALS),
        ),
        Index(
            "ix_jobs_leased",
            "lease_until",
            sqlite_where=text("lease_until IS NOT NULL"),
            postgresql_where=text("lease_until IS NOT NULL"),
        ),
    )


class JobDependency(Owned, Base):
    """A job that waits for another one."""

    __tablename__ = "job_dependencies"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    """The one that waits."""
    after_id: Mapped[str] = mapped_column(Id, primary_key=True, index=True)
    """The one that has to end first."""
    on: Mapped[str] = mapped_column(String(16))
    """success or end."""
    met_at: Mapped[float | None] = mapped_column(Float)


class Attempt(Owned, Base):
    """One claim: a child process and what became of it."""

    __tablename__ = "attempts"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    """prepare, train, session, serving, trial, preview or export."""
    node: Mapped[str] = mapped_column(String(255))
    worker: Mapped[str] = mapped_column(Id)
    slot: Mapped[str] = mapped_column(String(128))
    """The first of its slots; `allocations` has all of them."""
    pid: Mapped[int | None] = mapped_column(Integer)
    pid_started: Mapped[float | None] = mapped_column(Float)
    """Start time of that pid by the kernel, since numbers are used again."""
    started_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    training_at: Mapped[float | None] = mapped_column(Float)
    """Time of its first step; the time before was loading."""
    ended_at: Mapped[float | None] = mapped_column(Float)
    outcome: Mapped[str | None] = mapped_column(Text)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    events_offset: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Bytes of events.jsonl that are in this database."""
    run_record: Mapped[dict[str, Any] | None]


class Event(Owned, Base):
    __tablename__ = "events"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer)
    type: Mapped[str] = mapped_column(String(32))
    time: Mapped[float] = mapped_column(Float, insert_default=db_now())
    data: Mapped[dict[str, Any]]


class Metric(Owned, Base):
    __tablename__ = "metrics"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    value: Mapped[float] = mapped_column(Float)
    time: Mapped[float] = mapped_column(Float)


class Artifact(Owned, Base):
    __tablename__ = "artifacts"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    path: Mapped[str] = mapped_column(String(512), primary_key=True)
    """Below the artifacts folder of that attempt."""
    attempt: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(32))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))


class DeletedJobs(Base):
    """How many jobs of a project were deleted, so that its counters never go down (api/metrics/collect.py)."""

    __tablename__ = "deleted_jobs"
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    status: Mapped[str] = mapped_column(String(16), primary_key=True)
    bucket: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Index into core.jobs.lifecycle.deletion.WAITS, by the wait for the first start; -1: never started."""
    jobs: Mapped[int] = mapped_column(Integer, insert_default=0)
    waited: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """Seconds, of all of them."""


class OutboxMessage(Base):
    """A doorbell to ring once the transaction that needs it has committed. Carries no truth of its own."""

    __tablename__ = "outbox"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    job_id: Mapped[str] = mapped_column(Id)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class ModelShape(Base):
    """What plans need of a model (core/plan/models/shape.py), as the worker that prepared it last has read it."""

    __tablename__ = "model_shapes"
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of how jobs name the model (core/jobs/admission/shapes.py)."""
    shape: Mapped[dict[str, Any]]
    at: Mapped[float] = mapped_column(Float, insert_default=db_now())
