"""Where the server is and what key opens it: options, then the environment, then ~/.config/eft/config.toml."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eft.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8321"


@dataclass(frozen=True, slots=True)
class Config:
    url: str
    api_key: str | None = field(repr=False)
    login: str | None = None
    """Address that the file has a key for, where that is another one: its key is not sent here."""

    @property
    def loopback(self) -> bool:
        return urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")


def config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "eft" / "config.toml"


def load_config(url: str | None = None, api_key: str | None = None) -> Config:
    """The first of: the arguments, EFT_URL and EFT_API_KEY, the file, the default address.

    A key from the file goes only to the server that stands beside it in the file: another EFT_URL must not receive it.
    Raises ConfigError.
    """
    stored = read_config()
    stored_url = _checked_url(stored["url"], str(config_path())) if "url" in stored else DEFAULT_URL
    given = url or os.environ.get("EFT_URL")
    chosen = _checked_url(given, "EFT_URL") if given else stored_url
    key = api_key or os.environ.get("EFT_API_KEY") or (stored.get("api_key") if chosen == stored_url else None)
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError("the API key has characters that no key has; check EFT_API_KEY for line ends and quotes")
    return Config(chosen, key, stored_url if "api_key" in stored and chosen != stored_url else None)


def read_config() -> dict[str, str]:
    """The file's settings; {} when there is none. Raises ConfigError when others could read the key in it."""
    path = config_path()
    try:
        mode = path.stat().st_mode
        loaded: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    unknown = sorted(set(loaded) - {"url", "api_key"})
    wrong = sorted(key for key, value in loaded.items() if not isinstance(value, str))
    if unknown or wrong:
        raise ConfigError(f"{path} holds `url` and `api_key`, both strings; look at {', '.join(unknown + wrong)}")
    if "api_key" in loaded and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path} holds a key and others may read it: chmod 600 {path}")
    return loaded


def write_config(url: str, api_key: str) -> Path:
    """Write both, readable by this user only, in one step."""
    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = f"url = {_toml_string(_checked_url(url, 'url'))}\napi_key = {_toml_string(api_key)}\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".config-")  # 0600 from its first byte
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return path


def _toml_string(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _checked_url(url: str, source: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number, a name that no server can have
        usable = False
    if not usable or not url.isprintable():
        raise ConfigError(f"{source}: `{url}` is not an address such as {DEFAULT_URL}")
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{source}: give scheme, host, port and path only; the key goes into EFT_API_KEY")
    return url.rstrip("/")
