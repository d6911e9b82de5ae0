"""What the end of a child means: its exit status, its last word, and whether we had asked it to go."""

from __future__ import annotations

import re
import signal
from typing import Any

from core.jobs.lifecycle.finish import Failed, NoRoom, Outcome, Requeued, Succeeded
from core.plan.steps import BATCH
from core.spec.run.exit_codes import (
    EXIT_CHECKPOINTED,
    EXIT_DATA_ROOT_LOST,
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_NO_SPACE,
    EXIT_OK,
)

NO_MEMORY = re.compile(r"memory allocation of \d+ bytes failed|std::bad_alloc")
"""How libraries in Rust and C++ say it before they abort."""
CRASHES = {
    signal.SIGSEGV: ("segfault", "it crashed in native code (SIGSEGV, a bad memory access)"),
    signal.SIGBUS: ("bus_error", "it crashed (SIGBUS): a mapped file was cut off, or /dev/shm or a disk is full"),
    signal.SIGILL: ("illegal_instruction", "it used an instruction that this processor does not have (SIGILL)"),
    signal.SIGFPE: ("arithmetic", "it crashed in native arithmetic (SIGFPE)"),
    signal.SIGABRT: ("aborted", "a library aborted the process (SIGABRT), as GPU drivers do after a fault"),
    signal.SIGKILL: ("killed", "it was killed from outside (SIGKILL); the box did not run out of memory"),
    signal.SIGTERM: ("terminated", "it got SIGTERM before it could handle it"),
}
"""Faults of the box as far as anybody can know: a GPU, a driver, memory or a person. (code, words)."""


def read(
    code: int,
    last: dict[str, Any] | None,
    *,
    asked: str | None,
    out_of_memory: bool,
    hung: str | None = None,
    batch_helps: bool = False,
    last_words: str = "",
) -> Outcome:
    """`last` is its result or error event, `asked` why it was told to go (None: it was not), `out_of_memory`
    whether the kernel's count of such kills has risen meanwhile, `hung` that it was killed for its silence, in words,
    `batch_helps` whether its batches lay in the memory of the box, `last_words` the end of its log.
    """
    kind = None if last is None else last["type"]
    match code:
        case 0 if last is not None and kind == "result":
            return Succeeded(last["result"], last.get("artifacts", ()))
        case 1 if last is not None and kind == "error":
            return Failed(last["failure"], last["code"], last["message"], last.get("field"))
        case _ if code == EXIT_NO_SPACE:
            if last is None or kind != "error":
                return NoRoom("no space left on the disk, not even for the error")
            return NoRoom(last["message"], last.get("needs_bytes"))
        case _ if code == EXIT_DATA_ROOT_LOST:
            words = "the folder of its run is gone: the data root was unmounted, moved or deleted; bring it back"
            return Failed("machine", "data_root_lost", f"{words} (`eft doctor` of that box looks for it)")
        case _ if code == EXIT_CHECKPOINTED:
            return Requeued(asked or "its process was stopped from outside")
        case _ if code == EXIT_FENCED:
            return Requeued("its worker fell silent, so the process ended itself")
        case _ if hung is not None:
            return Failed("machine", "hung", f"{hung}; the stacks of its threads are in its log")
        case _ if code == -signal.SIGKILL and out_of_memory:
            return _box_out_of_memory(batch_helps)
        case _ if code == -signal.SIGABRT and NO_MEMORY.search(last_words):
            words = "a library could not allocate memory and aborted (SIGABRT): the process reached its limit"
            return Failed("memory", "memory_limit", f"{words} (EFT_PREPARE_BYTES, EFT_CPU_SLOT_BYTES); see the log")
        case _ if asked is not None:
            return Requeued(asked)
        case _ if code == EXIT_OK:
            return Failed("internal", "no_result", "the process ended normally but left no result; see the log")
        case _ if code == EXIT_FAILED:
            return Failed("internal", "crashed", "the process crashed without saying why; see the log")
        case _ if code < 0:
            name, words = _crash(-code)
            return Failed("machine", name, f"{words}; see the log")
        case _:
            return Failed("internal", "crashed", f"the process ended with exit status {code}; see the log")


def _box_out_of_memory(batch_helps: bool) -> Failed:
    """On a CPU the batches of a training step are in the box's memory, so smaller ones need less. While a model is
    loaded, and beside a GPU, they are not: then somebody else may have taken the memory, and trying again may help."""
    if batch_helps:
        words = "the kernel killed the process while training: the box ran out of memory"
        return Failed("memory", "host_out_of_memory", words, BATCH)
    words = "the kernel killed the process: the box ran out of memory, where smaller batches would not have helped"
    return Failed("machine", "host_out_of_memory", words)


def _crash(number: int) -> tuple[str, str]:
    """Code and words for a deadly signal."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return "killed", f"it was ended by signal {number}"
    return CRASHES.get(known, ("killed", f"it was ended by {known.name}"))
