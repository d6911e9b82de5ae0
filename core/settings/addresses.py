"""Addresses of servers and folders in settings: what may be written, and what a message may show of it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit


def expanded_path(path: str | Path) -> Path:
    """With the home folder of `~` or `~user` in its place. Raises ValueError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{Path(path).parts[0]} is not the home folder of a user here") from None


def scheme_of(url: str) -> str:
    """What a message may show of a URL, which may hold a password."""
    scheme = url.partition("://" if "://" in url else ":")[0][:40]
    return scheme.encode("ascii", "backslashreplace").decode()


def check_server(url: str, *, needs_host: bool) -> None:
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


def check_for_password(what: str, url: str) -> None:
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
