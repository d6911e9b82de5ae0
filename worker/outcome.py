"""What the end of a child means: its exit status, its last word, and whether we had asked it to go."""

from __future__ import annotations

import signal
from typing import Any

from core.jobs.finish import Failed, HandedBack, Outcome, Succeeded
from core.spec.run import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_FENCED, EXIT_OK


def read(code: int, last: dict[str, Any] | None, *, asked: str | None, out_of_memory: bool) -> Outcome:
    """`last` is its result or error event, `asked` why it was told to go (None: it was not), `out_of_memory`
    whether the kernel's count of such kills has risen meanwhile.
    """
    kind = None if last is None else last["type"]
    match code:
        case 0 if last is not None and kind == "result":
            return Succeeded(last["result"], last.get("artifacts", ()))
        case 1 if last is not None and kind == "error":
            return Failed(last["failure"], last["code"], last["message"], last.get("field"))
        case _ if code == EXIT_CHECKPOINTED:
            return HandedBack(asked or "its process was told to stop by somebody else")
        case _ if code == EXIT_FENCED:
            return HandedBack("its worker had gone silent, so that the process ended itself")
        case _ if asked is not None:
            return HandedBack(asked)
        case _ if code == EXIT_OK:
            return Failed("internal", "no_result", "the process ended well but left no result; see the log")
        case _ if code == EXIT_FAILED:
            return Failed("internal", "crashed", "the process crashed without saying why; see the log")
        case _ if code == -signal.SIGKILL and out_of_memory:
            return Failed("machine", "host_out_of_memory", "the kernel killed the process: the box ran out of memory")
        case _ if code < 0:
            return Failed("machine", "killed", f"the process was ended by signal {_name(-code)}; see the log")
        case _:
            return Failed("internal", "crashed", f"the process ended with exit status {code}; see the log")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
