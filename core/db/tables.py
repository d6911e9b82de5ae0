"""The tables. Times are seconds since 1970 by the database's clock; owner and project stand on every owned row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Float, ForeignKey, Index, Integer, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from core.db.engine import db_now

Id = String(40)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON(none_as_null=True), list[Any]: JSON(none_as_null=True)}  # noqa: RUF012


QUEUED = "status = 'queued'"
WAITS_FOR = {
    "prepare": f"{QUEUED} AND kind = 'train' AND prepared IS NULL",
    "train": f"{QUEUED} AND kind = 'train' AND prepared IS NOT NULL",
    "preview": f"{QUEUED} AND kind = 'preview'",
}
"""What a waiting job waits for a slot to do. Written out, not bound: SQLite takes a partial index for a query only when
it can see in the query's words that the index has all of its rows."""
BOUNDED = f"{WAITS_FOR['train']} AND bound_seconds IS NOT NULL"
"""Those that may go ahead of a job for which slots are kept (core/jobs/gangs.py)."""
PREVIEWS = "kind = 'preview'"


def _queue_key(context: Any) -> str:
    """Of a plain job of priority 0, for rows made without core.jobs.submit."""
    given = context.get_current_parameters()
    return f"{given['accelerator']}|{given['project_id']}|{given['owner_id']}|100"


class Owned:
    """Whose row it is: nobody outside the project sees it."""

    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"))


class User(Base):
    __tablename__ = "users"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    box_admin: Mapped[bool] = mapped_column(Boolean, insert_default=False)
    """Looks after the installation: nodes, users, projects. Says nothing about any project's jobs and files."""
    disabled_at: Mapped[float | None] = mapped_column(Float)
    """No key of theirs works from then on. Users are never deleted: rows name them."""


class Project(Base):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class Membership(Base):
    """What a user may do in a project. No row: the project does not exist for them."""

    __tablename__ = "memberships"
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    """viewer, member or admin (api/auth/policy.py)."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    __table_args__ = (Index(None, "project_id"),)


class ApiKey(Owned, Base):
    """A key is shown once; its SHA-256 stays, found by the prefix. It acts for one user in one project."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    prefix: Mapped[str] = mapped_column(String(16), unique=True)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    revoked_at: Mapped[float | None] = mapped_column(Float)
    scope: Mapped[str] = mapped_column(String(8))
    """The most it may be used for, whatever its user may: read, write, admin or box (api/auth/policy.py)."""
    expires_at: Mapped[float | None] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    """To about a minute (api/auth/last_use.py)."""
    rotated_from: Mapped[str | None] = mapped_column(Id)
    """The key that this one succeeds."""
    created_by: Mapped[str | None] = mapped_column(Id)
    """The user who made it; null: made on the box itself."""
    __table_args__ = (Index(None, "project_id", "owner_id"),)


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
    """train, or preview: rendering a file as that training would, on a slot without a GPU (core/jobs/previews.py)."""
    name: Mapped[str | None] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]]
    """Resolved: what will run, with every default written out."""
    accelerator: Mapped[str] = mapped_column(String(8))
    """Kind of slot it asks for: any, gpu, cpu."""
    priority: Mapped[int] = mapped_column(Integer, insert_default=0)
    queue_key: Mapped[str] = mapped_column(String(1024), insert_default=_queue_key)
    """Who stands in one line: what they need, project, owner, priority (core/jobs/line.py). In it, age decides."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    retry_of: Mapped[str | None] = mapped_column(Id, ForeignKey("jobs.id"), index=True)
    resume_from: Mapped[list[Any]]
    """Earlier jobs whose checkpoints it may go on from, oldest first: [{"job", "attempts"}]."""

    adjusted: Mapped[dict[str, Any] | None]
    """What runs changed for want of memory: {"training.per_device_train_batch_size": 4, …}; `spec` stays as it was."""
    settled: Mapped[dict[str, Any] | None]
    """What `method: auto` came to at the job's first start, and why (core/jobs/settle.py); never changed again."""

    status: Mapped[str] = mapped_column(String(16))
    """Written by core.jobs.transitions alone."""
    reason: Mapped[str] = mapped_column(Text, insert_default="")
    """Why it is where it is, for people."""
    stop_requested: Mapped[str | None] = mapped_column(String(16))
    prepared: Mapped[dict[str, Any] | None]
    """Where the model lies on the data root, once it does."""

    attempt: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Counts claims and is the fencing token: whoever holds an older one can write nothing."""
    machine_failures: Mapped[int] = mapped_column(Integer, insert_default=0)
    losses: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Workers that vanished under it, one after the other, without a further checkpoint between them."""
    full_disks: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Attempts that ended for want of room, counted like `losses`."""
    furthest_step: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Of the checkpoints told so far."""
    needs_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What its last attempt found no room for on the data root; it waits until that much is free."""
    not_before: Mapped[float | None] = mapped_column(Float)
    node: Mapped[str | None] = mapped_column(String(255))
    worker: Mapped[str | None] = mapped_column(Id)
    lease_until: Mapped[float | None] = mapped_column(Float)

    event_seq: Mapped[int] = mapped_column(Integer, insert_default=0)
    """Number of the newest event; counted under this row's lock, so that events appear in their order."""
    progress: Mapped[dict[str, Any] | None]
    progress_at: Mapped[float | None] = mapped_column(Float)
    """When that was told."""
    bound_seconds: Mapped[float | None] = mapped_column(Float)
    """What it will hold its slots at the most, as known while it waits (core/jobs/bounds.py); null: nobody knows."""
    reserved_at: Mapped[float | None] = mapped_column(Float)
    """Since when slots are kept for it, which needs more than were free (core/jobs/gangs.py)."""
    reserved_node: Mapped[str | None] = mapped_column(String(255))
    preempted: Mapped[dict[str, Any] | None]
    """It was asked to leave for another job: {"job", "project", "priority", "at"} (core/jobs/preempt.py); null again
    once it runs."""
    result: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (
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
            "ix_jobs_previews",
            "project_id",
            "id",
            sqlite_where=text(PREVIEWS),
            postgresql_where=text(PREVIEWS),
        ),
        Index(
            "ix_jobs_leased",
            "lease_until",
            sqlite_where=text("lease_until IS NOT NULL"),
            postgresql_where=text("lease_until IS NOT NULL"),
        ),
    )


class Attempt(Owned, Base):
    """One claim: a child process and what became of it."""

    __tablename__ = "attempts"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    """prepare, train or preview."""
    node: Mapped[str] = mapped_column(String(255))
    worker: Mapped[str] = mapped_column(Id)
    slot: Mapped[str] = mapped_column(String(128))
    """The first of its slots; `allocations` has all of them."""
    pid: Mapped[int | None] = mapped_column(Integer)
    pid_started: Mapped[float | None] = mapped_column(Float)
    """Start time of that pid by the kernel, since numbers are used again."""
    started_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    training_at: Mapped[float | None] = mapped_column(Float)
    """When its first step was told: what came before was loading."""
    ended_at: Mapped[float | None] = mapped_column(Float)
    outcome: Mapped[str | None] = mapped_column(Text)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    events_offset: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Bytes of events.jsonl that are in this database."""
    run_record: Mapped[dict[str, Any] | None]


class Allocation(Owned, Base):
    """A slot held by an attempt; a job of k GPUs has k rows. The partial unique index is the mutex: no slot is ever
    held twice."""

    __tablename__ = "allocations"
    job_id: Mapped[str] = mapped_column(Id, ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    slot: Mapped[str] = mapped_column(String(128), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    released_at: Mapped[float | None] = mapped_column(Float)
    gpus: Mapped[int] = mapped_column(Integer, insert_default=0)
    """0 for a CPU slot, and for one that prepares or previews."""
    billing: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """What a second of it counts in fair share (Slurm: TRESBillingWeights)."""
    charged_at: Mapped[float | None] = mapped_column(Float)
    """When its time went into `usage`; null while it is held, and for seconds after."""
    __table_args__ = (
        Index(
            "uq_allocations_active",
            "node",
            "slot",
            unique=True,
            sqlite_where=text("released_at IS NULL"),
            postgresql_where=text("released_at IS NULL"),
        ),
        Index(
            "ix_allocations_uncharged",
            "job_id",
            "attempt",
            sqlite_where=text("charged_at IS NULL"),
            postgresql_where=text("charged_at IS NULL"),
        ),
        Index("ix_allocations_history", "node", "slot", "created_at"),
    )


class Usage(Owned, Base):
    """What an owner has used in a project, as far as it is charged (core/jobs/usage.py)."""

    __tablename__ = "usage"
    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    billed: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """Billed seconds, each counted by its age at `at` (core/jobs/shares.py)."""
    at: Mapped[float] = mapped_column(Float, insert_default=0.0)
    disk_bytes: Mapped[int] = mapped_column(BigInteger, insert_default=0)
    """Files and run folders, as measured last."""
    disk_at: Mapped[float | None] = mapped_column(Float)


class UsageDay(Owned, Base):
    """Time charged, by the day (UTC) in which it was used: for the report and for quotas of a week."""

    __tablename__ = "usage_days"
    day: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Days since 1970-01-01."""
    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    gpu_seconds: Mapped[float] = mapped_column(Float, insert_default=0.0)
    cpu_seconds: Mapped[float] = mapped_column(Float, insert_default=0.0)
    """Of training on CPU slots."""


class Limit(Base):
    """Shares and quotas of a project or an owner. Null: no quota."""

    __tablename__ = "limits"
    scope: Mapped[str] = mapped_column(String(8), primary_key=True)
    """project or owner."""
    subject_id: Mapped[str] = mapped_column(Id, primary_key=True)
    shares: Mapped[float | None] = mapped_column(Float)
    """Of an owner; null: 1."""
    max_priority: Mapped[int | None] = mapped_column(Integer)
    """Of a project; null: core.jobs.limits.MAX_PRIORITY."""
    max_running: Mapped[int | None] = mapped_column(Integer)
    max_queued: Mapped[int | None] = mapped_column(Integer)
    gpu_hours_week: Mapped[float | None] = mapped_column(Float)
    disk_bytes: Mapped[int | None] = mapped_column(BigInteger)
    preemptible: Mapped[bool | None] = mapped_column(Boolean)
    """Of a project: its running jobs may be paused for waiting ones of a higher priority; null: no."""


class Hold(Base):
    """A slot that is not claimed: somebody works on it by hand, or it is drained."""

    __tablename__ = "holds"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    node: Mapped[str] = mapped_column(String(255))
    slot: Mapped[str] = mapped_column(String(128))
    kind: Mapped[str] = mapped_column(String(8))
    """hold or drain."""
    held_for: Mapped[str] = mapped_column(String(100))
    why: Mapped[str] = mapped_column(Text)
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    """Who asked."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    until: Mapped[float | None] = mapped_column(Float)
    """Null: until it is released."""
    released_at: Mapped[float | None] = mapped_column(Float)
    """Also of one that ran out, once somebody has noticed."""
    __table_args__ = (
        Index(
            "uq_holds_active",
            "node",
            "slot",
            unique=True,
            sqlite_where=text("released_at IS NULL"),
            postgresql_where=text("released_at IS NULL"),
        ),
        Index("ix_holds_history", "node", "slot", "created_at"),
    )


class Maintenance(Base):
    """A time in which nothing runs on a node."""

    __tablename__ = "maintenance"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    node: Mapped[str | None] = mapped_column(String(255))
    """Null: all of them."""
    starts_at: Mapped[float] = mapped_column(Float)
    ends_at: Mapped[float] = mapped_column(Float)
    why: Mapped[str] = mapped_column(Text)
    user_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    cancelled_at: Mapped[float | None] = mapped_column(Float)
    __table_args__ = (Index(None, "ends_at"),)


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


class IdempotencyKey(Owned, Base):
    """The answer once given for a key, so that a retried POST makes no second job."""

    __tablename__ = "idempotency_keys"
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_sha256: Mapped[str] = mapped_column(String(64))
    status: Mapped[int] = mapped_column(Integer)
    body: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class OutboxMessage(Base):
    """A doorbell to ring once the transaction that needs it has committed. Carries no truth of its own."""

    __tablename__ = "outbox"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    job_id: Mapped[str] = mapped_column(Id)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class Node(Base):
    """A box and the worker that serves it now."""

    __tablename__ = "nodes"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    worker: Mapped[str] = mapped_column(Id)
    version: Mapped[str] = mapped_column(String(32))
    slots: Mapped[list[Any]]
    notes: Mapped[list[Any]]
    labels: Mapped[list[Any]] = mapped_column(insert_default=list)
    """EFT_NODE_LABELS of its worker."""
    started_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    heartbeat_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    drained_at: Mapped[float | None] = mapped_column(Float)
    """Nothing is claimed on it from then on, until it is null again; whatever worker serves it."""
    drained_by: Mapped[str | None] = mapped_column(Id)
    drain_reason: Mapped[str | None] = mapped_column(Text)


class Installation(Base):
    """The one row that says which installation this database is that of (core/jobs/installation.py)."""

    __tablename__ = "installation"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    mark: Mapped[str | None] = mapped_column(String(64))
    """Token that the data root has in its installation.json; null until a process has put it there."""
    marked_at: Mapped[float | None] = mapped_column(Float)
    marked_by: Mapped[str | None] = mapped_column(Text)
    """Who, and where they saw the data root, for people."""
    version: Mapped[str | None] = mapped_column(String(32))
    """Of the API that was started last."""
    words: Mapped[list[Any] | None]
    """What the jobs say that it writes (core/spec/vocabulary.py)."""
    words_sha256: Mapped[str | None] = mapped_column(String(64))


class Audit(Base):
    """A change that somebody made, written in the transaction of the change (core/jobs/audit.py). Never a secret."""

    __tablename__ = "audit"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    time: Mapped[float] = mapped_column(Float, insert_default=db_now())
    action: Mapped[str] = mapped_column(String(64))
    """E.g. `node.drain`."""
    target: Mapped[str] = mapped_column(String(255))
    """Id or name of what was changed."""
    actor_id: Mapped[str | None] = mapped_column(Id, ForeignKey("users.id"))
    """The user; null: a command on the box itself."""
    key_id: Mapped[str | None] = mapped_column(Id)
    """The key they used."""
    project_id: Mapped[str | None] = mapped_column(Id, ForeignKey("projects.id"))
    """Whose admins may read it; null: only admins of the box."""
    request_id: Mapped[str | None] = mapped_column(String(64))
    data: Mapped[dict[str, Any]]
    __table_args__ = (
        Index(None, "target", "id"),
        Index(None, "project_id", "id"),
        Index(None, "actor_id", "id"),
    )


class Webhook(Owned, Base):
    """Where a project wants to be told what becomes of its jobs (core/jobs/notices.py, api/notices)."""

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    kind: Mapped[str] = mapped_column(String(16))
    """standard: signed JSON; chat: one line for Slack, Mattermost or Discord."""
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[Any]]
    """Kinds of notices, e.g. `job.failed`."""
    all_jobs: Mapped[bool] = mapped_column(Boolean, insert_default=True)
    """False: only of jobs that name it in `notify`."""
    secrets: Mapped[list[Any]]
    """Newest first: [{"secret": "whsec_…", "until": null or a time}]. Readable, since they sign."""
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    failing_since: Mapped[float | None] = mapped_column(Float)
    """When the first of the failures came that no success has followed."""
    disabled_at: Mapped[float | None] = mapped_column(Float)
    disabled_reason: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (Index(None, "project_id", "id"),)


class Delivery(Owned, Base):
    """One notice for one webhook, written in the transaction of the change that it tells of."""

    __tablename__ = "webhook_deliveries"
    id: Mapped[str] = mapped_column(Id, primary_key=True)
    """The `webhook-id` of every attempt."""
    webhook_id: Mapped[str] = mapped_column(Id, ForeignKey("webhooks.id"))
    job_id: Mapped[str | None] = mapped_column(Id)
    type: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    created_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    state: Mapped[str] = mapped_column(String(16), insert_default="pending")
    """pending, delivered or dead."""
    attempts: Mapped[int] = mapped_column(Integer, insert_default=0)
    next_at: Mapped[float] = mapped_column(Float, insert_default=db_now())
    last_at: Mapped[float | None] = mapped_column(Float)
    last_status: Mapped[int | None] = mapped_column(Integer)
    last_error: Mapped[str | None] = mapped_column(Text)
    __table_args__ = (
        Index(None, "webhook_id", "id"),
        Index(
            "ix_webhook_deliveries_due",
            "webhook_id",
            "next_at",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
    )


class SchemaFloor(Base):
    """One row: which versions may use the database (core/db/migrate.py)."""

    __tablename__ = "schema_floor"
    id: Mapped[str] = mapped_column(String(8), primary_key=True, insert_default="floor")
    works_from: Mapped[str] = mapped_column(String(32))
    """The oldest revision whose code may."""


class ModelShape(Base):
    """What plans need of a model (core/plan/shape.py), as the worker that prepared it last has read it."""

    __tablename__ = "model_shapes"
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of how jobs name the model (core/jobs/shapes.py)."""
    shape: Mapped[dict[str, Any]]
    at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class DiskUsage(Base):
    """What the data root holds, by kind, as the leading housekeeper has measured it last (core/jobs/budget.py)."""

    __tablename__ = "disk_usage"
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(Float, insert_default=db_now())


class Leader(Base):
    """Who does the housekeeping, and who sends notices, until when."""

    __tablename__ = "leaders"
    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(Id)
    until: Mapped[float] = mapped_column(Float)
