"""A rollout: the answers to the prompts of a step, their rewards and advantages. Part of every checkpoint."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from core.train.data.dataset import TokenDataset

ADVANTAGE_EPSILON = 1e-4
"""Added to the standard deviation of a group, as TRL does."""


@dataclass(slots=True)
class Rollout:
    """Answers, group after group; `groups` of the same size."""

    number: int
    prompts: list[list[int]]
    """Tokens of each prompt."""
    rows: list[int]
    """Place of each prompt among the prompts of the run."""
    answers: list[list[int]]
    """Tokens of each answer, those of a prompt side by side."""
    finished: list[bool]
    rewards: dict[str, list[float]]
    """Rewards of each answer by their name, before their weights."""
    total: list[float]
    """Weighted sums."""
    advantages: list[float]
    token_values: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Numbers of each token of all answers, end to end: `sampler`, `old`, `reference`; for PPO `value`, `return`,
    `advantage` too. 0 of tokens of an environment."""
    draws: list[int] = field(default_factory=list)
    """How often the group of each prompt was drawn; empty where none is drawn twice."""
    learned: list[list[int]] = field(default_factory=list)
    """1 of each token of an answer that is the model's, 0 of those that its environment said; empty where none said
    anything."""
    turns: list[list[tuple[str, str]]] = field(default_factory=list)
    """(who, text) of each answer, for people; empty where there is no environment, and in a checkpoint."""

    @property
    def group(self) -> int:
        return len(self.answers) // len(self.prompts)

    @property
    def compared(self) -> int:
        """Answers that are looked at together: those to a prompt, or all where each prompt has one."""
        return self.group if self.group > 1 else len(self.answers)

    def mask(self, number: int) -> npt.NDArray[np.bool_]:
        """Which tokens of an answer are the model's."""
        if not self.learned:
            return np.ones(len(self.answers[number]), dtype=np.bool_)
        return np.asarray(self.learned[number], dtype=np.bool_)

    def all_masks(self) -> npt.NDArray[np.bool_]:
        """Which tokens of all answers, end to end, are the model's."""
        return np.concatenate([self.mask(number) for number in range(len(self.answers))])

    def lengths(self) -> list[int]:
        """Tokens of the model in each answer."""
        return [sum(one) for one in self.learned] if self.learned else [len(one) for one in self.answers]

    def answer_sums(self, values: npt.NDArray[np.float32]) -> list[float]:
        """Sums of numbers of tokens over each answer, float32."""
        ends = np.cumsum([len(answer) for answer in self.answers])
        return [float(part.sum()) for part in np.split(values, ends[:-1])]

    def varied(self) -> list[int]:
        """Places of the answers of groups whose rewards differ."""
        size = self.compared
        return [at for group in spread_groups(self.total, size) for at in range(group * size, (group + 1) * size)]

    def dataset(self) -> TokenDataset:
        """Prompt and answer of each, the answer's tokens as labels."""
        ids: list[int] = []
        learned: list[npt.NDArray[np.bool_]] = []
        ends: list[int] = []
        values: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in self.token_values}
        at = 0
        for number, answer in enumerate(self.answers):
            prompt = self.prompts[number // self.group]
            ids += [*prompt, *answer]
            learned += [np.zeros(len(prompt), np.bool_), self.mask(number)]
            ends.append(len(ids))
            for name, parts in values.items():
                parts += [np.zeros(len(prompt), np.float32), self.token_values[name][at : at + len(answer)]]
            at += len(answer)
        stops = np.asarray(ends, dtype=np.int64)
        found = TokenDataset(
            np.asarray(ids, dtype=np.int32),
            np.concatenate(learned),
            np.concatenate([np.zeros(1, dtype=np.int64), stops])[:-1],
            stops,
            np.arange(len(stops), dtype=np.int64),
            values={"advantage": np.asarray(self.advantages, dtype=np.float32)},
            token_values={name: np.concatenate(parts) for name, parts in values.items()},
        )
        found.groups = [number // self.group for number in range(len(self.answers))]
        return found

    def figures(self, most: int) -> dict[str, float]:
        """What is told of it. `most`: tokens of an answer at most."""
        groups = np.asarray(self.total, dtype=np.float64).reshape(-1, self.compared)
        lengths = self.lengths()
        found = {
            "reward": float(groups.mean()),
            "reward_std": float(groups.std(axis=1, ddof=min(1, groups.shape[1] - 1)).mean()),
            "frac_reward_zero_std": 1 - len(self.varied()) / len(self.answers),
        }
        for name, values in self.rewards.items():
            found[f"rewards/{name}/mean"] = float(np.mean(values))
            found[f"rewards/{name}/std"] = float(np.std(values, ddof=min(1, len(values) - 1)))
        if self.draws:
            found["frac_groups_resampled"] = float(np.mean([draws > 1 for draws in self.draws]))
            found["draws_per_group"] = float(np.mean(self.draws))
        if self.learned:
            said = [sum(1 for one in pairwise([0, *mask]) if one == (0, 1)) for mask in self.learned]
            found |= {"turns/mean": float(np.mean(said)), "turns/max": float(max(said))}
        return found | {
            "completions/mean_length": float(np.mean(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/truncated": 1 - sum(self.finished) / len(self.finished),
        }

    # --- as JSON: arrays in base64, which is a third longer than the bytes, to the bit --------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "rows": self.rows,
            "prompts": _lists(self.prompts),
            "answers": _lists(self.answers),
            "finished": self.finished,
            "rewards": self.rewards,
            "total": self.total,
            "advantages": self.advantages,
            "draws": self.draws,
            "learned": _lists(self.learned),
            "token_values": {name: _text(values) for name, values in self.token_values.items()},
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Rollout:
        """The rollout that `state_dict` described."""
        return cls(
            number=state["number"],
            rows=state["rows"],
            prompts=_from_lists(state["prompts"]),
            answers=_from_lists(state["answers"]),
            finished=state["finished"],
            rewards=state["rewards"],
            total=state["total"],
            advantages=state["advantages"],
            draws=state.get("draws", []),
            learned=_from_lists(state["learned"]) if "learned" in state else [],
            token_values={name: _array(text, np.float32) for name, text in state["token_values"].items()},
        )


def spread_groups(totals: Sequence[float], group: int) -> list[int]:
    """Numbers of the groups whose rewards differ."""
    return [at // group for at in range(0, len(totals), group) if len(set(totals[at : at + group])) > 1]


def advantages_of(rewards: Sequence[float], group: int, *, scale: bool) -> list[float]:
    """Each reward less the mean of its group, divided by the standard deviation with `scale`; float32 arithmetic."""
    groups = np.asarray(rewards, dtype=np.float32).reshape(-1, group)
    found = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        found = found / (groups.std(axis=1, ddof=1, keepdims=True) + np.float32(ADVANTAGE_EPSILON))
    return [float(value) for value in found.ravel()]


def leave_one_out(rewards: Sequence[float], group: int, *, normalize: bool) -> list[float]:
    """Each reward less the mean of the others of its group; with `normalize`, all of them moved to mean 0 and divided
    by their standard deviation; float32 arithmetic."""
    groups = np.asarray(rewards, dtype=np.float32).reshape(-1, group)
    found = groups - (groups.sum(axis=1, keepdims=True) - groups) / np.float32(group - 1)
    if normalize:
        found = (found - found.mean()) / (found.std(ddof=1) + np.float32(ADVANTAGE_EPSILON))
    return [float(value) for value in found.ravel()]


def _lists(lists: Sequence[Sequence[int]]) -> dict[str, str]:
    flat = [token for one in lists for token in one]
    return {
        "tokens": _text(np.asarray(flat, dtype=np.int32)),
        "lengths": _text(np.asarray([len(one) for one in lists], dtype=np.int32)),
    }


def _from_lists(state: Mapping[str, str]) -> list[list[int]]:
    tokens, lengths = _array(state["tokens"], np.int32), _array(state["lengths"], np.int32)
    ends = np.cumsum(lengths)
    return [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def _text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def _array(text: str, kind: Any) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=kind)
