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
"""Of a GPU."""
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
    """With an object store as data root: folder of this box's own for what it works on and copies of what it needs.
    Else it counts for nothing, and everything lies below EFT_DATA."""
    work_bytes: Bytes = 200 << 30
    """With an object store as data root: copies of models, files and finished runs that are kept below EFT_WORK. Beyond
    it those go that no job has used for longest. 0: no bound."""
    s3_endpoint: str = ""
    """Address of the object store, e.g. `https://minio.lab.example:9000`. Default: that of AWS."""
    s3_region: str = ""
    """Region of the bucket. Default: `us-east-1`, which stores other than AWS mostly take."""
    s3_access_key_id: str = ""
    """Who asks the object store. Default: what boto3 finds by itself (AWS_… variables, ~/.aws, the instance's role)."""
    s3_secret_access_key: str = Field(default="", repr=False)
    """Secret that goes with it. Best as EFT_S3_SECRET_ACCESS_KEY_FILE."""
    database_url: str = ""
    """`postgresql://USER@HOST/NAME` (`postgres://` is the same) or `sqlite:////PATH`. Default: SQLite below the data
    root."""
    database_password: str = Field(default="", repr=False)
    """Password of the user in EFT_DATABASE_URL, where it is not part of that. Best as EFT_DATABASE_PASSWORD_FILE."""
    broker_url: str = ""
    """Redis URL (`redis://…` or `redis+socket:///…`). Default: the embedded broker's socket."""
    broker_password: str = Field(default="", repr=False)
    """Password for EFT_BROKER_URL (`redis://` or `rediss://`), where it is not part of that. Best as
    EFT_BROKER_PASSWORD_FILE."""
    node: str = Field(default_factory=socket.gethostname, min_length=1, max_length=200)
    """Name of this box; one worker a name. Default: its host name."""
    gpus: IntList = None
    """GPUs this worker serves, e.g. `0,1`, counted as under an inherited HIP_VISIBLE_DEVICES. Default: all fit ones."""
    cpu_slots: int = Field(default=1, ge=1, le=64)
    """Jobs that train side by side on a box without GPUs. They share its cores evenly (OMP_NUM_THREADS overrules)."""
    cpu_slot_bytes: Bytes = 0
    """Memory that a job on a CPU slot of this box may count on: plans of its memory, `method: auto` and `memory.stream:
    auto` heed it. 0: the memory of the box (or of the control group that the worker is in), shared evenly by its CPU
    slots."""
    cpu_slot_limit: bool = True
    """A job on a CPU slot that wants more than that, beside the size of its model's files, is out of memory, and takes
    none from others (RLIMIT_DATA; docs/operations.md)."""
    prepare_bytes: Bytes = 4 << 30
    """Memory that a process may take, beside the size of the files that it works on, to prepare a model, to preview a
    file, or to make tokens of rows for a trainer (RLIMIT_DATA). Beyond it that process is out of memory. 0: no
    limit."""
    memory_check: bool = True
    """Refuse jobs that by the plan of their memory (docs/plans.md) fit no node, and start none where it does not fit.
    A plan is an estimate: `false` lets jobs try. The same for the API and all workers."""
    node_labels: NameList = ()
    """Labels of this box (separated by commas) that jobs may ask for: `resources.requirements.labels`."""
    fairshare_half_life_hours: Seconds = 168.0
    """After so long, GPU time that an owner has used counts half in the order of the queue (docs/queue.md). The same
    for the API and all workers."""
    sysfs: Path = Path("/sys")
    """Where the kernel lists the devices. Tests point it at a made-up box; leave it alone otherwise."""

    host: str = "127.0.0.1"
    """Address the API listens on."""
    port: int = Field(default=8321, ge=0, le=65535)
    """Port the API listens on."""
    trusted_proxies: NameList = ()
    """Addresses and networks in CIDR notation (separated by commas) of proxies before this service: of requests that
    come from them, X-Forwarded-For says who asks and X-Forwarded-Proto by which scheme. From others neither counts.
    Default: none."""
    max_connections: int = Field(default=4096, ge=16, le=1 << 31)
    """Connections that one API process holds open, as far as its limit of open files goes (`ulimit -n`)."""
    max_connections_per_address: int = Field(default=1024, ge=8, le=1 << 31)
    """Of these, connections of one address (of IPv6: of one /64), and never more than half of them. Proxies in
    EFT_TRUSTED_PROXIES have no bound of their own."""
    max_body_bytes: int = Field(default=1 << 20, ge=1 << 10, le=1 << 40)
    """Largest request body that is not an upload."""
    max_upload_bytes: Bytes = 8 << 30
    """Largest uploaded file."""
    min_free_bytes: Bytes = 1 << 30
    """While the data root has less room than this, uploads and jobs are refused and waiting jobs are not started."""
    cache_bytes: Bytes = 100 << 30
    """Packed weights and tokenised rows that are kept below the data root for later jobs. Beyond it, or where
    the reserve (EFT_MIN_FREE_BYTES) is touched, those go that no job has used for longest, and never one that a job is
    using. 0: no bound."""
    rate_per_minute: Rate = 600.0
    """Requests a minute of one API key, in one API process; above that 429 with Retry-After. All keys of one user
    together may send three times as many. 0: no limit."""
    rate_burst: int = Field(default=200, ge=1, le=1 << 31)
    """Requests that a key may send at once before `rate_per_minute` holds."""
    rate_strangers_per_minute: Rate = 60.0
    """Requests a minute without a valid API key of one address, in one API process. 0: no limit."""
    hold_hours: Seconds = 12.0
    """Longest hold of a GPU (`eft gpu hold`) by anybody who is not an admin of the box; theirs always have an end."""
    hold_slots: Count = 1
    """GPUs that anybody who is not an admin of the box may hold at once. 0: only admins of the box hold GPUs."""
    max_waiting_jobs: Count = 10_000
    """Jobs of one project that may wait; beyond that submits are refused with 429. 0: no bound."""
    max_previews: Count = 100
    """Previews of one project that may wait or run at once, unless its quota says otherwise (`eft quota set`); beyond
    that they are refused with 429. 0: no bound."""
    max_spec_bytes: Bytes = 1 << 30
    """What the specs of all jobs and previews of one project may take in the database; beyond that submits are refused
    with 507 until jobs are deleted (`eft delete`). 0: no bound."""
    key_longest_days: float = Field(default=0.0, ge=0, le=36500)
    """Longest life of a new API key in days; one that is made without an end gets this one. Keys that are there already
    keep theirs. 0: no bound."""
    keys_per_member: int = Field(default=50, ge=1, le=10_000)
    """Working API keys that a user may have in a project."""
    rate_public_per_minute: Rate = 1200.0
    """Requests a minute of one address, in one API process, to the routes that ask for no key: health, version and the
    reference pages. 0: no limit."""
    idempotency_hours: float = Field(default=48.0, ge=24, le=LONGEST)
    """How long the answer to an Idempotency-Key is kept for retries."""

    public_url: str = ""
    """Address under which people reach this service, e.g. `https://eft.lab.example`: notices link to it. Default: the
    address that the API listens on."""
    webhook_allow: NameList = ()
    """Hosts, addresses and networks in CIDR notation (separated by commas) to which notices may go although they are
    not public addresses. Default: none."""
    webhook_retry_seconds: FloatList = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
    """Waits (separated by commas) before a notice that failed is tried again; after the last it is a dead letter. Each
    is spread by a fifth to both sides."""
    webhook_timeout_seconds: float = Field(default=10.0, gt=0, le=60)
    """Longest time of one attempt to deliver a notice, from looking the name up to the answer."""
    webhook_disable_days: Seconds = 5.0
    """A webhook that has only failed for so long is disabled."""
    webhook_keep_days: Seconds = 30.0
    """How long delivered notices and dead letters are kept."""

    model_roots: PathList = ()
    """Folders (separated by `:`) below which `local` and `gguf` models may lie. Default: none."""
    data_roots: PathList = ()
    """Folders (separated by `:`) below which data files may be named by path. Default: none."""
    offline: bool = False
    """Never ask a hub: models must be in the cache or on disk."""

    lease_seconds: Seconds = 90.0
    """A worker that does not renew a job's lease this long has lost the job."""
    renew_seconds: Seconds = 15.0
    """How often a worker renews its leases."""
    fence_seconds: Seconds = 60.0
    """A trainer whose worker is silent this long ends itself; shorter than the lease, so that runs never overlap."""
    stop_grace_seconds: Span = 120.0
    """From SIGTERM (write a checkpoint and leave) to SIGKILL."""
    preempt_min_seconds: Span = 600.0
    """Where a project's running jobs may be paused for others of a higher priority: seconds that each of them trains
    first, counted from its first step after every start."""
    relay_seconds: Seconds = 1.0
    """How often a worker moves a trainer's events to the database and looks for a stop request."""
    sweep_seconds: Seconds = 5.0
    """How often the housekeeper looks for expired leases and wakes workers while jobs wait."""
    max_machine_failures: Count = 3
    """A job is tried again after a fault of the box at most this often."""
    max_lost_workers: Count = 5
    """Workers that may vanish under a job, one after the other without a further checkpoint, before the job fails."""
    retry_backoff_seconds: Span = 10.0
    """Wait before the first retry; doubled with each further one. Six times as long where a disk is full in a way that
    its free bytes do not show."""
    spare: bool = True
    """Keep one trainer per node that has imported torch already: jobs start seconds sooner for half a GB of memory."""
    hang_seconds_training: Seconds = 1800.0
    """A trainer that says nothing for this long while it trains has hung: stacks to its log, killed, tried again."""
    hang_seconds_loading: Seconds = 3600.0
    """The same while it loads model and data, evaluates or saves its result."""
    hang_seconds_preparing: Seconds = 3600.0
    """The same while a model is downloaded or converted; waiting for another job that is at it does not count."""
    selftest_seconds: Span = 180.0
    """Each device is tried against the CPU's arithmetic before its slot is offered, once for these versions: longest
    time of one part of that. 0: no self-test, and devices are used untried."""
    gpu_clear_seconds: Span = 30.0
    """A GPU whose memory has not been given back this long after its trainer's end is quarantined until it has."""
    keep_checkpoints_days: Span = 30.0
    """Checkpoints of a job, and what it wrote and did not hand back, go so many days after its end. 0: never."""
    keep_previews_days: Span = 30.0
    """Previews go so many days after their end. 0: never."""
    keep_unused_files_days: Span = 0.0
    """Uploaded files that no job has ever named go after so many days. 0: never."""
    keep_history_days: Span = 0.0
    """Curves, logs and all events but changes of state of a job go so many days after its end; the job, its spec and
    its result stay. 0: never."""

    disk_budget_bytes: Bytes = 0
    """What everything below the data root may take together. Beyond a budget, first goes what may go
    (docs/operations.md), then nothing is started until there is room, and waiting jobs say so. 0: no budget."""
    disk_budget_runs_bytes: Bytes = 0
    """The same for run folders without their checkpoints: logs, events, what jobs hand back."""
    disk_budget_checkpoints_bytes: Bytes = 0
    """The same for checkpoints."""
    disk_budget_uploads_bytes: Bytes = 0
    """The same for uploaded files; beyond it uploads are refused, too."""
    budget_keep_hours: Span = 24.0
    """For a budget's sake, checkpoints and previews go before their days are over, oldest first, but not before so many
    hours after the end of their job."""

    log_file: Path | None = None
    """Where this process's output goes, kept by `log_bytes` and `log_files`. Default: nowhere else; under `eft up` each
    service has its file in `logs/` of the data root."""
    log_bytes: int = Field(default=32 << 20, ge=1 << 16, le=1 << 62)
    """A service's log that has grown so far starts anew."""
    log_files: int = Field(default=5, ge=0, le=1000)
    """Full logs of a service that are kept beside the one being written: NAME.log.1 is the newest."""
    run_log_bytes: int = Field(default=256 << 20, ge=1 << 16, le=1 << 62)
    """What the log of one attempt may take of the disk; of a longer one the newer half of that is kept."""

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
                raise ValueError(f"{variable} and {variable}_FILE are both set: one of them has to go")
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
        raise ValueError(f"{Path(path).parts[0]} is nobody's home folder here") from None


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
        raise ValueError(f"EFT_{what}_PASSWORD is for a server at {name}, and that names none")
    if parts.password is not None:
        raise ValueError(f"there is a password in {name} and one in EFT_{what}_PASSWORD: one of them has to go")
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
                words = "is larger than any number that is taken"
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
