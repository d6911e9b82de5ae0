"""Every setting of the service, from the environment (`EFT_…`). The defaults run a bare machine."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

MAX_SOCKET_PATH = 106
"""Bytes of a Unix socket's path (unix(7): 108, with its end and one to spare)."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()/-]*)?$")
"""Behind `s3://`: a bucket's name and a prefix of characters that need no care
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html)."""

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


class Settings(BaseSettings):
    """Attribute docstrings are the reference (docs/settings.md is generated from them)."""

    model_config = SettingsConfigDict(
        env_prefix="EFT_",
        use_attribute_docstrings=True,
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
    max_spec_bytes: Bytes = 1 << 30
    """Size limit of the specs of all jobs and previews of one project in the database, in bytes; beyond that submits
    are rejected with 507 until jobs are deleted (`eft delete`). 0: no limit."""
    key_longest_days: float = Field(default=0.0, ge=0, le=36500)
    """Maximum and default lifetime of a new API key, in days. Existing keys keep theirs. 0: no limit."""
    keys_per_member: int = Field(default=50, ge=1, le=10_000)
    """Maximum number of valid API keys of a user in a project."""
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
    webhook_retry_seconds: FloatList = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
    """Delays (comma-separated) before a failed webhook delivery is retried, in seconds; after the last it is a dead
    letter. Each has a jitter of a fifth in both directions."""
    webhook_timeout_seconds: float = Field(default=10.0, gt=0, le=60)
    """Timeout of one webhook delivery, from the DNS lookup to the response, in seconds."""
    webhook_disable_days: Seconds = 5.0
    """Days of failures without a success after which a webhook is disabled."""
    webhook_keep_days: Seconds = 30.0
    """Days for which delivered notifications and dead letters are kept."""

    model_roots: PathList = ()
    """Folders (separated by `:`) below which `local` and `gguf` models are allowed. Default: none."""
    data_roots: PathList = ()
    """Folders (separated by `:`) below which data files are allowed by path. Default: none."""
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
    """Keep one standby trainer per node that has imported torch: jobs start seconds sooner for half a GB of memory."""
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
    """Days after their end for which previews are kept. 0: forever."""
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

    @model_validator(mode="before")
    @classmethod
    def _from_files(cls, values: Any) -> Any:
        """`EFT_…_FILE` names a file that holds the setting: how containers and service managers hand over secrets."""
        found = dict(values)
        for name in cls.model_fields:
            variable = f"EFT_{name.upper()}"
            path = os.environ.get(f"{variable}_FILE")
            if not path:
                continue
            if variable in os.environ:
                raise ValueError(f"{variable} and {variable}_FILE are both set: remove one of them")
            if name in found:  # given by the code that asks
                continue
            try:
                found[name] = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(
                    f"{variable}_FILE={path} cannot be read by user {os.geteuid()}: {error.strerror}"
                ) from None
            except UnicodeDecodeError:
                raise ValueError(f"{variable}_FILE={path} is not text") from None
        return found

    @field_validator("data", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("data")
    @classmethod
    def _location(cls, value: str) -> str:
        scheme, found, rest = value.partition("://")
        if not value or (found and (scheme != "s3" or not _BUCKET.match(rest))):
            raise ValueError("must be a folder, or `s3://bucket/prefix`")
        _expanded(value)
        return value

    @field_validator("work", "log_file")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None:
            _expanded(value)
        return value

    @field_validator("database_url")
    @classmethod
    def _database(cls, value: str) -> str:
        if not value:
            return value
        scheme, _, rest = value.partition("://")
        if scheme in ("postgres", "postgresql"):  # as consoles and other programs hand it out
            value = f"postgresql+psycopg://{rest}"
        elif scheme not in ("postgresql+psycopg", "sqlite", "sqlite+pysqlite"):
            raise ValueError(
                f"`{_scheme(value)}` is not a database that eft runs on; write `postgresql://USER@HOST/NAME`, or leave "
                "it out for SQLite below the data root"
            )
        elif scheme.startswith("sqlite") and (not rest.startswith("/") or rest in ("/", "/:memory:")):
            raise ValueError("an SQLite database is a file that all processes open: `sqlite:////PATH/eft.db`")
        _check_server(value, needs_host=False)
        return value

    @field_validator("broker_url")
    @classmethod
    def _broker(cls, value: str) -> str:
        if value and not value.startswith(("redis://", "rediss://", "redis+socket://")):
            raise ValueError(
                f"`{_scheme(value)}` is not a broker that eft speaks to; write `redis://HOST:6379/0`, `rediss://…` "
                "(TLS) or `redis+socket:///PATH`"
            )
        _check_server(value, needs_host=value.startswith(("redis://", "rediss://")))
        return value

    @field_validator("public_url", "s3_endpoint")
    @classmethod
    def _address(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with `http://` or `https://`")
        _check_server(value, needs_host=bool(value))
        return value

    @field_validator("host", "node")
    @classmethod
    def _name(cls, value: str) -> str:
        if not value or not value.isprintable() or any(character.isspace() for character in value):
            raise ValueError("must be a name without spaces")
        return value

    @field_validator("model_roots", "data_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(_expanded(part) for part in value.split(":") if part)
        return value

    @field_validator("gpus", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip()) or None
        return value

    @field_validator("webhook_retry_seconds", mode="before")
    @classmethod
    def _waits(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("webhook_allow")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for part in value:
            if "/" in part:
                ipaddress.ip_network(part)  # its error names what is wrong
        return tuple(part.lower() for part in value)

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for part in value:
            ipaddress.ip_network(part)  # its error names what is wrong
        return value

    @field_validator("node_labels", "webhook_allow", "trusted_proxies", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(sorted({part.strip() for part in value.split(",") if part.strip()}))
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if not self.renew_seconds < self.fence_seconds < self.lease_seconds:
            raise ValueError(
                "EFT_RENEW_SECONDS < EFT_FENCE_SECONDS < EFT_LEASE_SECONDS must hold, or runs could overlap"
            )
        for what, url, password in (
            ("DATABASE", self.database_url, self.database_password),
            ("BROKER", self.broker_url, self.broker_password),
        ):
            if password:
                _check_for_password(what, url)
        return self

    @property
    def is_remote(self) -> bool:
        """The data root is an object store."""
        return self.data.startswith("s3://")

    @property
    def root(self) -> Path:
        """The folder that everything is worked on in: the data root, or with an object store this box's own."""
        return (self.work if self.is_remote else Path(self.data)).expanduser().absolute()

    @property
    def data_root(self) -> str:
        """The data root as others have to name it: an absolute path, or the URL."""
        return self.data if self.is_remote else str(self.root)

    @property
    def sqlalchemy_url(self) -> str:
        return with_password(self.database_url, self.database_password) or f"sqlite:///{self.root / 'eft.db'}"

    @property
    def broker_socket(self) -> Path:
        """The embedded broker's: below the data root, or where that path is too long in a folder of this user."""
        path = self.root / "broker" / "valkey.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")  # noqa: S108 -- box.broker checks whose it is
        path = runtime / f"eft-{os.getuid()}-{name}" / "valkey.sock"
        return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH else Path("/tmp") / path.relative_to(runtime)  # noqa: S108

    @property
    def celery_broker_url(self) -> str:
        given = with_password(self.broker_url, self.broker_password)
        return given or f"redis+socket://{quote(str(self.broker_socket))}"


def crosses_in_clear(settings: Settings) -> str | None:
    """What to say where keys cross a network unencrypted: the API listens beyond this machine, and nothing tells of a
    proxy before it that speaks TLS."""
    if settings.trusted_proxies or settings.public_url.startswith("https://"):
        return None
    try:
        loopback = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = settings.host == "localhost"
    if loopback:
        return None
    return (
        f"plain HTTP on {settings.host}: API keys cross the network in clear; put a proxy that speaks TLS before it "
        "and name it in EFT_TRUSTED_PROXIES, or listen on 127.0.0.1 (EFT_HOST) and reach it through an SSH tunnel"
    )


def _expanded(path: str | Path) -> Path:
    """With the home folder of `~` or `~user` in its place. Raises ValueError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{Path(path).parts[0]} is not the home folder of a user here") from None


def _scheme(url: str) -> str:
    """What a message may show of a URL, which may hold a password."""
    scheme = url.partition("://" if "://" in url else ":")[0][:40]
    return scheme.encode("ascii", "backslashreplace").decode()


def _check_server(url: str, *, needs_host: bool) -> None:
    """Raises ValueError for a host or a port that cannot be one. Its words show nothing of the URL but these."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its words may hold a part of a password
        raise ValueError(
            "this is not an address: the port is a number up to 65535, and `/`, `@`, `:` and `%` in a password are "
            "written `%2F`, `%40`, `%3A` and `%25`"
        ) from None
    if port == 0 or (needs_host and not parts.hostname):
        raise ValueError("the address names no host" if needs_host and not parts.hostname else "0 is not a port")


def _check_for_password(what: str, url: str) -> None:
    """Raises ValueError where a password given apart could not be put into `url`."""
    name, parts = f"EFT_{what}_URL", urlsplit(url)
    if not parts.netloc:
        raise ValueError(f"EFT_{what}_PASSWORD is for a server at {name}, which names no server")
    if parts.password is not None:
        raise ValueError(f"{name} and EFT_{what}_PASSWORD both hold a password: remove one of them")
    if what == "DATABASE" and not parts.username:
        raise ValueError(f"EFT_{what}_PASSWORD is given, and {name} names no user: postgresql+psycopg://USER@HOST/NAME")


def with_password(url: str, password: str) -> str:
    """`url` with `password` (any text) behind its user's name."""
    if not (url and password):
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


class SettingsError(Exception):
    """The environment cannot be used as it is: one line a fault, each with the variable's name."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_settings() -> Settings:
    """The settings as the environment has them now. Raises SettingsError."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError(tuple(_words(error))) from None


def _words(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        context = fault.get("ctx", {})
        match fault["type"]:
            case "value_error":
                words = str(context["error"])
            case "int_parsing" | "int_type" | "int_from_float":
                words = "is not a whole number"
            case "int_parsing_size":
                words = "is larger than any accepted number"
            case "float_parsing" | "float_type":
                words = "is not a number"
            case "finite_number":
                words = "is not a finite number"
            case "bool_parsing" | "bool_type":
                words = "is neither `true` nor `false`"
            case "greater_than_equal":
                words = f"must be at least {context['ge']:,}"
            case "greater_than":
                words = f"must be more than {context['gt']:,}"
            case "less_than_equal":
                words = f"must be at most {context['le']:,}"
            case "string_too_short":
                words = "must not be empty"
            case "string_unicode" | "path_type":
                words = "is not text in UTF-8"
            case _:
                words = fault["msg"][:1].lower() + fault["msg"][1:]
        if not fault["loc"]:  # of several settings, which the words name
            yield words
            continue
        variable = f"EFT_{str(fault['loc'][0]).upper()}"
        name = f"{variable}_FILE" if os.environ.get(f"{variable}_FILE") else variable
        yield f"{name}: {_shown(str(fault['loc'][0]), fault.get('input'), words)}{words}"


def _shown(field: str, value: object, words: str) -> str:
    """The value before the words that say what it is not; never a secret's."""
    if not words.startswith("is ") or not Settings.model_fields[field].repr:
        return ""
    text = repr(str(value))
    return (text if len(text) <= 60 else f"{text[:59]}…") + " "


def make_root(here: Settings) -> Path:
    """The data root, or the folder that this box works in, made where it is not there. Raises SettingsError."""
    variable, root = "EFT_WORK" if here.is_remote else "EFT_DATA", here.root
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        what = "is a file, not a folder" if root.is_file() else f"cannot be made: {error.strerror}"
        raise SettingsError((f"{variable}: {root} {what}",)) from None
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError((f"{variable}: {root} cannot be written to by user {os.geteuid()}",))
    return root


@cache
def settings() -> Settings:
    """The settings of this process, read once. Raises SettingsError."""
    return read_settings()
