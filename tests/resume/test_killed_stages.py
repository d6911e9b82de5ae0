"""kill -9 of the stages after sft: in the pass of the reference, beside its file, between what KTO computes
before a step and that step, and inside steps. The final weights and figures are those of a run nobody touched."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE, REFERENCE
from core.spec.run.orders import RewardModelFolder, RunOrder
from core.train.base.rng import seed_all
from core.train.model.heads import with_head
from core.train.model.load import load_model
from tests.support.grader import grader
from tests.support.killed import kill_after
from tests.support.mixtures import saved
from tests.support.preferences import judged
from tests.support.random_kills import ENVIRONMENT_OF_TWO_TURNS
from tests.support.rewards import margins
from tests.support.trainer import events, run, weights, write_rows, write_run

ROWS, STEPS = 12, 3
REFERENCE_PASS, KEPT = "core.train.engine:Engine.evaluate", "core.train.evaluation.reference:sync"
PRELUDE, BACKWARD = "core.train.loop.loop:prelude", "core.train.engine:Engine.backward"
CONTINUED = "core.train.policy:PolicyModel.continued"
VALUES = "core.train.policy:PolicyModel.logprobs_and_values"
ROUNDING = "core.train.methods.qat:rounded_inputs"
TOKEN, REWARD = "core.train.generation.generator:choose", "core.train.rollout.answers:reward_of"
RESPONSE = "core.train.rollout.turns.episodes:Player.responses"
GRADED = "core.train.rollout.graders:Graders.values_of"
SCORED = "core.train.rollout.scorers:Scorer._pass"
ROLLOUTS = {
    "num_generations": 2, "max_completion_length": 6, "beta": 0.05, "num_iterations": 2, "temperature": 1.5,
    "reward": [{"type": "regex", "pattern": "[a-m]"}], "slots": 3,
}  # fmt: skip
CLOCKS = {"tokens_per_second", "memory_bytes"}


@dataclass(frozen=True)
class Case:
    rows: list[dict[str, Any]]
    places: tuple[str, ...]
    """Steps have two micro-steps, and each ends with a checkpoint: the third backward pass of an attempt is inside of
    its second step."""
    in_reference: int = 0
    """Attempts that are killed before their first step."""
    stage: dict[str, Any] = field(default_factory=dict)
    """Fields of the stage."""
    experts: bool = False
    """Whether the model is a mixture of experts, trained with the loss of its routers on packed lines."""
    tokens: int = 0
    """Tokens of a packed batch; a step is one such batch unless the model is a mixture. 0: rows."""
    quantization: dict[str, Any] | str = "none"
    graded: bool = False
    """Whether an endpoint of this process rewards the answers."""
    scored: bool = False
    """Whether a reward model does, three answers at a time."""


CASES = {
    "dpo": Case(margins(ROWS), (f"{REFERENCE_PASS}#2", KEPT, BACKWARD, f"{BACKWARD}#3", f"{BACKWARD}#2"), 2),
    "kto": Case(judged(ROWS), (REFERENCE_PASS, PRELUDE, f"{BACKWARD}#3", PRELUDE), 1),
    "reward": Case(margins(ROWS), (BACKWARD, f"{BACKWARD}#3")),
    "grpo": Case(
        [{"prompt": f"say a letter, number {n}", "reference": "a"} for n in range(ROWS)],
        (f"{TOKEN}#3", REWARD, f"{BACKWARD}#2", f"{BACKWARD}#3", f"{TOKEN}#9", f"{REWARD}#2"),
        stage=ROLLOUTS,
    ),
    # Inside of passes, and inside of a step's second one.
    "sft of rounded weights": Case(
        [{"prompt": f"say a letter, number {n}", "completion": "a"} for n in range(ROWS)],
        (f"{ROUNDING}#40", BACKWARD, f"{BACKWARD}#3", f"{ROUNDING}#70"),
        stage={"type": "sft"},
        quantization={"type": "qat", "weights": "int4"},
    ),
    # What KTO computes before a step goes through the model behind the only batch of that step.
    "kto in one batch": Case(
        judged(ROWS), (CONTINUED, f"{BACKWARD}#2", CONTINUED, f"{BACKWARD}#2"), stage={"type": "kto"}, tokens=100
    ),
    "dpo of experts": Case(
        margins(ROWS), (f"{BACKWARD}#2", f"{BACKWARD}#4"), stage={"type": "dpo"}, experts=True, tokens=60
    ),
    "rloo": Case(
        [{"prompt": f"say a letter, number {n}", "reference": "a"} for n in range(ROWS)],
        (REWARD, f"{BACKWARD}#2", f"{BACKWARD}#3"),
        stage=ROLLOUTS | {"max_resamples": 2, "sampler": "exact"},
    ),
    "grpo with an environment": Case(
        [{"prompt": f"say a letter, number {n}"} for n in range(ROWS)],
        (f"{RESPONSE}#2", f"{BACKWARD}#3", f"{TOKEN}#9", f"{RESPONSE}#2"),
        stage=ROLLOUTS | {"type": "grpo", "max_completion_length": 14, "environment": ENVIRONMENT_OF_TWO_TURNS},
    ),
    "grpo with a grader": Case(
        [{"prompt": f"say a letter, number {n}", "reference": "a"} for n in range(ROWS)],
        (GRADED, f"{BACKWARD}#2", GRADED, f"{GRADED}#2"),
        stage=ROLLOUTS | {"type": "grpo"},
        graded=True,
    ),
    "grpo with a reward model": Case(
        [{"prompt": f"say a letter, number {n}"} for n in range(ROWS)],
        (f"{SCORED}#2", f"{BACKWARD}#2", SCORED, f"{SCORED}#3"),
        stage=ROLLOUTS | {"type": "grpo"},
        scored=True,
    ),
    "ppo": Case(
        [{"prompt": f"say a letter, number {n}", "reference": "a"} for n in range(ROWS)],
        (VALUES, f"{BACKWARD}#2", f"{BACKWARD}#3"),
        stage=ROLLOUTS | {"num_generations": 1},
    ),
}


@pytest.fixture(scope="module")
def ended(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Path, int]]]:
    """The attempts of each stage and their exit statuses."""
    base = tmp_path_factory.mktemp("killed")
    found: dict[str, list[tuple[Path, int]]] = {stage: [] for stage in CASES}
    turns = [(stage, place) for stage, case in CASES.items() for place in (*case.places, "")]
    folders = [base / f"attempt-{number}" for number in range(1, len(turns) + 1)]
    for folder, (stage, _) in zip(folders, turns, strict=True):
        earlier = [path for path, (of, _) in zip(folders, turns, strict=True) if of == stage and path.exists()]
        write(folder, tiny_dir, stage, resume_from=earlier[::-1])
    for folder, (stage, place) in zip(folders, turns, strict=True):
        found[stage].append((folder, run(folder, prepare=partial(kill_after, place) if place else None)))
    return found


def write(folder: Path, model_dir: Path, stage: str, **axes: Any) -> Path:
    case = CASES[stage]
    path = write_rows(folder.parent / f"{stage}.jsonl", case.rows)
    settings = case.stage
    if case.graded:
        settings = settings | {"reward": [{"type": "http", "url": grader().url, "batch_size": 3}]}
    if case.scored:
        named = {"type": "local", "path": str(scoring(folder.parent / "reward-model", model_dir))}
        settings = settings | {"reward": [{"type": "model", "model": named, "batch_size": 3}]}
    training = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "precision": "bf16", "max_length": 64,
        "gradient_accumulation_steps": 1 if case.tokens and not case.experts else 2,
    }  # fmt: skip
    made = write_run(
        folder,
        saved(folder.parent / "mixture", model_dir) if case.experts else model_dir,
        path,
        stage={"type": stage, **settings},
        method={"type": "lora", "r": 4} | ({"target_modules": "attention"} if case.experts else {}),
        batching={"type": "packed", "tokens_per_batch": case.tokens} if case.tokens else "rows",
        optimizer={"learning_rate": 1e-2},
        training=training,
        checkpoint={"type": "disk", "save_steps": 1},
        quantization=case.quantization,
        **axes,
    )
    order = RunOrder.model_validate_json((made / ORDER_FILE).read_bytes())
    more: dict[str, Any] = {"reward_allow": ["127.0.0.1"]}
    if case.scored:
        more["reward_models"] = [RewardModelFolder(reward="model", model_dir=str(folder.parent / "reward-model"))]
    (made / ORDER_FILE).write_text(order.model_copy(update=more).model_dump_json())
    return made


def scoring(folder: Path, model_dir: Path) -> Path:
    """A reward model with a head that nobody trained."""
    if not folder.exists():
        seed_all(0)
        model: Any = with_head(load_model(model_dir, torch.float32), "score", None)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stage", CASES)
def test_a_killed_run_ends_as_an_undisturbed_one(
    tmp_path: Path, tiny_dir: Path, ended: dict[str, list[tuple[Path, int]]], stage: str
) -> None:
    case, attempts = CASES[stage], [folder for folder, _ in ended[stage]]
    codes = [code for _, code in ended[stage]]
    assert codes == [-signal.SIGKILL] * len(case.places) + [EXIT_OK], (attempts[-1] / "log.txt").read_text()
    for folder in attempts[: case.in_reference]:
        assert events(folder, "phase")[-1]["phase"] == "reference" and not (folder / REFERENCE).exists()
        assert not events(folder, "metrics") and not events(folder, "checkpoint")
    assert events(attempts[-1], "resumed")[0]["step"] > 0 and events(attempts[-1], "metrics")
    if case.graded:
        assert set(grader().keys.values()) == {1}, "what was scored before a kill is not asked again"
    calm = write(tmp_path / "calm", tiny_dir, stage)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    assert weights(attempts[-1]) == weights(calm)
    steps = {event["step"]: event["values"] for folder in attempts for event in events(folder, "metrics")}
    for event in events(calm, "metrics"):
        for figure in event["values"].keys() - CLOCKS:
            assert steps[event["step"]][figure] == event["values"][figure], (event["step"], figure)
    if case.in_reference:
        computed = [folder for folder in attempts if "reference" in {e["phase"] for e in events(folder, "phase")}]
        assert computed == attempts[: case.in_reference + 1], "once it is kept, it is read"
        assert (computed[-1] / REFERENCE).read_bytes() == (calm / REFERENCE).read_bytes()
