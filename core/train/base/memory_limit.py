"""No more memory than a process was given: RLIMIT_DATA (setrlimit(2)), which counts private memory that may be written.

The limit on address space would be wrong, since torch maps far more than it ever touches. What a process has when the
limit is set does not count. Allocations beyond it fail as those of a full box do, and in this process alone.
"""

from __future__ import annotations

import resource
from pathlib import Path

from core.spec.run.orders import MemoryLimit

_limit: MemoryLimit | None = None
_of_helpers: MemoryLimit | None = None


def hold(limit: MemoryLimit | None, *, of_helpers: MemoryLimit | None = None) -> None:
    """From now on; None: no limit, or none that this kernel can keep. `of_helpers`: what the processes get that this
    one starts beside itself."""
    global _limit, _of_helpers
    before, _limit, _of_helpers = _limit, limit, of_helpers
    has = data_bytes()
    if has is not None and (before, limit) != (None, None):  # what others have set is left alone
        _set(None if limit is None else has + limit.bytes)


def allow_more(count: int) -> None:
    """Raise it by as many bytes, for work whose size is known only now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if _limit is not None and soft != resource.RLIM_INFINITY:
        _set(soft + count)


def of_helpers() -> MemoryLimit | None:
    return _of_helpers


def words() -> str | None:
    """What holds this process; None: nothing but the box."""
    if _limit is None:
        return None
    return f"this process may take {_limit.bytes / 1e9:.3g} GB beyond what it starts with ({_limit.setting})"


def ways() -> str:
    """The way out of a want of memory that smaller batches would not help."""
    held = words()
    return f"{held}; raise that setting, or take a smaller model" if held else "take a smaller model"


def data_bytes() -> int | None:
    """What counts already (proc_pid_status(5), VmData); None where the kernel is not Linux."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _set(most: int | None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = resource.RLIM_INFINITY if most is None else most
    if hard != resource.RLIM_INFINITY and (most is None or soft > hard):
        soft = hard
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
