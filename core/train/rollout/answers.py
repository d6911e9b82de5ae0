"""Answers to a run's prompts, and their rewards: for training, and for held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import DataError
from core.spec.axes.rollout.reward import HttpReward, ModelReward, ProgramReward, names_of
from core.spec.axes.rollout.stages import RolloutStage
from core.train.engine import Engine
from core.train.evaluation.held_out import describe_batches
from core.train.evaluation.samples import stop_tokens
from core.train.generation.sampling import Completion, Key, SamplingParams
from core.train.model.placement import Placement
from core.train.ranks.group import ProcessGroup
from core.train.rollout.graders import Graders
from core.train.rollout.rewards import Columns, name_rows, reward_of
from core.train.rollout.sandboxed.programs import (
    AnsweredPrompt,
    AnswerFault,
    Value,
    open_sandbox,
    refuse_unreadable,
    values_of,
)
from core.train.rollout.scorers import build_scorers
from core.train.run import Run


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards of answers."""

    rewards: dict[str, list[float]]
    """Rewards of each answer by their name, before their weights."""
    total: list[float]
    """Weighted sums."""
    unscored: dict[int, dict[str, str]]
    """Why an answer has no reward but 0, by its place and the reward's name."""

    def replace(self, at: int, other: Judged, place: int, count: int) -> None:
        """Put the rewards of `count` answers of `other` from `place` on in the place of those from `at` on."""
        self.total[at : at + count] = other.total[place : place + count]
        for name, values in self.rewards.items():
            values[at : at + count] = other.rewards[name][place : place + count]
        for offset in range(count):
            self.unscored.pop(at + offset, None)
            if place + offset in other.unscored:
                self.unscored[at + offset] = other.unscored[place + offset]


class Answerer:
    """Samples answers and rewards them. `engine` is set once it is built."""

    def __init__(self, run: Run, stage: RolloutStage, tokenizer: Any, placement: Placement) -> None:
        """NoSandbox where a reward needs the sandbox and this machine has none; ToolsMissing; as Graders and
        Scorer."""
        self.run, self.stage, self.tokenizer = run, stage, tokenizer
        self.engine: Engine | None = None
        self.slots = stage.slots
        """Answers in the making at the same time; fewer once the device had no memory for them."""
        self._told: set[str] = set()
        self.sandbox = open_sandbox(stage.reward, run.cache_dir)
        """Where code of users runs. It ends with this process."""
        self.graders = Graders(run, stage.reward)
        self.scorers = build_scorers(run, stage, placement)
        """Reward models, by the names of their rewards."""

    @property
    def ready(self) -> Engine:
        assert self.engine is not None, "there is no engine yet"
        return self.engine

    def refuse_unreadable(self, lines: Sequence[int], columns: Sequence[Columns]) -> None:
        """DataError where a reward cannot read what is expected of an answer. StopRequested."""
        rows = list(zip(lines, columns, strict=True))
        refuse_unreadable(self.stage.reward, rows, self.sandbox, self.run.check_stop)

    def sample(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[Key]], temperature: float
    ) -> list[Completion]:
        """Answer each prompt once for each of its keys, the answers to a prompt side by side. Where the device has no
        memory for the slots, half as many are used, and the answers are the same. StopRequested."""
        stage, engine = self.stage, self.ready
        params = SamplingParams(
            stage.max_completion_length,
            temperature,
            stage.top_p,
            stage.top_k,
            stage.min_p,
            tuple(stop_tokens(engine.model, self.tokenizer, ())),
            tuple(stage.stop),
        )
        room = max(map(len, prompts)) + stage.max_completion_length
        if (why := engine.without_slots(room)) is not None and self.untold("generation_in_batches"):
            self.run.notice("generation_in_batches", describe_batches(why))
        while True:
            try:
                found = engine.complete(
                    prompts, keys, params, slots=self.slots, decode=self.text, between=self.run.check_stop
                )
            except torch.OutOfMemoryError:
                if self.slots == 1:
                    raise
                self.slots //= 2
                self.run.notice(
                    "fewer_slots",
                    f"the device has no memory for the answers in the making; {self.slots} are made at the same time "
                    "from now on, and the rollout begins anew. Set `stage.slots` to that",
                )
            else:
                return [answer for answers in found for answer in answers]

    def judge(self, answers: Sequence[Completion], asked: Sequence[AnsweredPrompt]) -> Judged:
        """Reward answers. `asked`: the prompt of each. DataError where a reward cannot be computed and the job is to
        fail then."""
        rewards = self.stage.reward
        texts = [self.text(answer.tokens) for answer in answers]
        found: dict[str, list[float]] = {}
        skipped: set[int] = set()
        unscored: dict[int, dict[str, str]] = {}
        for name, reward in zip(names_of(rewards), rewards, strict=True):
            self.run.check_stop()
            values: list[Value]
            if isinstance(reward, ProgramReward):
                assert self.sandbox is not None
                values = values_of(reward, texts, asked, self.sandbox, self.run.check_stop)
            elif isinstance(reward, HttpReward):
                values = self.graders.values_of(reward, texts, asked)
            elif isinstance(reward, ModelReward):
                values = self.scorers[name].values_of(texts, asked)
            else:
                values = [
                    reward_of(reward, text, len(answer.tokens), one.columns)
                    for text, answer, one in zip(texts, answers, asked, strict=True)
                ]
            failed = {at: value for at, value in enumerate(values) if isinstance(value, str)}
            if failed:
                self._failed(name, failed, asked)
            faulty = {at: value.why for at, value in enumerate(values) if isinstance(value, AnswerFault)}
            if faulty and self.untold("answers_not_scored"):
                self.run.notice("answers_not_scored", f"{_told(name, faulty, asked)}; they get 0")
            for at, why in (failed | faulty).items():
                unscored.setdefault(at, {})[name] = why
            if self.stage.reward_error == "skip":
                skipped |= {asked[at].line for at in failed}
            found[name] = [value if isinstance(value, float) else 0.0 for value in values]
        total = [
            sum(reward.weight * found[name][at] for name, reward in zip(found, rewards, strict=True))
            if one.line not in skipped
            else 0.0
            for at, one in enumerate(asked)
        ]
        return Judged(found, total, unscored)

    def _failed(self, name: str, failed: Mapping[int, str], asked: Sequence[AnsweredPrompt]) -> None:
        """Say of which rows a reward could not be computed, or fail."""
        said = _told(name, failed, asked)
        if self.stage.reward_error == "fail":
            raise DataError(
                f"{said}\nMend it, or set `stage.reward_error` to `zero` or `skip`",
                field="stage.reward",
                code="reward_failed",
            )
        if self.untold("reward_failed"):
            self.run.notice("reward_failed", said)

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        return {"reward_models": [one.about() for one in self.scorers.values()]} if self.scorers else {}

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def word(self, token: int) -> str:
        """Text of one token, special ones included."""
        return str(self.tokenizer.decode([token]))

    def untold(self, code: str) -> bool:
        """Whether the notice has not been told in this attempt; from now on it has."""
        untold = code not in self._told
        self._told.add(code)
        return untold


def together(
    ranks: ProcessGroup, share: tuple[list[Completion], Judged, list[int]], groups: int, each: int
) -> tuple[list[Completion], Judged, list[int]]:
    """Put the answers of all ranks together, `each` to a prompt, which were dealt out in turn. Collective."""
    answers, judged, draws = share
    unscored = [judged.unscored.get(at, {}) for at in range(len(answers))]
    numbers = [(one.tokens, one.logprobs, one.finished) for one in answers]
    found = ranks.all_gather((numbers, judged.rewards, judged.total, unscored, draws))
    places = [(found[group % ranks.world], group // ranks.world) for group in range(groups)]
    answered = [(part, place * each + sample) for part, place in places for sample in range(each)]
    whole = Judged(
        {name: [part[1][name][at] for part, at in answered] for name in judged.rewards},
        [part[2][at] for part, at in answered],
        {number: part[3][at] for number, (part, at) in enumerate(answered) if part[3][at]},
    )
    completions = [Completion(*part[0][at]) for part, at in answered]
    return completions, whole, [part[4][place] for part, place in places if part[4]]


def _told(name: str, whys: Mapping[int, str], asked: Sequence[AnsweredPrompt]) -> str:
    """Which answers a reward could not be computed for, and why the first of them."""
    lines = sorted({asked[at].line for at in whys})
    first = next(iter(whys))
    return (
        f"the reward `{name}` could not be computed for {len(whys)} of {len(asked)} answers, to {name_rows(lines)}; to "
        f"row {asked[first].line}: {whys[first]}"
    )
