"""Identifiers that sort by time of creation: `job-` + 26 characters (a ULID in lower case)."""

from __future__ import annotations

import secrets
import threading
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """48 bits of milliseconds, 80 of chance, in Crockford's base 32 (https://github.com/ulid/spec). Those that a
    process makes in one millisecond sort as they were made, too: each is a little more than the last."""
    global _last
    with _lock:
        value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(79)
        if value >> 80 == _last >> 80:
            value = _last + 1 + secrets.randbits(48)
        _last = value
    digits = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -5, -5)]
    return f"{prefix}-{''.join(digits)}"


def made_at(name: str) -> float:
    """Seconds since 1970 at which an id of `new_id` was made, by the clock of the machine that made it."""
    value = 0
    for digit in name.rpartition("-")[2]:
        value = value << 5 | _ALPHABET.index(digit)
    return (value >> 80) / 1000
