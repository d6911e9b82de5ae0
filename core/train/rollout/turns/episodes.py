"""Episodes: turns of the model and of an environment, one after the other.

What an environment says is a function of the row and of the answers so far, and which tokens the model draws is one of
(seed, rollout, prompt, sample, turn, place). So an episode that was interrupted is played again with the same tokens,
and nothing of an environment is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.rollout.environment import EnvironmentArm, GameEnvironment, PythonEnvironment, TaskEnvironment
from core.spec.axes.rollout.reward import TaskReward
from core.train.generation.sampling import Completion, Key
from core.train.rollout.sandboxed.programs import AnsweredPrompt, AnswerFault, number_of, values_of
from core.train.rollout.sandboxed.tasks import GAMES
from core.train.rollout.turns.replies import ENVIRONMENT, MODEL, Replies

PROGRAM = (Path(__file__).parent.parent / "sandboxed" / "episode_program.py").read_text(encoding="utf-8")
GAME_SECONDS = 60.0
"""Time of the games for one turn of all episodes."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What was written behind a prompt: one answer of the model, or several with replies in between."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token at its draw; 0 of tokens of replies."""
    finished: bool
    """It ended by itself, and was not cut off."""
    learned: list[bool]
    """Which tokens are the model's."""
    last: list[int]
    """Tokens of the model's last turn, which rewards read."""
    turns: list[tuple[str, str]] = field(default_factory=list)
    """(MODEL or ENVIRONMENT, text); empty where there is no environment."""
    reward: float = 0.0
    """What the environment gave it."""
    fault: str | None = None
    """Why the environment could not go on."""

    @classmethod
    def of(cls, answer: Completion) -> Episode:
        """An answer that is an episode by itself."""
        return cls(answer.tokens, answer.logprobs, answer.finished, [True] * len(answer.tokens), answer.tokens)

    def plain(self) -> tuple[Any, ...]:
        """All of it, as arguments that survive JSON."""
        return (
            self.tokens, self.logprobs, self.finished, self.learned, self.last, self.turns, self.reward, self.fault
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Response:
    """What an environment says to the answers so far."""

    reply: str | None
    """None: the episode has ended."""
    reward: float = 0.0
    fault: str | None = None


@dataclass(slots=True)
class _Playing:
    """An episode in the making."""

    prompt: list[int]
    key: Key
    asked: AnsweredPrompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    finished: bool = False
    reward: float = 0.0
    fault: str | None = None

    def answer(self, found: Completion, text: str) -> None:
        self.tokens += found.tokens
        self.logprobs += found.logprobs
        self.learned += [True] * len(found.tokens)
        self.last = found.tokens
        self.turns.append((MODEL, text))

    def reply(self, ids: Sequence[int], text: str) -> None:
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.learned += [False] * len(ids)
        self.turns.append((ENVIRONMENT, text))

    def answers(self) -> list[str]:
        return [text for who, text in self.turns if who == MODEL]

    def episode(self) -> Episode:
        return Episode(
            self.tokens, self.logprobs, self.finished, self.learned, self.last, self.turns, self.reward, self.fault
        )


Complete = Callable[[Sequence[Sequence[int]], Sequence[Sequence[Key]], Sequence[int]], list[Completion]]
"""Answers to prompts by their keys, with so many tokens at most for each prompt."""


class Player:
    """Plays the episodes of a run."""

    def __init__(
        self,
        environment: EnvironmentArm,
        verifier: TaskReward | None,
        sandbox: ProgramSandbox,
        replies: Replies,
        room: int,
        *,
        text: Callable[[Sequence[int]], str],
        notice: Callable[[str, str], None],
        between: Callable[[], None],
    ) -> None:
        """`verifier`: the reward `task`, which an environment `task` replies by. `room`: tokens of an episode at most.
        `notice` tells something once. `between` is called now and then and may raise to stop."""
        self.environment, self.verifier, self.sandbox, self.replies = environment, verifier, sandbox, replies
        self.room, self.text, self.notice, self.between = room, text, notice, between

    def play(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        asked: Sequence[AnsweredPrompt],
        complete: Complete,
    ) -> list[Episode]:
        """Play an episode to each prompt for each of its keys, those of a prompt side by side. `asked`: each prompt's
        row."""
        each = min(self.environment.max_turn_length or self.room, self.room)
        made = [
            _Playing(list(prompt), key, one)
            for prompt, mine, one in zip(prompts, keys, asked, strict=True)
            for key in mine
        ]
        live = made
        found = complete(prompts, keys, [each] * len(prompts))
        for turn in range(1, self.environment.max_turns + 1):
            for one, answer in zip(live, found, strict=True):
                one.answer(answer, self.text(answer.tokens))
            live = self._replied(live, last=turn == self.environment.max_turns)
            if not live:
                break
            found = complete(
                [one.prompt + one.tokens for one in live],
                [[(*one.key, turn)] for one in live],
                [min(each, self.room - len(one.tokens)) for one in live],
            )
        return [one.episode() for one in made]

    def _replied(self, live: Sequence[_Playing], *, last: bool) -> list[_Playing]:
        """Ask the environment; the episodes that go on, with its replies. `last`: none does."""
        going = []
        for one, said in zip(live, self.responses(live), strict=True):
            one.reward, one.fault = said.reward, said.fault
            one.finished = said.reply is None and said.fault is None
            if said.reply is None or last:
                continue
            reply = said.reply
            if (cut := self.replies.cut(reply, self.environment.max_reply_length)) is not None:
                most = self.environment.max_reply_length
                self.notice(
                    "replies_cut",
                    f"the environment replied to row {one.asked.line} with more than {most} tokens, and what is beyond "
                    "them is left out; say less, or raise `stage.environment.max_reply_length`",
                )
                reply = cut
            assert one.asked.row is not None
            ids = self.replies.between(one.asked.row, reply, one.last[-1])
            if len(one.tokens) + len(ids) < self.room:
                one.reply(ids, reply)
                going.append(one)
        return going

    def responses(self, live: Sequence[_Playing]) -> list[Response]:
        """What the environment says to each episode."""
        self.between()
        match self.environment:
            case PythonEnvironment():
                source = {"source": self.environment.source, "function": self.environment.function}
                return self._called(PROGRAM, source, live, self.environment.seconds)
            case TaskEnvironment():
                return self._verified(self.environment, live)
            case GameEnvironment():
                return self._called(GAMES, {}, live, GAME_SECONDS)
            case _ as never:
                assert_never(never)

    def _verified(self, environment: TaskEnvironment, live: Sequence[_Playing]) -> list[Response]:
        assert self.verifier is not None
        answers, asked = [one.answers()[-1] for one in live], [one.asked for one in live]
        values = values_of(self.verifier, answers, asked, self.sandbox, self.between)
        return [
            Response(None if not isinstance(value, str | AnswerFault) and value >= 1 else environment.feedback)
            for value in values
        ]

    def _called(self, program: str, more: dict[str, str], live: Sequence[_Playing], seconds: float) -> list[Response]:
        """What `respond` of a program answers to the episodes, beside `more` arguments. Calls go to one program; to
        those of fewer calls where that does not end."""
        calls = [{**one.asked.columns, "prompt": one.asked.prompt, "answers": one.answers()} for one in live]
        outcome = self.sandbox.run_function(program, "respond", more | {"calls": calls}, seconds=seconds)
        if outcome.error is None:
            return [_response(one) for one in outcome.value]
        if len(live) == 1:
            return [Response(None, fault=outcome.error.splitlines()[0])]
        self.between()
        half = len(live) // 2
        return [one for part in (live[:half], live[half:]) for one in self._called(program, more, part, seconds)]


def _response(found: dict[str, Any]) -> Response:
    """What a program answered, or why it is no response."""
    if "error" in found:
        return Response(None, fault=str(found["error"]))
    value = found["value"]
    if isinstance(value, str):
        return Response(value)
    if isinstance(value, dict) and value.keys() <= {"reply", "reward"}:
        reply, reward = value.get("reply"), number_of(value.get("reward", 0.0))
        if isinstance(reply, str | None) and isinstance(reward, float):
            return Response(reply, reward)
    elif isinstance(value, int | float) and isinstance(number := number_of(value), float):
        return Response(None, number)
    return Response(
        None,
        fault=f"it returned {str(value)[:100]!r}; return the text of a reply, a finite number that is the reward and "
        "ends the episode, or {'reply': text or None, 'reward': number}",
    )
