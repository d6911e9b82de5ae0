"""The loop of the serving child: requests in, pieces of answers out, until it is asked to leave."""

from __future__ import annotations

import select
import socket
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from core.errors import EftError
from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.frames import Frame, FrameError, receive, send
from core.spec.run.orders import ServingOrder
from core.spec.serving.request import CompletionRequest
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.reading import is_panic
from core.train.base.stop import Stop, StopRequested
from core.train.failures import describe
from core.train.generation.generator import LastLogits
from core.train.generation.sampling import SamplingParams
from core.train.generation.slots import slot_attention
from core.train.model.compute import prepare_compute
from core.train.run import Run
from core.train.serving.answer import LiveAnswer, TextStream
from core.train.serving.lane import Lane, Piece, key_of
from core.train.serving.logprobs import prompt_logprobs
from core.train.serving.models import ServedModels
from core.train.serving.prompts import prompt_of, stop_tokens
from core.train.session.faults import BadOperation
from core.train.session.resident import ResidentBase
from core.train.vocabulary.tokenizer import load_tokenizer

LOOK_SECONDS = 0.1
"""How often a child that waits looks whether it was asked to leave."""


def serve(run_dir: Path, stream: socket.socket, stop: Stop) -> int:
    """Answer what comes over `stream` until SIGTERM, or until its other end is closed; the exit code."""
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
    try:
        order = ServingOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events, stop) as run:
            run.phase("loading")
            compute = prepare_compute(run)
            with run.stop.at_once():
                run.check_stop()
                base = ResidentBase(run, compute, load_tokenizer(run.tokenizer_dir))
            run.events.write("run_record", record=run.about() | compute.about() | base.engine.about())
            run.phase("serving")
            server = ServingLoop(ServedModels(base, order.adapters), order.slots, stream, run.check_stop)
            server.run()
    except StopRequested:
        return EXIT_CHECKPOINTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return tell_failure(error, events, describe(error, events.phase))
    finally:
        events.close()
    return EXIT_CHECKPOINTED


@dataclass
class _Told:
    """A request under way."""

    prompt_tokens: int
    left: int
    """Choices that have not ended."""
    tokens: int = 0


class ServingLoop:
    """Answers requests that come over a stream. `between` runs before each pass, and may raise to stop."""

    def __init__(self, models: ServedModels, slots: int, stream: socket.socket, between: Any) -> None:
        self._models, self._slots, self._stream, self._between = models, slots, stream, between
        self._base = models.base
        self._device = self._base.placement.device
        self._lanes: dict[str | None, Lane] = {}
        """Answers that are computed together; under an adapter's name those that can only be computed apart."""
        self._told: dict[str, _Told] = {}
        self._arrived: deque[tuple[str, CompletionRequest]] = deque()
        self._logits: LastLogits | None = None

    def run(self) -> None:
        """Until the other end is closed."""
        self._tell({"ready": True})
        try:
            while self._hear(LOOK_SECONDS):
                self._serve()
        except (FrameError, ConnectionError) as error:
            print(f"the stream of requests broke off: {error}", file=sys.stderr)

    # --- requests

    def _hear(self, seconds: float) -> bool:
        """Read what has come; False: the other end is closed. Waits `seconds` for the first frame."""
        self._between()
        while select.select([self._stream], [], [], seconds)[0]:
            frame = receive(self._stream)
            if frame is None:
                return False
            self._take(frame.header)
            seconds = 0.0
        return True

    def _take(self, header: dict[str, Any]) -> None:
        if "cancel" in header:
            number = str(header["cancel"])
            self._arrived = deque(one for one in self._arrived if one[0] != number)
            for lane in self._lanes.values():
                lane.leave(number)
            self._told.pop(number, None)
            return
        number = str(header["id"])
        try:
            self._arrived.append((number, CompletionRequest.model_validate(header["request"])))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            self._fail(number, BadOperation(f"{field}: {first['msg']}", field=field))

    def _serve(self) -> None:
        """Answer until nothing is left, or a model has to be loaded first."""
        self._admit()
        if not self._busy:
            return
        with self._base.engine.inference() as model, slot_attention(model):
            while self._busy and not self._arrived:
                for lane in list(self._lanes.values()):
                    self._step(lane)
                if not self._hear(0.0):
                    raise ConnectionError("its other end is closed")
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.busy}

    @property
    def _busy(self) -> bool:
        return any(lane.busy for lane in self._lanes.values())

    def _admit(self) -> None:
        """Let what has arrived join its lane."""
        while self._arrived:
            number, asked = self._arrived.popleft()
            self._between()
            try:
                self._start(number, asked)
            except EftError as error:
                self._fail(number, error)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._fail(number, BadOperation("out of memory while it was loaded", code="out_of_memory"))

    def _start(self, number: str, asked: CompletionRequest) -> None:
        models = self._models
        name = models.name(asked.adapter)
        if not models.has(name):
            assert asked.adapter is not None  # the base is always there
            models.load(asked.adapter, {used for lane in self._lanes.values() for used in lane.adapters})
        models.touch(name)
        tokenizer = models.tokenizer(asked.adapter)
        prompt = prompt_of(tokenizer, asked, self._base.vocabulary)
        longest = min(asked.most_tokens, self._base.longest or asked.most_tokens)
        left = longest - len(prompt)
        if left < 1 or (asked.max_tokens or 1) > left:
            wanted = f"and up to {asked.max_tokens} were asked for" if asked.max_tokens and left >= 1 else ""
            words = f"prompt and answer may have {longest} tokens together; the prompt has {len(prompt)} {wanted}"
            raise BadOperation(
                words.strip(), field="messages" if left < 1 else "max_tokens", code="context_length_exceeded"
            )
        stops = stop_tokens(tokenizer, self._base.model)
        params = SamplingParams(asked.max_tokens or left, asked.temperature, asked.top_p, stop_token_ids=stops)
        answers = [
            LiveAnswer(
                number,
                index,
                name,
                prompt,
                params,
                key_of(asked.seed, index),
                TextStream(tokenizer, asked.stop),
                asked.logprobs,
            )
            for index in range(asked.n)
        ]
        self._told[number] = _Told(len(prompt), asked.n)
        if asked.echo:
            self._echo(number, asked, answers, tokenizer.decode(prompt, skip_special_tokens=True))
        if (why := self._base.engine.without_slots(answers[0].room)) is not None:
            print(f"{number}: answered whole, since {why}", file=sys.stderr)
            self._whole(number, asked, answers)
            return
        lane = self._lane(None if models.mixes(name) else name)
        for answer in answers:
            lane.join(answer)

    def _echo(self, number: str, asked: CompletionRequest, answers: list[LiveAnswer], text: str) -> None:
        """Tell the prompt as the beginning of each answer, with the log-probabilities of its tokens where asked."""
        told: list[dict[str, Any]] = []
        if asked.logprobs is not None:
            first = answers[0]
            with self._base.engine.inference(), self._models.computing([first.adapter]):
                for one in prompt_logprobs(self._last_logits(), first.prompt, asked.logprobs, self._device):
                    told.append({"text": "", "logprobs": self._worded(one)})
        pieces = [{"text": text}, *told]
        self._tell({"id": number, "pieces": [{"index": answer.index} | one for answer in answers for one in pieces]})

    def _lane(self, key: str | None) -> Lane:
        if key not in self._lanes:
            self._lanes[key] = Lane(self._last_logits(), self._models.computing, self._slots, self._device)
        return self._lanes[key]

    def _last_logits(self) -> LastLogits:
        if self._logits is None:
            engine = self._base.engine
            with engine.inference() as model:
                self._logits = LastLogits(model, engine.policy.head(), self._slots)
        return self._logits

    # --- answers

    def _step(self, lane: Lane) -> None:
        try:
            self._pieces(lane.step())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for number in list(self._told):  # what is under way shares the memory
                for other in self._lanes.values():
                    other.leave(number)
                self._fail(number, BadOperation("out of memory: ask for less at a time", code="out_of_memory"))

    def _whole(self, number: str, asked: CompletionRequest, answers: list[LiveAnswer]) -> None:
        """Answers of a model whose attention has no form for slots: by transformers' own loop, told at their end."""
        first = answers[0]
        with self._models.computing([first.adapter]):
            (found,) = self._base.engine.complete(
                [first.prompt],
                [[answer.key for answer in answers]],
                first.params,
                slots=self._slots,
                between=self._between,
            )
        for answer, one in zip(answers, found, strict=True):
            pieces = []
            for token, logprob in zip(one.tokens, one.logprobs, strict=True):
                told = None if asked.logprobs is None else {"token": token, "logprob": logprob, "top": []}
                pieces.append(Piece(answer, answer.add(token), told))
                if answer.finish_reason is not None:
                    break
            self._pieces(pieces)

    def _pieces(self, pieces: Iterable[Piece]) -> None:
        """Tell what one pass has added."""
        told: dict[str, list[dict[str, Any]]] = {}
        ended: list[str] = []
        for piece in pieces:
            answer = piece.answer
            state = self._told[answer.request]
            state.tokens += 1
            one: dict[str, Any] = {"index": answer.index, "text": piece.text}
            if piece.logprobs is not None:
                one["logprobs"] = self._worded(piece.logprobs)
            if answer.finish_reason is not None:
                one["finish_reason"] = answer.finish_reason
                state.left -= 1
                if not state.left:
                    ended.append(answer.request)
            if piece.text or len(one) > 2:
                told.setdefault(answer.request, []).append(one)
        for number, some in told.items():
            self._tell({"id": number, "pieces": some})
        for number in ended:
            state = self._told.pop(number)
            self._tell(
                {"id": number, "done": {"prompt_tokens": state.prompt_tokens, "completion_tokens": state.tokens}}
            )

    def _worded(self, told: dict[str, Any]) -> dict[str, Any]:
        """Log-probabilities with the texts of their tokens."""

        def word(token: int) -> str:
            return str(self._base.tokenizer.decode([token]))

        if (top := told["top"]) is not None:
            top = [{"token": word(token), "logprob": value} for token, value in top]
        return {"token": word(told["token"]), "id": told["token"], "logprob": told["logprob"], "top": top}

    def _fail(self, number: str, error: EftError) -> None:
        self._told.pop(number, None)
        self._tell({"id": number, "error": error.as_dict()})

    def _tell(self, header: dict[str, Any]) -> None:
        send(self._stream, Frame(header))
