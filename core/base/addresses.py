"""Where requests to URLs of users may go: public addresses, and what a setting names.

Whoever may name a URL could otherwise have this box ask its neighbours, itself, or a cloud's metadata service.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup = Callable[..., Sequence[tuple[Any, ...]]]
"""`socket.getaddrinfo`."""

WEBHOOKS, REWARDS = "EFT_WEBHOOK_ALLOW", "EFT_REWARD_ALLOW"
"""Settings that name more hosts and networks."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: the last four bytes are the IPv4 address that is reached."""
NEVER = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # RFC 6598, between a provider and its customers
        "192.0.0.0/24",
        "192.88.99.0/24",  # RFC 7526
        "64:ff9b:1::/48",  # RFC 8215
        "2001::/23",  # RFC 2928, with Teredo in it, which carries an IPv4 address
        "2002::/16",  # RFC 3056, 6to4, the same
        "fec0::/10",  # RFC 3879
        "3fff::/20",  # RFC 9637
        "5f00::/16",  # RFC 9602
    )
)
"""Not public, whatever the version of Python's own table says."""


class NotAllowed(Exception):
    """A target that nothing must be sent to. Its words are for whoever named it."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A URL in its parts."""

    secure: bool
    host: str
    port: int
    path: str
    """With its query."""

    @property
    def origin(self) -> str:
        """All of a URL that is no secret: a chat's webhooks have theirs in the path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == (443 if self.secure else 80) else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{host}{port}"


def parse(url: str) -> HttpTarget:
    """Raises NotAllowed for what is no plain http(s) URL."""
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise NotAllowed("a URL has printable ASCII characters; write other names as `xn--…`")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAllowed(f"this is not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise NotAllowed("the URL must begin with `http://` or `https://`")
    if not parts.hostname or "%" in parts.hostname:
        raise NotAllowed("the URL names no host")
    if parts.username is not None or parts.password is not None:
        raise NotAllowed("leave user and password out of the URL; it is stored and shown")
    if parts.fragment:
        raise NotAllowed("leave the part behind `#` out of the URL; it is never sent")
    secure = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return HttpTarget(secure, parts.hostname.rstrip("."), port or (443 if secure else 80), path)


def resolve(
    target: HttpTarget, allow: Sequence[str], lookup: Lookup = socket.getaddrinfo, *, setting: str = WEBHOOKS
) -> list[tuple[int, Any]]:
    """(family, socket address) of each address that the host has now; to these and no others it is connected then.
    `allow`: what the setting of that name says.

    Raises NotAllowed when one of them is not to be reached, and OSError when there is none.
    """
    found = lookup(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))
    if not addresses:
        raise OSError("the name has no address")
    if target.host.lower() not in allow:
        for _, address in addresses:
            if not permitted(ipaddress.ip_address(str(address[0]).partition("%")[0]), allow):
                raise NotAllowed(
                    f"`{target.host}` is not a public address; the administrator can allow it with {setting}"
                )
    return addresses


def permitted(address: IPAddress, allow: Sequence[str] = ()) -> bool:
    """Public, or in one of the networks of `allow`."""
    inner = _inner(address)
    for part in allow:
        try:
            network = ipaddress.ip_network(part)
        except ValueError:
            continue  # a name
        if inner.version == network.version and inner in network:
            return True
    if any(inner.version == network.version and inner in network for network in NEVER):
        return False
    return inner.is_global and not (inner.is_multicast or inner.is_reserved or inner.is_unspecified)


def _inner(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
