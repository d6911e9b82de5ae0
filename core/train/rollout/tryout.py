"""What the untrained model's answers are rewarded with, found out before a training is paid for (docs/rollouts.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.train.engine import Engine
from core.train.rollout.buffer import Rollout
from core.train.rollout.loader import RolloutLoader
from core.train.run import Run
from core.train.stage import Stage

VALUES = 10
"""Bars of a histogram; values are told one by one where there are no more of them."""
EXAMPLES = 3
"""Answers that are shown of those with the largest rewards, and of those with the smallest."""
SHOWN = 500
"""Characters of a prompt or an answer that are shown."""


def try_rewards(run: Run, engine: Engine, stage: Stage, loader: RolloutLoader, prompts: int) -> dict[str, Any]:
    """Make the first rollouts of the training, at least `prompts` prompts (all of them where there are fewer), and one
    step over one of them; the result. StopRequested."""
    run.phase("training")
    per_step = min(loader.order.step_size, len(loader.prompts))
    wanted = min(-(-prompts // per_step), loader.order.steps_of(0))
    rollouts: list[Rollout] = []
    seconds: list[float] = []
    for number in range(wanted):
        began = time.perf_counter()
        rollouts.append(loader.roll_out(number))
        seconds.append(time.perf_counter() - began)
        done = sum(len(one.prompts) for one in rollouts)
        run.events.write("progress", prompts=done, total_prompts=min(wanted * per_step, len(loader.prompts)))
    return _summary(rollouts) | {
        "step": _step(rollouts, seconds) | {"train_seconds": _train(engine, stage, loader, rollouts)},
        "examples": _examples(loader, rollouts),
    }


def _train(engine: Engine, stage: Stage, loader: RolloutLoader, rollouts: Sequence[Rollout]) -> float | None:
    """Seconds of an optimizer step over the rollout that has most to teach; None: none of them has a gradient."""
    best = max(rollouts, key=lambda one: len(one.varied()))
    if not best.varied():
        return None
    work = loader.batches_of(best)
    began = time.perf_counter()
    for batch_of in work.batches:
        engine.backward(engine.forward(batch_of(), stage.loss, work.totals).total)
    float(engine.step().grad_norm)  # the device is waited for
    return time.perf_counter() - began


def _summary(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    answers = [answer for one in rollouts for answer in one.answers]
    finished = [end for one in rollouts for end in one.finished]
    groups = sum(len(one.prompts) for one in rollouts)
    alike = groups - sum(len(one.varied()) // one.group for one in rollouts)
    lengths = [length for one in rollouts for length in one.lengths()]
    asked = [len(prompt) for one in rollouts for prompt in one.prompts]
    names = rollouts[0].rewards
    return {
        "prompts": groups,
        "answers": len(answers),
        "reward": _spread([value for one in rollouts for value in one.total]),
        "rewards": {name: _spread([value for one in rollouts for value in one.rewards[name]]) for name in names},
        "groups_alike": alike,
        "share_alike": alike / groups,
        "truncated": 1 - sum(finished) / len(finished),
        "tokens": {
            "prompt": float(np.mean(asked)),
            "answer": float(np.mean(lengths)),
            "longest_answer": max(lengths),
        },
    }


def _step(rollouts: Sequence[Rollout], seconds: Sequence[float]) -> dict[str, Any]:
    """What one of the training's first steps takes, as a mean."""
    tokens = [sum(one.lengths()) for one in rollouts]
    return {
        "prompts": len(rollouts[0].prompts),
        "answers": len(rollouts[0].answers),
        "tokens": float(np.mean(tokens)),
        "rollout_seconds": float(np.mean(seconds)),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values)),
        "histogram": _histogram(values),
    }


def _histogram(values: Sequence[float]) -> list[dict[str, float | int]]:
    """Answers by reward: each value by itself where they are few, else bars of the same width."""
    counted, answers = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    if len(counted) <= VALUES:
        edges = [(float(value), float(value)) for value in counted]
    else:
        answers, places = np.histogram(np.asarray(values, dtype=np.float64), bins=VALUES)
        edges = list(zip(places[:-1].tolist(), places[1:].tolist(), strict=True))
    return [
        {"from": least, "to": most, "answers": int(count)} for (least, most), count in zip(edges, answers, strict=True)
    ]


def _examples(loader: RolloutLoader, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """The answers with the largest rewards, then those with the smallest."""
    places = [(one, at) for one in rollouts for at in range(len(one.answers))]
    ranked = sorted(range(len(places)), key=lambda place: -places[place][0].total[places[place][1]])
    chosen = ranked if len(ranked) <= 2 * EXAMPLES else [*ranked[:EXAMPLES], *ranked[-EXAMPLES:]]
    found = []
    for one, at in (places[place] for place in chosen):
        prompt = at // one.group
        found.append(
            {
                "line": int(loader.prompts.lines[one.rows[prompt]]),
                "prompt": loader.answerer.text(one.prompts[prompt])[-SHOWN:],
                "answer": loader.answerer.text(one.answers[at])[:SHOWN],
                "rewards": {name: values[at] for name, values in one.rewards.items()},
                "reward": one.total[at],
                "finished": one.finished[at],
            }
        )
    return found
