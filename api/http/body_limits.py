"""How often somebody may ask: token buckets in the memory of this API process, so N processes allow N times as much."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from api.errors import RateLimited
from core.settings import Settings

REMEMBERED = 10_000
"""Buckets kept; the one that was not used for the longest time is forgotten, and begins full when it comes back."""


class Buckets:
    """One bucket a name: it holds `burst` tokens and gets `per_minute` more a minute. Thread-safe. 0: no limit."""

    def __init__(self, per_minute: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._burst = float(max(1, burst))
        self._clock = clock
        self._lock = threading.Lock()
        self._full: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Name → (tokens, when that was so), the longest unused first."""

    def take(self, name: str) -> float:
        """Take one token: 0, or the seconds until there is one."""
        with self._lock:
            tokens, now = self._tokens(name)
            if tokens < 1:
                return (1 - tokens) / self._rate
            self._keep(name, tokens - 1, now)
            return 0.0

    def wait(self, name: str) -> float:
        """What `take` would answer."""
        with self._lock:
            tokens, _ = self._tokens(name)
            return 0.0 if tokens >= 1 else (1 - tokens) / self._rate

    def forget(self, name: str) -> None:
        with self._lock:
            self._full.pop(name, None)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._full

    def _tokens(self, name: str) -> tuple[float, float]:
        now = self._clock()
        if not self._rate or name not in self._full:
            return self._burst, now
        tokens, then = self._full[name]
        return min(self._burst, tokens + (now - then) * self._rate), now

    def _keep(self, name: str, tokens: float, now: float) -> None:
        self._full[name] = (tokens, now)
        self._full.move_to_end(name)
        if len(self._full) > REMEMBERED:
            self._full.popitem(last=False)


KEYS_OF_A_USER = 3
"""All keys of one user together may send as much as so many keys: making more of them gains nothing."""


class RequestLimits:
    """Requests of one key and of one user, and from one address those without a good key and those that need none."""

    def __init__(self, settings: Settings) -> None:
        self._keys = Buckets(settings.rate_per_minute, settings.rate_burst)
        self._users = Buckets(settings.rate_per_minute * KEYS_OF_A_USER, settings.rate_burst * KEYS_OF_A_USER)
        self._strangers = Buckets(settings.rate_strangers_per_minute, int(settings.rate_strangers_per_minute))
        self._public = Buckets(settings.rate_public_per_minute, int(settings.rate_public_per_minute))

    def public(self, address: str) -> None:
        """A request that needs no key. Raises RateLimited."""
        if wait := self._public.take(network_of(address)):
            raise _limited("too many requests without an API key from your address", wait)

    def before(self, credentials: str | None, address: str) -> None:
        """Before a key is looked up. An address that has sent too many wrong ones is not told of the next whether it is
        right; a key that worked here lately is let through, whoever else sits behind the same address.
        """
        if credentials is not None and _name(credentials) in self._keys:
            return
        if wait := self._strangers.wait(network_of(address)):
            raise _limited("too many requests without a valid API key from your address", wait)

    def stranger(self, credentials: str | None, address: str) -> None:
        """The key was wrong, or there was none."""
        if credentials is not None:  # it may have been right before it was revoked
            self._keys.forget(_name(credentials))
        self._strangers.take(network_of(address))

    def known(self, credentials: str, user_id: str) -> None:
        """The key was right, and this user's. Raises RateLimited when either asks too often."""
        if wait := self._keys.take(_name(credentials)):
            raise _limited("too many requests with this API key", wait)
        if wait := self._users.take(user_id):
            raise _limited("too many requests with all of your API keys together", wait)


def _limited(what: str, wait: float) -> RateLimited:
    seconds = max(1, math.ceil(wait))
    return RateLimited(f"{what}; ask again in {seconds} s", retry_after=seconds)


def _name(credentials: str) -> str:
    """Not the key itself: no secret stays in memory for longer than its request."""
    return hashlib.sha256(credentials.encode()).hexdigest()


def network_of(address: str) -> str:
    """An IPv6 subscriber has a /64 of addresses, so that counts as one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket has no address
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
