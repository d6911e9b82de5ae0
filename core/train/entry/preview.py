"""`python -m core.train.entry.preview RUN_DIR`: the child of a preview. Its order is a trainer's, its result the
document of core/train/data/preview.py. Needs no GPU and of the model only tokenizer and configuration. SIGTERM ends it
at once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from core.spec.axes.method import LowRank
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.__main__ import importing
from core.train.base import memory_limit
from core.train.base.log_lines import LogLines
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm, leave

TELL_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    run_dir = run_folder("core.train.entry.preview", "Look at how rows become tokens, without weights.", arguments)
    order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    arm(order.fence_seconds, held_at=order.held_at, on_stop=lambda: os._exit(EXIT_CHECKPOINTED))
    return _look(run_dir, order)


def _look(run_dir: Path, order: RunOrder) -> int:
    with importing():
        from core.train.base.disk import tell_failure
        from core.train.base.events import EventWriter
        from core.train.base.reading import is_panic
        from core.train.data.preview import preview
        from core.train.failures import describe
        from core.train.model.load import quiet
        from core.train.vocabulary.new_tokens import require_new
        from core.train.vocabulary.tokenizer import load_tokenizer

    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))

    last = time.monotonic()

    def told(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            events.write("progress", rows=done, total_rows=total)

    def notice(fault: str) -> None:
        events.write("notice", code="token_cache", message=fault)

    try:
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        events.write("phase", phase="loading")
        quiet()
        tokenizer = load_tokenizer(Path(order.tokenizer_dir or order.model_dir))
        if isinstance(order.spec.method, LowRank) and order.tokenizer_dir is None:
            require_new(tokenizer, order.spec.method.new_tokens)
        result = preview(order, tokenizer, told, notice)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return tell_failure(error, events, describe(error, events.phase))
    events.write("result", result=result, artifacts=[])
    return EXIT_OK


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
