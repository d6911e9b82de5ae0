"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_limit() -> int:
    """Raise this process's limit of open descriptors as far as it may without being root. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the kernel's own bound (fs.nr_open) may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
