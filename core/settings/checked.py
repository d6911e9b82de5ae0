"""The settings of a process, checked one by one and against each other."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import field_validator, model_validator

from core.settings.addresses import check_for_password, check_server, expanded_path, scheme_of, with_password
from core.settings.fields import SettingFields

MAX_SOCKET_PATH = 106
"""Bytes of a Unix socket's path (unix(7): 108, with its end and one to spare)."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()/-]*)?$")
"""Behind `s3://`: a bucket's name and a prefix of characters that need no care
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html)."""


class Settings(SettingFields):
    """Every setting of the service, from the environment (`EFT_…`). The defaults run a bare machine."""

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
        expanded_path(value)
        return value

    @field_validator("work", "log_file")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None:
            expanded_path(value)
        return value

    @field_validator("tracking_dir", "lm_eval_tasks", "reward_tokens", "snapshots")
    @classmethod
    def _expanded(cls, value: Path | None) -> Path | None:
        return None if value is None else expanded_path(value)

    @field_validator("snapshots", mode="before")
    @classmethod
    def _no_snapshots(cls, value: Any) -> Any:
        return value or None

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
                f"`{scheme_of(value)}` is not a database that eft runs on; write `postgresql://USER@HOST/NAME`, or "
                "leave it out for SQLite below the data root"
            )
        elif scheme.startswith("sqlite") and (not rest.startswith("/") or rest in ("/", "/:memory:")):
            raise ValueError("an SQLite database is a file that all processes open: `sqlite:////PATH/eft.db`")
        check_server(value, needs_host=False)
        return value

    @field_validator("broker_url")
    @classmethod
    def _broker(cls, value: str) -> str:
        if value and not value.startswith(("redis://", "rediss://", "redis+socket://")):
            raise ValueError(
                f"`{scheme_of(value)}` is not a broker that eft speaks to; write `redis://HOST:6379/0`, `rediss://…` "
                "(TLS) or `redis+socket:///PATH`"
            )
        check_server(value, needs_host=value.startswith(("redis://", "rediss://")))
        return value

    @field_validator("public_url", "s3_endpoint", "otlp_endpoint")
    @classmethod
    def _address(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with `http://` or `https://`")
        check_server(value, needs_host=bool(value))
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
            return tuple(expanded_path(part) for part in value.split(":") if part)
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

    @field_validator("webhook_allow", "reward_allow")
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

    @field_validator("otlp_headers")
    @classmethod
    def _headers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[A-Za-z0-9_-]+=[\x21-\x7e][\x20-\x7e]*", part) for part in value):
            raise ValueError("must be `name=value`, or several of them with commas between")
        return value

    @field_validator("node_labels", "webhook_allow", "reward_allow", "trusted_proxies", "otlp_headers", mode="before")
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
                check_for_password(what, url)
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
