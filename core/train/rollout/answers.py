"""Answers to a run's prompts, and their rewards: for training, and for held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.data.rows import Prompt, PromptOnly
from core.errors import DataError, Fault
from core.spec.axes.rollout.environment import EnvironmentArm
from core.spec.axes.rollout.reward import (
    EnvironmentReward,
    HttpReward,
    ModelReward,
    ProgramReward,
    TaskReward,
    names_of,
)
from core.spec.axes.rollout.stages import RolloutStage
from core.train.engine import Engine
from core.train.evaluation.held_out import describe_batches
from core.train.evaluation.samples import stop_tokens
from core.train.generation.sampling import Completion, Key, SamplingParams
from core.train.model.placement import Placement
from core.train.ranks.group import ProcessGroup
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.rollout.graders import Graders
from core.train.rollout.rewards import columns_of, name_rows, reward_of
from core.train.rollout.sandboxed.programs import (
    AnsweredPrompt,
    AnswerFault,
    Value,
    open_sandbox,
    refuse_unreadable,
    values_of,
)
from core.train.rollout.scorers import build_scorers
from core.train.rollout.turns.episodes import Episode, Player
from core.train.rollout.turns.replies import Replies
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

    def __init__(
        self, run: Run, stage: RolloutStage, tokenizer: Any, placement: Placement, options: RenderOptions
    ) -> None:
        """`options`: how the prompts were rendered. NoSandbox where a reward or an environment needs the sandbox and
        this machine has none; ToolsMissing; as Graders and Scorer."""
        self.run, self.stage, self.tokenizer = run, stage, tokenizer
        self.engine: Engine | None = None
        self.slots = stage.slots
        """Answers in the making at the same time; fewer once the device had no memory for them."""
        self._told: set[str] = set()
        environment = stage.environment
        self.sandbox = open_sandbox(stage.reward, run.cache_dir, environment)
        """Where code of users runs. It ends with this process."""
        self.graders = Graders(run, stage.reward)
        self.scorers = build_scorers(run, stage, placement)
        """Reward models, by the names of their rewards."""
        self.player = None if environment is None else self._player(environment, options)
        """Plays episodes of several turns; None: an answer is one turn."""

    def _player(self, environment: EnvironmentArm, options: RenderOptions) -> Player:
        assert self.sandbox is not None
        return Player(
            environment,
            next((one for one in self.stage.reward if isinstance(one, TaskReward)), None),
            self.sandbox,
            Replies(Renderer(self.tokenizer, options), environment.role),
            self.stage.max_completion_length,
            text=self.text,
            notice=lambda code, words: self.run.notice(code, words) if self.untold(code) else None,
            between=self.run.check_stop,
        )

    @property
    def ready(self) -> Engine:
        assert self.engine is not None, "there is no engine yet"
        return self.engine

    def refuse_unreadable(self, lines: Sequence[int], prompts: Sequence[PromptOnly]) -> None:
        """DataError where a reward cannot read what is expected of an answer to one of these prompts, SpecError where
        an environment cannot reply to it. StopRequested."""
        if self.player is not None:
            self.player.replies.refuse_unrendered(prompts)
        rows = [(line, columns_of(row)) for line, row in zip(lines, prompts, strict=True)]
        refuse_unreadable(self.stage.reward, rows, self.sandbox, self.run.check_stop)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        asked: Sequence[AnsweredPrompt],
        temperature: float,
    ) -> list[Episode]:
        """Answer each prompt once for each of its keys, the answers to a prompt side by side. `asked`: each prompt's
        row. StopRequested."""

        def complete(
            prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[Key]], most: Sequence[int]
        ) -> list[Completion]:
            return self._complete(prompts, keys, most, temperature)

        if self.player is None:
            found = complete(prompts, keys, [self.stage.max_completion_length] * len(prompts))
            return [Episode.of(answer) for answer in found]
        return self.player.play(prompts, keys, asked, complete)

    def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        most: Sequence[int],
        temperature: float,
    ) -> list[Completion]:
        """As `sample`, one turn with so many tokens at most. Where the device has no memory for the slots, half as many
        are used, and the answers are the same. StopRequested."""
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
        room = max(len(prompt) + limit for prompt, limit in zip(prompts, most, strict=True))
        if (why := engine.without_slots(room)) is not None and self.untold("generation_in_batches"):
            self.run.notice("generation_in_batches", describe_batches(why))
        while True:
            try:
                found = engine.complete(
                    prompts, keys, params, slots=self.slots, decode=self.text, between=self.run.check_stop, most=most
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

    def judge(self, answers: Sequence[Episode], asked: Sequence[AnsweredPrompt]) -> Judged:
        """Reward answers. `asked`: the prompt of each. DataError where a reward cannot be computed, or an environment
        could not go on, and the job is to fail then."""
        rewards = self.stage.reward
        texts = [self.text(answer.last) for answer in answers]
        found: dict[str, list[float]] = {}
        skipped: set[int] = set()
        unscored: dict[int, dict[str, str]] = {}
        if faults := {at: answer.fault for at, answer in enumerate(answers) if answer.fault is not None}:
            said = _told("the environment failed in", faults, asked)
            self._failed(Fault("environment_failed", said, "stage.environment"))
            unscored = {at: {"environment": why} for at, why in faults.items()}
            if self.stage.reward_error == "skip":
                skipped = {asked[at].line for at in faults}
        for name, reward in zip(names_of(rewards), rewards, strict=True):
            self.run.check_stop()
            values: list[Value]
            if isinstance(reward, ProgramReward):
                assert self.sandbox is not None
                values = values_of(reward, texts, asked, self.sandbox, self.run.check_stop)
            elif isinstance(reward, HttpReward):
                values = self.graders.values_of(reward, texts, asked)
            elif isinstance(reward, ModelReward):
                values = self.scorers[name].values_of(self._whole(answers, asked), asked)
            elif isinstance(reward, EnvironmentReward):
                values = [answer.reward for answer in answers]
            else:
                values = [
                    reward_of(reward, text, sum(answer.learned), one.columns)
                    for text, answer, one in zip(texts, answers, asked, strict=True)
                ]
            failed = {at: value for at, value in enumerate(values) if isinstance(value, str)}
            if failed:
                said = _told(f"the reward `{name}` could not be computed for", failed, asked)
                self._failed(Fault("reward_failed", said, "stage.reward"))
            faulty = {at: value.why for at, value in enumerate(values) if isinstance(value, AnswerFault)}
            if faulty and self.untold("answers_not_scored"):
                said = _told(f"the reward `{name}` could not be computed for", faulty, asked)
                self.run.notice("answers_not_scored", f"{said}; they get 0")
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

    def _whole(self, answers: Sequence[Episode], asked: Sequence[AnsweredPrompt]) -> list[Prompt]:
        """What was written behind each prompt; of episodes, their turns as the model's template has them."""
        if self.player is None:
            return [self.text(answer.tokens) for answer in answers]
        return [
            self.player.replies.conversation(one.row, answer.turns)
            for answer, one in zip(answers, asked, strict=True)
            if one.row is not None
        ]

    def _failed(self, fault: Fault) -> None:
        """Say which answers have no reward, or fail."""
        if self.stage.reward_error == "fail":
            raise DataError(
                f"{fault.message}\nMend it, or set `stage.reward_error` to `zero` or `skip`",
                field=fault.field,
                code=fault.code,
            )
        if self.untold(fault.code):
            self.run.notice(fault.code, fault.message)

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
    ranks: ProcessGroup, share: tuple[list[Episode], Judged, list[int]], groups: int, each: int
) -> tuple[list[Episode], Judged, list[int]]:
    """Put the answers of all ranks together, `each` to a prompt, which were dealt out in turn. Collective."""
    answers, judged, draws = share
    unscored = [judged.unscored.get(at, {}) for at in range(len(answers))]
    found = ranks.all_gather(([one.plain() for one in answers], judged.rewards, judged.total, unscored, draws))
    places = [(found[group % ranks.world], group // ranks.world) for group in range(groups)]
    answered = [(part, place * each + sample) for part, place in places for sample in range(each)]
    whole = Judged(
        {name: [part[1][name][at] for part, at in answered] for name in judged.rewards},
        [part[2][at] for part, at in answered],
        {number: part[3][at] for number, (part, at) in enumerate(answered) if part[3][at]},
    )
    episodes = [Episode(*part[0][at]) for part, at in answered]
    return episodes, whole, [part[4][place] for part, place in places if part[4]]


def _told(what: str, whys: Mapping[int, str], asked: Sequence[AnsweredPrompt]) -> str:
    """In which answers something went wrong, and why in the first of them."""
    lines = sorted({asked[at].line for at in whys})
    first = next(iter(whys))
    return (
        f"{what} {len(whys)} of {len(asked)} answers, to {name_rows(lines)}; to row {asked[first].line}: {whys[first]}"
    )
