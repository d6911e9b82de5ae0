"""The loop of a session's child: one frame in, one frame out, until it is asked to leave. Other sessions of the same
base may join the one that it was started for."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from core.errors import EftError
from core.spec.axes.method import Full
from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.frames import Frame, FrameError, receive, send
from core.spec.run.orders import SessionOrder
from core.spec.session.verbs import OPERATION, Generate, Verbs
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter, NullEventWriter
from core.train.base.log_lines import LogLines
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.reading import is_panic
from core.train.base.stop import Stop, StopRequested
from core.train.failures import describe
from core.train.generation.sampling import Completion
from core.train.kernels.float32 import through_float32
from core.train.model.compute import Compute, prepare_compute
from core.train.ranks.env import RankEnv
from core.train.ranks.last_word import tell_launcher
from core.train.run import Run
from core.train.session.answers import Answer, PlannedDraw
from core.train.session.examples import read_tensors
from core.train.session.faults import BadOperation
from core.train.session.ranks.crew import Crew
from core.train.session.resident import ResidentBase
from core.train.session.sampling import SharedSampler
from core.train.session.shelf import RESIDENT, Shelf
from core.train.session.snapshots import load_snapshot, write_snapshot
from core.train.session.verbs import SessionVerbs
from core.train.vocabulary.tokenizer import load_tokenizer

LOOK_SECONDS = 0.2
"""How often a waiting child looks whether it was asked to leave."""
RECORD_SECONDS = 5.0
"""How long a child that leaves waits for its worker to write down what it has answered."""


def serve(run_dir: Path, stream: socket.socket | None, stop: Stop, rank_env: RankEnv | None = None) -> int:
    """Compute what comes over `stream` until SIGTERM, or until its other end is closed; the exit code. `rank_env`:
    which of several ranks this process is; all but the first have no stream, and compute what that lets them hear."""
    first = rank_env is None or rank_env.rank == 0
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout)) if first else NullEventWriter()
    try:
        order = SessionOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events, stop, rank_env) as run:
            run.phase("loading")
            compute = prepare_compute(run)
            with through_float32(compute.products):
                loop = _SessionLoop(run, order, compute)
                if stream is None:
                    loop.follow()
                else:
                    loop.run(stream)
    except StopRequested:
        return EXIT_CHECKPOINTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        payload = describe(error, events.phase)
        if rank_env is not None:
            return tell_launcher(error, rank_env, events, payload)
        return tell_failure(error, events, payload)
    finally:
        events.close()
    return EXIT_CHECKPOINTED


@dataclass(slots=True)
class _Resident:
    """A session in this process."""

    verbs: SessionVerbs
    folder: Path
    position: int = 0
    """Position of the operation that was computed last."""
    recorded: int = 0
    """Position up to which the worker has written answers down. A snapshot beyond it would lose an answer: nobody would
    compute its operation again."""

    def weights(self) -> dict[str, Tensor]:
        """What it trains, by model and name."""
        return {
            f"{model}/{name}": parameter
            for model, adapter in self.verbs.adapters.items()
            for name, parameter in adapter.engine.trained_parameters.items()
        }


@dataclass(slots=True)
class _Asked:
    """A frame that draws answers."""

    resident: _Resident
    frame: Frame
    plan: PlannedDraw | ValidationError | EftError
    """Or what is wrong with it."""


class _SessionLoop:
    """Operations of one session, and of others that join it on the same base. Only one is computed at a time, and each
    session has adapters, windows and random state of its own: what it comes to is what it comes to alone.

    Of several ranks each has a loop like this one. The first `run`s, and the others `follow` it: they compute each
    frame that it computes, in the same order, since every rank has a share of all passes.
    """

    def __init__(self, run: Run, order: SessionOrder, compute: Compute) -> None:
        self._run, self._order = run, order
        self._stream: socket.socket
        with run.stop.at_once():
            run.check_stop()
            whole = isinstance(order.spec.method, Full)
            self._base = ResidentBase(run, compute, load_tokenizer(run.tokenizer_dir), whole=whole)
            self._crew, self._shelf = Crew(run.ranks), Shelf(self._base)
            self._sampler = SharedSampler(self._base, order.slots, run.check_stop)
            self._seats = 0
            self._own = self._seated(Path(order.session_dir))
        self._sessions = {order.job_id: self._own}
        self._waiting: dict[str, deque[Frame]] = {}
        """Frames by their session, the one first whose turn it is."""
        run.events.write("run_record", record=run.about() | compute.about() | self._base.engine.about())

    def _seated(self, folder: Path) -> _Resident:
        """A session as its newest snapshot has it."""
        verbs = SessionVerbs(
            self._base,
            self._shelf,
            self._sampler,
            folder,
            seat=self._seats,
            pass_tokens=self._order.pass_tokens,
            between=self._run.check_stop,
        )
        self._seats += 1
        try:
            with self._run.ranks.rank_zero_first():  # which sets broken ones aside
                position, faults = load_snapshot(folder, verbs)
        except BaseException:
            verbs.leave()
            raise
        self._crew.one_position(position)
        for fault in faults:
            self._run.notice("snapshot", f"a snapshot was set aside: {fault}")
        return _Resident(verbs, folder, position, position)

    def run(self, stream: socket.socket) -> None:
        """Answer operations. StopRequested leaves snapshots behind, of sessions whose answers are all written down; the
        end of the stream leaves none, since then nobody is there to whom anything was promised."""
        self._stream = stream
        self._run.phase("serving")
        self._tell({"ready": True, "position": self._own.position, "models": list(self._own.verbs.adapters)})
        try:
            while self._hear():
                self._turn()
        except StopRequested:
            self._await_records()
            for session_id, one in self._sessions.items():
                if one.position <= one.recorded:
                    self._snapshot(session_id)
                else:
                    print(f"{session_id}: no snapshot, since the answer to {one.position} is not written down")
            self._crew.tell({"end": True})
            raise
        except (FrameError, ConnectionError) as error:
            print(f"the stream of operations broke off: {error}", file=sys.stderr)
            return  # the launcher ends the other ranks, wherever they are
        self._crew.tell({"end": True})

    def follow(self) -> None:
        """Compute what the first rank computes, until it ends. A wish to stop is the first rank's to answer, once the
        operation has been left on all of them."""
        self._run.phase("serving")
        taken: list[_Asked] = []
        while "end" not in (frame := self._crew.hear()).header:
            with suppress(StopRequested):
                if "snapshot" in frame.header:
                    self._crew.check_in_sync(self._sessions[self._whose(frame)].weights())
                elif "draw" in frame.header:
                    drawn, taken = taken, []
                    for _ in self._drawn_together(drawn):
                        pass
                elif _draws(frame):
                    taken.append(self._planned(frame))
                else:
                    self._computed(frame)
                continue
            taken = []

    def _snapshot(self, session_id: str) -> int:
        """Write a session down; its position."""
        one = self._sessions[session_id]
        self._crew.tell({"snapshot": True, "session": session_id})
        self._crew.check_in_sync(one.weights())
        write_snapshot(one.folder, one.verbs, one.position)
        return one.position

    def _hear(self) -> bool:
        """Read what has come, and wait for it where there is nothing to do; False: the other end is closed."""
        while True:
            self._run.check_stop()
            readable, _, _ = select.select([self._stream], [], [], 0.0 if self._waiting else LOOK_SECONDS)
            if not readable and self._waiting:
                return True
            if readable:
                if (frame := receive(self._stream)) is None:
                    return False
                if not self._recorded(frame):
                    self._waiting.setdefault(self._whose(frame), deque()).append(frame)

    def _recorded(self, frame: Frame) -> bool:
        """Whether this frame says that answers of a session are written down."""
        if (position := frame.header.get("recorded")) is None:
            return False
        if (one := self._sessions.get(self._whose(frame))) is not None:
            one.recorded = int(position)
        return True

    def _await_records(self) -> None:
        """Wait a moment for the word that the last answers are written down. Whatever else comes is left undone."""
        until = time.monotonic() + RECORD_SECONDS
        with suppress(FrameError, ConnectionError):
            while any(one.position > one.recorded for one in self._sessions.values()):
                readable, _, _ = select.select([self._stream], [], [], max(0.0, until - time.monotonic()))
                if not readable or (frame := receive(self._stream)) is None:
                    return
                self._recorded(frame)

    def _whose(self, frame: Frame) -> str:
        return str(frame.header.get("session", self._order.job_id))

    def _turn(self) -> None:
        """Answer one frame of the session whose turn it is. Where it draws answers, those that others ask for at the
        time, or the session next, are drawn in the same batch."""
        session_id = next(iter(self._waiting))
        frame = self._take(session_id)
        if session_id in self._waiting:
            self._waiting[session_id] = self._waiting.pop(session_id)  # behind the others
        if _draws(frame):
            self._draw(frame)
        else:
            self._answer(frame)

    def _take(self, session_id: str) -> Frame:
        frame = self._waiting[session_id].popleft()
        if not self._waiting[session_id]:
            del self._waiting[session_id]
        return frame

    def _draw(self, first: Frame) -> None:
        """Answer a frame that draws, and others beside it as long as slots are free, one of each session in turn."""
        taken = [self._planned(self._heard(first))]
        more = True
        while more:
            more = False
            for session_id in [*self._waiting]:
                if self._fits(self._waiting[session_id][0], taken):
                    taken.append(self._planned(self._heard(self._take(session_id))))
                    more = True
        self._crew.tell({"draw": True})
        for one, answer in self._drawn_together(taken):
            self._reply(one.resident, one.frame, answer)

    def _heard(self, frame: Frame) -> Frame:
        """A frame, once all ranks know that it is the next one."""
        self._crew.tell(frame.header, frame.body)
        return frame

    def _drawn_together(self, taken: list[_Asked]) -> Iterator[tuple[_Asked, Frame]]:
        """What frames that draw come to, one after the other."""
        mixed = [one for one in taken if isinstance(one.plan, PlannedDraw) and one.plan.mixes]
        together: dict[int, list[list[Completion]]] = {}
        if len(mixed) > 1:
            try:
                plans = [one.plan for one in mixed if isinstance(one.plan, PlannedDraw)]
                found = mixed[0].resident.verbs.answers.together(plans)
                together = {id(one): answers for one, answers in zip(mixed, found, strict=True)}
            except Exception as error:
                if not is_out_of_memory(error):
                    raise  # each is tried by itself
        for one in taken:
            yield one, self._drawn(one, together.get(id(one)))

    def _fits(self, frame: Frame, taken: list[_Asked]) -> bool:
        """Whether a frame may be answered in one batch with others."""
        plans = [one.plan for one in taken if isinstance(one.plan, PlannedDraw)]
        if not _draws(frame) or sum(plan.draw.answers for plan in plans) >= self._sampler.slots:
            return False
        folders = {plan.asked.folder for plan in plans} | {frame.header["op"].get("folder")}
        return len(folders - {None}) <= RESIDENT

    def _planned(self, frame: Frame) -> _Asked:
        one = self._sessions[self._whose(frame)]
        try:
            operation, tensors = _read(frame)
            assert isinstance(operation, Generate)
            one.verbs.exact = bool(frame.header.get("exact"))
            return _Asked(one, frame, one.verbs.guarded(lambda: one.verbs.answers.plan(operation, tensors)))
        except (ValidationError, EftError) as error:
            return _Asked(one, frame, error)

    def _drawn(self, asked: _Asked, answers: list[list[Completion]] | None) -> Frame:
        plan, verbs = asked.plan, asked.resident.verbs

        def compute() -> Answer:
            if not isinstance(plan, PlannedDraw):
                raise plan
            return verbs.answers.one(plan) if answers is None else verbs.answers.told(plan, answers)

        return _answer_of(asked.frame, lambda: verbs.guarded(compute))

    def _answer(self, frame: Frame) -> None:
        header = frame.header
        number, session_id = header.get("id"), self._whose(frame)
        if "join" in header:
            self._tell({"id": number} | self._join(session_id, Path(header["join"])))
            return
        if "leave" in header or "snapshot" in header:
            one = self._sessions[session_id]
            position = self._snapshot(session_id) if one.position <= one.recorded else one.recorded
            if "leave" in header:
                self._sessions.pop(session_id).verbs.leave()
            self._tell({"id": number, "ok": True, "result": {"position": position}})
            return
        self._reply(self._sessions[session_id], frame, self._computed(self._heard(frame)))

    def _computed(self, frame: Frame) -> Frame:
        """What an operation that draws nothing came to, or what was wrong with it."""
        verbs = self._sessions[self._whose(frame)].verbs

        def compute() -> Answer:
            verbs.exact = bool(frame.header.get("exact"))
            return verbs.do(*_read(frame), frame.header.get("identity"))

        return _answer_of(frame, compute)

    def _reply(self, one: _Resident, frame: Frame, answer: Frame) -> None:
        if (position := frame.header.get("position")) is not None:
            one.position = int(position)
        send(self._stream, answer)

    def _join(self, session_id: str, folder: Path) -> dict[str, Any]:
        """Bring a session onto the base, or say why it cannot be."""
        try:
            joined = self._sessions[session_id] = self._seated(folder)
        except EftError as error:
            return {"ok": False, "error": error.as_dict()}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            words = "the adapters of the session do not fit beside those of the others"
            return {"ok": False, "error": BadOperation(words, code="out_of_memory").as_dict()}
        return {"ok": True, "result": {"position": joined.position, "models": list(joined.verbs.adapters)}}

    def _tell(self, header: dict[str, Any]) -> None:
        send(self._stream, Frame(header))


def _answer_of(frame: Frame, compute: Callable[[], Answer]) -> Frame:
    """What an operation came to, or what was wrong with it."""
    number = frame.header.get("id")
    try:
        result, found = compute()
        return Frame({"id": number, "ok": True, "result": result}, tensors_to_bytes(found) if found else b"")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        bad = BadOperation(f"{field or 'op'}: {first['msg']}", field=field or "op")
        return Frame({"id": number, "ok": False, "error": bad.as_dict()})
    except EftError as error:
        return Frame({"id": number, "ok": False, "error": error.as_dict()})


def _draws(frame: Frame) -> bool:
    operation = frame.header.get("op")
    return isinstance(operation, dict) and operation.get("op") == "generate"


def _read(frame: Frame) -> tuple[Verbs, dict[str, Tensor]]:
    """Raises ValidationError and BadOperation."""
    return OPERATION.validate_python(frame.header.get("op")), read_tensors(frame.body) if frame.body else {}
