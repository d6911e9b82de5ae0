"""The settings and their defaults: a field is the environment variable `EFT_` and its name in capitals."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

LONGEST = 1e9
"""Seconds (some thirty years), hours or days: longer ones overflow where they are waited for."""

Seconds = Annotated[float, Field(gt=0, le=LONGEST)]
Span = Annotated[float, Field(ge=0, le=LONGEST)]
"""Seconds, hours or days that may be none."""
Bytes = Annotated[int, Field(ge=0, le=1 << 62)]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Number = Annotated[int, Field(ge=0, le=1 << 16)]
"""Index of a GPU."""
Rate = Annotated[float, Field(ge=0, le=LONGEST)]
PathList = Annotated[tuple[Path, ...], NoDecode]
IntList = Annotated[tuple[Number, ...] | None, NoDecode]
NameList = Annotated[tuple[str, ...], NoDecode]
FloatList = Annotated[tuple[Span, ...], NoDecode]


class SettingFields(BaseSettings):
    """Attribute docstrings are the reference (docs/settings.md is generated from them)."""

    model_config = SettingsConfigDict(
        env_prefix="EFT_",
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    data: str = ".eft"
    """Data root, shared by API and workers: a folder (files, runs, models, and the embedded database and broker), or
    `s3://bucket/prefix` (docs/data-root.md)."""
    work: Path = Path(".eft")
    """Local folder of this box if the data root is an object store: working files and copies of stored data. Otherwise
    unused; everything is below EFT_DATA."""
    work_bytes: Bytes = 200 << 30
    """Size limit, in bytes, of copies of models, files and finished runs below EFT_WORK if the data root is an object
    store. Beyond it the least recently used copies are deleted. 0: no limit."""
    s3_endpoint: str = ""
    """Address of the object store, e.g. `https://minio.lab.example:9000`. Default: AWS."""
    s3_region: str = ""
    """Region of the bucket. Default: `us-east-1`, which most stores other than AWS accept."""
    s3_access_key_id: str = ""
    """Access key for the object store. Default: what boto3 finds (AWS_… variables, ~/.aws, the instance role)."""
    s3_secret_access_key: str = Field(default="", repr=False)
    """Secret of the access key. Prefer EFT_S3_SECRET_ACCESS_KEY_FILE."""
    database_url: str = ""
    """`postgresql://USER@HOST/NAME` (`postgres://` is the same) or `sqlite:////PATH`. Default: SQLite below the data
    root."""
    database_password: str = Field(default="", repr=False)
    """Password of the user in EFT_DATABASE_URL, if the URL has none. Prefer EFT_DATABASE_PASSWORD_FILE."""
    broker_url: str = ""
    """Redis URL (`redis://…` or `redis+socket:///…`). Default: the embedded broker's socket."""
    broker_password: str = Field(default="", repr=False)
    """Password for EFT_BROKER_URL (`redis://` or `rediss://`), if the URL has none. Prefer EFT_BROKER_PASSWORD_FILE."""
    node: str = Field(default_factory=socket.gethostname, min_length=1, max_length=200)
    """Name of this box, unique per worker. Default: its host name."""
    gpus: IntList = None
    """GPUs that this worker offers, e.g. `0,1`, relative to an inherited HIP_VISIBLE_DEVICES. Default: all suitable
    ones."""
    cpu_slots: int = Field(default=1, ge=1, le=64)
    """Number of jobs that train concurrently on a box without GPUs. They share its cores evenly (OMP_NUM_THREADS
    overrides this)."""
    cpu_slot_bytes: Bytes = 0
    """Memory of one CPU slot, in bytes, for memory plans, `method: auto` and `memory.stream: auto`. 0: the memory of
    the box (or of the worker's control group) divided by its CPU slots."""
    cpu_slot_limit: bool = True
    """Enforce the memory of a CPU slot, plus the size of the model's files: a job beyond it is out of memory and takes
    none from others (RLIMIT_DATA; docs/operations.md)."""
    prepare_bytes: Bytes = 4 << 30
    """Memory limit, in bytes, of a process that prepares a model, previews a file or tokenises rows, beside the size of
    its files (RLIMIT_DATA). Beyond it the process is out of memory. 0: no limit."""
    memory_check: bool = True
    """Reject jobs that fit no node according to their memory plan (docs/plans.md), and claim jobs only where they fit.
    A plan is an estimate: `false` lets jobs try. Use the same value for the API and all workers."""
    snapshots: Path | None = Path("/dev/shm")  # noqa: S108 -- its folder there is made and checked by Snapshots.open
    """Folder in memory (tmpfs) for the snapshots of trainers (docs/checkpoints.md). Empty: none, and steps wait until
    their checkpoints are on the disk."""
    node_labels: NameList = ()
    """Labels of this box (comma-separated) that jobs can require: `resources.requirements.labels`."""
    fairshare_half_life_hours: Seconds = 168.0
    """Half-life of used GPU time in fair-share scheduling, in hours (docs/queue.md). Use the same value for the API and
    all workers."""
    sysfs: Path = Path("/sys")
    """Folder in which the kernel lists devices. Only tests change it."""

    host: str = "127.0.0.1"
    """Address on which the API listens."""
    port: int = Field(default=8321, ge=0, le=65535)
    """Port on which the API listens."""
    trusted_proxies: NameList = ()
    """Addresses and CIDR networks (comma-separated) of reverse proxies in front of this service. X-Forwarded-For and
    X-Forwarded-Proto count only in requests from these. Default: none."""
    max_connections: int = Field(default=4096, ge=16, le=1 << 31)
    """Maximum number of open connections of one API process, within its limit of open files (`ulimit -n`)."""
    max_connections_per_address: int = Field(default=1024, ge=8, le=1 << 31)
    """Maximum number of connections of one address (IPv6: one /64), and never more than half of all. Proxies in
    EFT_TRUSTED_PROXIES have no limit of their own."""
    max_body_bytes: int = Field(default=1 << 20, ge=1 << 10, le=1 << 40)
    """Maximum size of a request body that is not an upload, in bytes."""
    max_upload_bytes: Bytes = 8 << 30
    """Maximum size of an uploaded file, in bytes."""
    min_free_bytes: Bytes = 1 << 30
    """Reserve of free disk space below which uploads and jobs are rejected and waiting jobs do not start, in bytes."""
    cache_bytes: Bytes = 100 << 30
    """Size limit of packed weights and tokenised rows cached below the data root, in bytes. Beyond it, or below the
    reserve (EFT_MIN_FREE_BYTES), the least recently used entries are deleted, never one in use. 0: no limit."""
    rate_per_minute: Rate = 600.0
    """Requests per minute of one API key in one API process; beyond that 429 with Retry-After. All keys of one user
    together may send three times as many. 0: no limit."""
    rate_burst: int = Field(default=200, ge=1, le=1 << 31)
    """Requests that a key may send at once before `rate_per_minute` applies."""
    rate_strangers_per_minute: Rate = 60.0
    """Requests per minute without a valid API key of one address in one API process. 0: no limit."""
    hold_hours: Seconds = 12.0
    """Maximum length of a GPU hold (`eft gpu hold`) by a user who is not an admin of the box, in hours. Such holds
    always have an end."""
    hold_slots: Count = 1
    """GPUs that a user who is not an admin of the box may hold at once. 0: only admins of the box hold GPUs."""
    max_waiting_jobs: Count = 10_000
    """Maximum number of waiting jobs of one project; beyond that submits are rejected with 429. 0: no limit."""
    max_previews: Count = 100
    """Maximum number of previews of one project that wait or run, unless its quota sets another (`eft quota set`);
    beyond that previews are rejected with 429. 0: no limit."""
    max_sessions: Count = 8
    """Sessions that a user may have open at once, parked ones too, unless a quota sets another number (`eft quota set`,
    docs/sessions.md). 0: no limit."""
    session_guests: int = Field(default=7, ge=0, le=63)
    """Sessions that may join the process of another one of the same project and base model while no slot is free
    (docs/sessions.md). 0: none."""
    unused_session_hours: Span = 168.0
    """Hours without an operation after which a parked session is closed; what it has saved stays. 0: never."""
    session_result_hours: Span = 24.0
    """Hours for which the arrays of a result of a session are kept, fetched or not. 0: for ever."""
    max_operation_bytes: Bytes = 64 << 20
    """Size limit of one operation of a session, in bytes."""
    serving_idle_seconds: Seconds = 300.0
    """Time without a request after which the process that serves a model leaves its slot, in seconds
    (docs/serving.md)."""
    serving_slots: int = Field(default=16, ge=1, le=1024)
    """Answers that such a process computes at once; others wait."""
    serving_adapters: int = Field(default=16, ge=1, le=1024)
    """Adapters that such a process keeps on its base at once."""
    serving_max_tokens: int = Field(default=8192, ge=1, le=1 << 20)
    """Maximum number of tokens of prompt and answer together, for a model that is served."""
    serving_wait_seconds: Seconds = 600.0
    """Time after which a request to a served model is answered with an error if it has no answer, in seconds."""
    max_completions: Count = 64
    """Requests to served models that a project may have open at once; beyond that they are rejected with 429.
    0: no limit."""
    max_spec_bytes: Bytes = 1 << 30
    """Size limit of the specs of all jobs and previews of one project in the database, in bytes; beyond that submits
    are rejected with 507 until jobs are deleted (`eft delete`). 0: no limit."""
    key_longest_days: float = Field(default=0.0, ge=0, le=36500)
    """Maximum and default lifetime of a new API key, in days. Existing keys keep theirs. 0: no limit."""
    keys_per_member: int = Field(default=50, ge=1, le=10_000)
    """Maximum number of valid API keys of a user in a project."""
    session_idle_hours: float = Field(default=12.0, gt=0, le=24 * 365)
    """Time without a request after which a browser is signed out of the dashboard, in hours."""
    session_hours: float = Field(default=168.0, gt=0, le=24 * 365)
    """Maximum length of a browser's session in the dashboard, in hours. It ends no later than the API key that it was
    begun with."""
    rate_public_per_minute: Rate = 1200.0
    """Requests per minute of one address in one API process to routes without a key: health, version and the reference
    pages. 0: no limit."""
    idempotency_hours: float = Field(default=48.0, ge=24, le=LONGEST)
    """Time for which the response to an Idempotency-Key is kept for retries, in hours."""

    public_url: str = ""
    """Public address of this service, e.g. `https://eft.lab.example`, used in links of webhooks. Default: the address
    on which the API listens."""
    webhook_allow: NameList = ()
    """Hosts, addresses and CIDR networks (comma-separated) that are allowed as webhook targets although they are not
    public. Default: none."""
    reward_allow: NameList = ()
    """Hosts, addresses and CIDR networks (comma-separated) that the reward `http` of jobs is allowed to ask although
    they are not public. Default: none."""
    reward_tokens: Path | None = None
    """File that only the worker's user can read, with a JSON object of tokens by origin, such as
    `{"https://grader.lab.example": "…"}`. The reward `http` sends a token as `Authorization: Bearer` to that origin
    alone. Default: none."""
    webhook_retry_seconds: FloatList = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
    """Delays (comma-separated) before a failed webhook delivery is retried, in seconds; after the last it is a dead
    letter. Each has a jitter of a fifth in both directions."""
    webhook_timeout_seconds: float = Field(default=10.0, gt=0, le=60)
    """Timeout of one webhook delivery, from the DNS lookup to the response, in seconds."""
    webhook_disable_days: Seconds = 5.0
    """Days of failures without a success after which a webhook is disabled."""
    tinker_precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the sessions that Tinker's SDK opens, which cannot say it: `auto` is bf16 where the device has
    instructions for it. With `fp32`, log-probabilities of sampling and of training agree to about 1e-6."""
    tinker_exact: bool = False
    """Whether sessions of Tinker's SDK are `exact` (docs/sessions.md): log-probabilities of samples equal those of
    forward passes to the bit, at the cost of a pass for each sample."""
    tinker_gpus: int = Field(default=1, ge=1, le=64)
    """GPUs of each session that Tinker's SDK opens (on a box without GPUs: CPU slots). A model's `user_metadata` may
    name another number as `eft:gpus`."""
    otlp_endpoint: str = ""
    """Base address of an OpenTelemetry collector, e.g. `http://127.0.0.1:4318`: the trace of every job that ends is
    sent to `/v1/traces` below it (docs/notices.md). Default: none."""
    otlp_headers: NameList = Field(default=(), repr=False)
    """Headers for that collector (comma-separated), each `name=value`. Prefer EFT_OTLP_HEADERS_FILE for secrets."""
    webhook_keep_days: Seconds = 30.0
    """Days for which delivered notifications and dead letters are kept."""

    model_roots: PathList = ()
    """Folders (separated by `:`) below which `local` and `gguf` models are allowed. Default: none."""
    data_roots: PathList = ()
    """Folders (separated by `:`) below which data files are allowed by path. Default: none."""
    lm_eval_tasks: Path | None = None
    """Folder of tasks that jobs may name in `export: {type: lm_eval}`, beside those of lm-eval's package: YAML files
    with their data. Tasks are programs: only people who may run code on this machine should write there."""
    tracking_dir: Path | None = None
    """Folder for what trackers of jobs (`tracking`) write on this machine. Default: `tracking` in the data root."""
    offline: bool = False
    """Do not contact hubs: models must be in the cache or on disk."""

    lease_seconds: Seconds = 90.0
    """Time after which a worker that does not renew a job's lease has lost the job, in seconds."""
    renew_seconds: Seconds = 15.0
    """Interval at which a worker renews its leases, in seconds."""
    fence_seconds: Seconds = 60.0
    """Time without a heartbeat after which a trainer ends itself, in seconds; shorter than the lease, so that runs
    never overlap."""
    stop_grace_seconds: Span = 120.0
    """Time from SIGTERM (write a checkpoint and exit) to SIGKILL, in seconds."""
    preempt_min_seconds: Span = 600.0
    """Minimum training time before a job can be preempted, counted from its first step after every start, in
    seconds."""
    relay_seconds: Seconds = 1.0
    """Interval at which a worker copies a trainer's events to the database and checks for stop requests, in seconds."""
    sweep_seconds: Seconds = 5.0
    """Interval at which the housekeeper checks for expired leases and wakes workers while jobs wait, in seconds."""
    max_machine_failures: Count = 3
    """Maximum number of retries of a job after faults of the box."""
    max_lost_workers: Count = 5
    """Number of consecutive lost workers without a new checkpoint after which a job fails."""
    retry_backoff_seconds: Span = 10.0
    """Delay before the first retry, doubled with each further one, in seconds. Six times as long if a disk is full
    although its free bytes do not show it."""
    spare: bool = True
    """Keep one process per node that has imported torch, a standby trainer or, without GPUs, a fork server: jobs start
    seconds sooner for half a GB of memory."""
    hang_seconds_training: Seconds = 1800.0
    """Time without progress after which a training process counts as hung, in seconds: its stacks go to the log, it is
    killed, and the job is retried."""
    hang_seconds_loading: Seconds = 3600.0
    """The same time while a trainer loads model and data, evaluates or saves its result."""
    hang_seconds_preparing: Seconds = 3600.0
    """The same time while a model is downloaded or converted; waiting for another job that does so is not counted."""
    selftest_seconds: Span = 180.0
    """Time limit of one part of a device's self-test, in seconds. The self-test compares the device with the CPU before
    its slot is offered, once per version. 0: no self-test."""
    gpu_clear_seconds: Span = 30.0
    """Time after a trainer's end within which its GPU's memory must be free, in seconds; otherwise the GPU is
    quarantined until it is."""
    keep_checkpoints_days: Span = 30.0
    """Days after a job's end for which its checkpoints and files other than artifacts are kept. 0: forever."""
    keep_previews_days: Span = 30.0
    """Days after their end for which previews and trials of rewards are kept. 0: forever."""
    keep_unused_files_days: Span = 0.0
    """Days for which uploaded files that no job has named are kept. 0: forever."""
    keep_history_days: Span = 0.0
    """Days after a job's end for which its metrics, logs and events other than changes of state are kept; the job, its
    spec and its result stay. 0: forever."""

    disk_budget_bytes: Bytes = 0
    """Size limit of everything below the data root, in bytes. Beyond a budget, expendable data is deleted first
    (docs/operations.md); then nothing starts until there is space, and waiting jobs say so. 0: no budget."""
    disk_budget_runs_bytes: Bytes = 0
    """The same limit for run folders without checkpoints: logs, events, artifacts."""
    disk_budget_checkpoints_bytes: Bytes = 0
    """The same limit for checkpoints."""
    disk_budget_uploads_bytes: Bytes = 0
    """The same limit for uploaded files; beyond it uploads are rejected too."""
    budget_keep_hours: Span = 24.0
    """Hours after a job's end before which a budget does not delete its checkpoints and previews."""

    log_file: Path | None = None
    """File for this process's output, rotated by `log_bytes` and `log_files`. Default: none; under `eft up` each
    service has a file in `logs/` of the data root."""
    log_bytes: int = Field(default=32 << 20, ge=1 << 16, le=1 << 62)
    """Size at which a service's log is rotated, in bytes."""
    log_files: int = Field(default=5, ge=0, le=1000)
    """Number of full logs of a service to keep; NAME.log.1 is the newest."""
    run_log_bytes: int = Field(default=256 << 20, ge=1 << 16, le=1 << 62)
    """Size limit of the log of one attempt, in bytes; beyond it the newer half is kept."""
