"""The loop of a session's child: one frame in, one frame out, until it is asked to leave."""

from __future__ import annotations

import select
import socket
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import save as tensors_to_bytes

from core.errors import EftError
from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.frames import Frame, FrameError, receive, send
from core.spec.run.orders import SessionOrder
from core.spec.session.verbs import OPERATION
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.base.reading import is_panic
from core.train.base.stop import Stop, StopRequested
from core.train.failures import describe
from core.train.model.compute import prepare_compute
from core.train.model.load import load_tokenizer
from core.train.run import Run
from core.train.session.examples import read_tensors
from core.train.session.faults import BadOperation
from core.train.session.resident import ResidentBase
from core.train.session.snapshots import load_snapshot, write_snapshot
from core.train.session.verbs import SessionVerbs

LOOK_SECONDS = 0.2
"""How often a waiting child looks whether it was asked to leave."""


def serve(run_dir: Path, stream: socket.socket, stop: Stop) -> int:
    """Compute what comes over `stream` until SIGTERM, or until its other end is closed; the exit code."""
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
    try:
        order = SessionOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events, stop) as run:
            _SessionLoop(run, order, stream).run()
    except StopRequested:
        return EXIT_CHECKPOINTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return tell_failure(error, events, describe(error, events.phase))
    finally:
        events.close()
    return EXIT_CHECKPOINTED


class _SessionLoop:
    def __init__(self, run: Run, order: SessionOrder, stream: socket.socket) -> None:
        self._run, self._stream = run, stream
        self._folder = Path(order.session_dir)
        run.phase("loading")
        compute = prepare_compute(run)
        with run.stop.at_once():
            run.check_stop()
            base = ResidentBase(run, compute, load_tokenizer(run.tokenizer_dir))
            self._verbs = SessionVerbs(
                base, self._folder, pass_tokens=order.pass_tokens, slots=order.slots, between=run.check_stop
            )
            self._position, faults = load_snapshot(self._folder, self._verbs)
        for fault in faults:
            run.notice("snapshot", f"a snapshot was set aside: {fault}")
        run.events.write("run_record", record=run.about() | compute.about() | base.engine.about())

    def run(self) -> None:
        """Answer operations. StopRequested leaves a snapshot behind; the end of the stream leaves none, since then
        nobody is there to whom anything was promised."""
        self._run.phase("serving")
        self._tell({"ready": True, "position": self._position, "models": list(self._verbs.adapters)})
        try:
            while (frame := self._next()) is not None:
                self._answer(frame)
        except StopRequested:
            write_snapshot(self._folder, self._verbs, self._position)
            raise
        except (FrameError, ConnectionError) as error:
            print(f"the stream of operations broke off: {error}", file=sys.stderr)

    def _next(self) -> Frame | None:
        while True:
            self._run.check_stop()
            readable, _, _ = select.select([self._stream], [], [], LOOK_SECONDS)
            if readable:
                return receive(self._stream)

    def _answer(self, frame: Frame) -> None:
        header = frame.header
        number = header.get("id")
        try:
            if "snapshot" in header:
                write_snapshot(self._folder, self._verbs, self._position)
                self._tell({"id": number, "ok": True, "result": {"position": self._position}})
                return
            operation = OPERATION.validate_python(header.get("op"))
            tensors = read_tensors(frame.body) if frame.body else {}
            self._verbs.exact = bool(header.get("exact"))
            result, found = self._verbs.do(operation, tensors, header.get("identity"))
            answer = Frame({"id": number, "ok": True, "result": result}, tensors_to_bytes(found) if found else b"")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"][1:])
            bad = BadOperation(f"{field or 'op'}: {first['msg']}", field=field or "op")
            answer = Frame({"id": number, "ok": False, "error": bad.as_dict()})
        except EftError as error:
            answer = Frame({"id": number, "ok": False, "error": error.as_dict()})
        if (position := header.get("position")) is not None:
            self._position = int(position)
        send(self._stream, answer)

    def _tell(self, header: dict[str, Any]) -> None:
        send(self._stream, Frame(header))
