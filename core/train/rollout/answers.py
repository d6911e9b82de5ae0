"""Answers to a run's prompts, and their rewards: for training, and for held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.spec.axes.rollout.reward import names_of
from core.spec.axes.rollout.stages import RolloutStage
from core.train.engine import Engine
from core.train.evaluation.held_out import describe_batches
from core.train.evaluation.samples import stop_tokens
from core.train.generation.sampling import Completion, Key, SamplingParams
from core.train.rollout.rewards import Columns, reward_of
from core.train.run import Run


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards of answers."""

    rewards: dict[str, list[float]]
    """Rewards of each answer by their name, before their weights."""
    total: list[float]
    """Weighted sums."""


class Answerer:
    """Samples answers and rewards them. `engine` is set once it is built."""

    def __init__(self, run: Run, stage: RolloutStage, tokenizer: Any) -> None:
        self.run, self.stage, self.tokenizer = run, stage, tokenizer
        self.engine: Engine | None = None
        self.slots = stage.slots
        """Answers in the making at the same time; fewer once the device had no memory for them."""
        self._told: set[str] = set()

    @property
    def ready(self) -> Engine:
        assert self.engine is not None, "there is no engine yet"
        return self.engine

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

    def judge(self, answers: Sequence[Completion], columns: Sequence[Columns]) -> Judged:
        """Reward answers. `columns`: those of the row of each answer's prompt."""
        rewards = self.stage.reward
        found: dict[str, list[float]] = {name: [] for name in names_of(rewards)}
        total: list[float] = []
        for answer, row in zip(answers, columns, strict=True):
            text = self.text(answer.tokens)
            values = [reward_of(reward, text, len(answer.tokens), row) for reward in rewards]
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
            total.append(sum(reward.weight * value for reward, value in zip(rewards, values, strict=True)))
        return Judged(found, total)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def untold(self, code: str) -> bool:
        """Whether the notice has not been told in this attempt; from now on it has."""
        untold = code not in self._told
        self._told.add(code)
        return untold
