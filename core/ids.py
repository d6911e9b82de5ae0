"""Identifiers that sort by time of creation: `job-` + 26 characters (a ULID in lower case)."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """48 bits of milliseconds, 80 random bits, in Crockford's base 32 (https://github.com/ulid/spec)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = [_ALPHABET[(value >> shift) & 31] for shift in range(125, -5, -5)]
    return f"{prefix}-{''.join(digits)}"


def made_at(name: str) -> float:
    """Seconds since 1970 at which an id of `new_id` was made, by the clock of the machine that made it."""
    value = 0
    for digit in name.rpartition("-")[2]:
        value = value << 5 | _ALPHABET.index(digit)
    return (value >> 80) / 1000
