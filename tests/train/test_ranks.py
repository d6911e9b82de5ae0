"""Two ranks are one run: the same steps, the same figures, one model; resumed to the bit; under the real torchrun."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.plan.constants import BUCKET_BYTES
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.data.order import BatchOrder
from core.train.ranks.reduce import buckets
from tests.support.gang import CODES, AskedAt, under_torchrun
from tests.support.preferences import judged, preferences
from tests.support.random_kills import ENVIRONMENT_OF_TWO_TURNS
from tests.support.trainer import PLAIN, chats, events, log, pairs, run, weights, write_rows, write_run

WEIGHTS, FIGURES = 5e-5, 2e-6
"""How far two ranks may be from one, of the largest value: sums of float32 in another order (docs/gangs.md)."""
CANCELLED = 1e-6
"""How far the loss of rollouts may be: advantages cancel out in it, so that it is much smaller than what it sums up."""
TRAINING = {"max_steps": 5, "per_device_train_batch_size": 2, "max_length": 64, "precision": "fp32"}
CASES: dict[str, dict[str, Any]] = {
    "lora": {
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {
            "type": "held_out",
            "eval_steps": 2,
            "per_device_eval_batch_size": 2,
            "samples": {"type": "sampling", "rows": 3, "max_new_tokens": 6},
            "generation": {"metrics": ["chrf"], "rows": 3, "max_new_tokens": 6},
        },
    },
    "full": {"method": "full", "optimizer": {"learning_rate": 1e-3}},
    "qlora, packed": {
        "method": {"type": "qlora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "batching": {"type": "packed", "tokens_per_batch": 64},
        "memory": {"gradient_checkpointing": "selective"},
    },
    "lora, tokens": {
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "batching": {"type": "tokens", "tokens_per_batch": 64},
        "memory": {"activation_offloading": True},
    },
}
PREFERENCES = {
    "dpo, packed": {
        "stage": "dpo",
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "batching": {"type": "packed", "tokens_per_batch": 128},
    },
    "reward": {"stage": "reward", "method": {"type": "lora", "r": 4}, "optimizer": {"learning_rate": 1e-2}},
    "kto": {"stage": "kto", "method": {"type": "lora", "r": 4}, "optimizer": {"learning_rate": 1e-2}},
}
CASES |= PREFERENCES
ROLLOUT = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.5, "num_iterations": 2, "slots": 3,
           "reward": [{"type": "regex", "pattern": "[a-m]"}, {"type": "length", "most": 3, "slack": 4}]}  # fmt: skip
ROLLOUTS = {
    name: {
        "stage": {"type": name, **ROLLOUT, **stage},
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"type": "disk", "save_steps": 2},
    }
    for name, stage in {
        "grpo": {"beta": 0.05, "max_resamples": 1},
        "rloo": {
            "sampler": "exact", "num_iterations": 1, "max_completion_length": 14,
            "environment": ENVIRONMENT_OF_TWO_TURNS,
        },
        "ppo": {"num_generations": 1, "beta": 0.05},
    }.items()
}  # fmt: skip
ROLLOUTS["grpo"]["evaluation"] = {"type": "held_out", "eval_steps": 3}
CASES |= ROLLOUTS
RESUMED: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": TRAINING | {"precision": "bf16", "gradient_accumulation_steps": 3},
    "checkpoint": {"type": "disk", "save_steps": 2},
}
ASKED = ("1:2", "0:4", "1:5")
"""Which rank is asked to leave, and at which place in training: the other one is not."""
ROLLOUTS_ASKED = {"grpo": ("1:0", "1:6"), "rloo": ("1:5",), "ppo": ("1:8",)}
"""Within a step over a rollout, and while answers are made: grpo in both."""


@dataclass(frozen=True, slots=True)
class Ran:
    two: dict[str, Path]
    one: dict[str, Path]
    gradients: tuple[Path, Path]
    """Of two ranks and of one: left when the first window's gradients are there."""
    calm: Path
    attempts: list[Path]
    rollouts: dict[str, list[Path]]
    """Attempts at what `two` has of each of ROLLOUTS."""
    trials: tuple[Path, Path]
    """Of the rewards of `grpo`, by two ranks and by one."""
    codes: list[list[int]]
    """Of every rank: the exit codes of all runs."""


@pytest.fixture(scope="module")
def ran(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every run of two ranks, in one pair of processes that torchrun started; and those of one rank, by themselves."""
    base = tmp_path_factory.mktemp("ranks")
    train, held = write_rows(base / "train.jsonl", pairs(21)), write_rows(base / "held.jsonl", chats(5))
    judged_rows = {
        "dpo": (write_rows(base / "pairs.jsonl", preferences(21)), "preference"),
        "reward": (write_rows(base / "margins.jsonl", preferences(21)), "preference"),
        "kto": (write_rows(base / "judged.jsonl", judged(21)), "kto"),
    }
    prompts = write_rows(base / "prompts.jsonl", [{"prompt": f"say a letter, number {n}"} for n in range(21)])
    held_prompts = write_rows(base / "held-prompts.jsonl", [{"prompt": f"say number {n}"} for n in range(3)])
    judged_rows |= dict.fromkeys(ROLLOUTS, (prompts, "prompt"))

    def order(name: str, gpus: int, accumulation: int, resume_from: list[Path] | None = None, **axes: Any) -> Path:
        training = axes.pop("training", TRAINING) | {"gradient_accumulation_steps": accumulation}
        resources = {"gpus": gpus, "accelerator": "cpu"}
        where = base / name.replace(", ", "-")
        for stage, (path, row_format) in judged_rows.items():
            asked = axes.get("stage")
            if asked == stage or (isinstance(asked, dict) and asked["type"] == stage):
                axes["data"] = {
                    "train": {"type": "path", "path": str(path), "format": row_format}, "rendering": PLAIN
                }  # fmt: skip
                if row_format == "prompt" and "evaluation" in axes:
                    axes["data"]["eval"] = {"type": "path", "path": str(held_prompts), "format": row_format}
        eval_rows = held if "evaluation" in axes else None
        return write_run(
            where, tiny_dir, train, held_out=eval_rows, resume_from=resume_from, cache_dir=base / "cache",
            training=training, resources=resources, **axes,
        )  # fmt: skip

    two = {name: order(f"two-{name}", 2, 2, **axes) for name, axes in CASES.items()}
    one = {name: order(f"one-{name}", 1, 4, **axes) for name, axes in CASES.items()}
    calm = order("calm", 2, 3, **RESUMED)
    attempts: list[Path] = []
    for number in range(len(ASKED) + 1):
        attempts.append(order(f"attempt-{number}", 2, 3, resume_from=list(reversed(attempts)), **RESUMED))
    for name in ("step-00000088", "step-00000099"):  # both ranks would find them, and one puts them aside
        (attempts[1] / "checkpoints" / name).mkdir(parents=True)
    asked = [f"{folder}@{who}" for folder, who in zip(attempts, ASKED, strict=False)]
    rollouts: dict[str, list[Path]] = {name: [] for name in ROLLOUTS}
    left: list[str] = []
    for name, mine in rollouts.items():
        for number in range(len(ROLLOUTS_ASKED[name]) + 1):
            mine.append(order(f"{name}-{number}", 2, 2, resume_from=mine[::-1], **CASES[name]))
        left += [*map("{}@{}".format, mine, ROLLOUTS_ASKED[name]), str(mine[-1])]
    trials = order("two-trials", 2, 2, **CASES["grpo"]), order("one-trial", 1, 4, **CASES["grpo"])
    for folder in trials:
        order_of = RunOrder.model_validate_json((folder / ORDER_FILE).read_bytes())
        (folder / ORDER_FILE).write_text(order_of.model_copy(update={"trial_prompts": 8}).model_dump_json())
    gradients = order("two-gradients", 2, 2, **CASES["full"]), order("one-gradients", 1, 4, **CASES["full"])
    first = next(iter(two.values()))
    arguments = [*two.values(), f"{gradients[0]}@0:1", calm, *asked, attempts[-1], *left, trials[0]]
    assert under_torchrun(*map(str, arguments)) == EXIT_OK, log(first)[-8000:]
    for folder in [*one.values(), trials[1]]:
        assert run(folder) == EXIT_OK, events(folder)[-1]
    assert run(gradients[1], AskedAt(3, gradients[1])) == EXIT_CHECKPOINTED
    codes = [json.loads((first / name).read_text()) for name in (CODES, "codes-1.json")]
    return Ran(two, one, gradients, calm, attempts, rollouts, trials, codes)


def test_both_ranks_end_alike(ran: Ran) -> None:
    expected = [EXIT_OK] * len(CASES) + [EXIT_CHECKPOINTED, EXIT_OK] + [EXIT_CHECKPOINTED] * len(ASKED) + [EXIT_OK]
    for asked in ROLLOUTS_ASKED.values():
        expected += [EXIT_CHECKPOINTED] * len(asked) + [EXIT_OK]
    expected += [EXIT_OK]
    assert ran.codes == [expected, expected], events(ran.two["lora"])[-1]


def test_gradients_of_the_ranks_sum_up_to_those_of_one(ran: Ran) -> None:
    two, one = (folder / "checkpoints" / f"step-00000000-micro-{micro:04d}" for folder, micro in
                zip(ran.gradients, (2, 4), strict=True))  # fmt: skip
    parts = [load_file(two / name) for name in ("gradients.safetensors", "gradients-1.safetensors")]
    whole = load_file(one / "gradients.safetensors")
    assert len(whole) > 10 and parts[0].keys() == parts[1].keys() == whole.keys()
    assert any(not torch.equal(parts[0][name], parts[1][name]) for name in whole), "each has rows of its own"
    for name, gradient in whole.items():
        off = (parts[0][name] + parts[1][name] - gradient).abs().max()
        assert off <= FIGURES * gradient.abs().max(), (name, float(off))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_does(ran: Ran, case: str) -> None:
    """The gradient's norm and the loss of each step, the final weights; and no row more or less."""
    here, there = events(ran.two[case], "metrics"), events(ran.one[case], "metrics")
    assert len(here) == len(there) == 5
    for two, one in zip(here, there, strict=True):
        for name in ("loss", "grad_norm", *one["values"].keys() & {"min_reward", "max_reward"}):
            slack = CANCELLED if case in ROLLOUTS and name == "loss" else 0.0
            expected = pytest.approx(one["values"][name], rel=FIGURES, abs=slack)
            assert two["values"][name] == expected, (two["step"], name)
        assert two["values"]["learning_rate"] == one["values"]["learning_rate"]
    results = [events(found[case], "result")[0]["result"] for found in (ran.two, ran.one)]
    assert results[0]["total_tokens"] == results[1]["total_tokens"], "data is disjoint and all of it is there"
    two_weights, one_weights = (final(found[case]) for found in (ran.two, ran.one))
    assert two_weights.keys() == one_weights.keys()
    for name, tensor in two_weights.items():
        off = (tensor.float() - one_weights[name].float()).abs().max()
        assert off <= WEIGHTS * one_weights[name].float().abs().max(), (name, float(off))


def final(run_dir: Path) -> dict[str, torch.Tensor]:
    (path,) = (run_dir / "artifacts").glob("*/*model.safetensors")
    return load_file(path)


def test_evaluation_and_samples_are_those_of_one_rank(ran: Ran) -> None:
    here, there = (events(found["lora"], "evaluation") for found in (ran.two, ran.one))
    assert [event["step"] for event in here] == [0, 2, 4, 5] == [event["step"] for event in there]
    for two, one in zip(here, there, strict=True):
        assert two["values"] == pytest.approx(one["values"], rel=FIGURES)
    assert here[0]["values"]["eval_loss"] == pytest.approx(there[0]["values"]["eval_loss"], rel=1e-12)
    before = [events(found["lora"], "samples")[0]["samples"] for found in (ran.two, ran.one)]
    assert before[0] == before[1] and len(before[0]) == 3, "drawn by the same seeds, in the order of the prompts"


def test_one_rank_tells_and_every_rank_is_measured(ran: Ran) -> None:
    told = events(ran.two["lora"])
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
    values = events(ran.two["lora"], "metrics")[-1]["values"]
    ranks = [values["memory_bytes_rank_0"], values["memory_bytes_rank_1"]]
    assert min(ranks) > 50e6 and values["memory_bytes"] == max(ranks)
    assert "memory_bytes_rank_0" not in events(ran.one["lora"], "metrics")[-1]["values"]
    (record,) = events(ran.two["lora"], "run_record")
    assert record["record"]["ranks"]["world_size"] == 2 and record["record"]["ranks"]["backend"] == "gloo"
    assert events(ran.one["lora"], "run_record")[0]["record"]["ranks"] is None


def test_a_wish_that_reached_one_rank_stops_both_at_one_place_and_the_rest_is_the_same_to_the_bit(ran: Ran) -> None:
    left = [events(attempt, "checkpoint")[-1] for attempt in ran.attempts[:-1]]
    assert {event["micro_step"] for event in left} - {0}, "none left inside a window"
    for attempt, event in zip(ran.attempts[:-1], left, strict=True):
        names = {path.name for path in (attempt / event["path"]).iterdir()}
        assert {"rng.safetensors", "rng-1.safetensors", "gradients.safetensors", "gradients-1.safetensors"} <= names
    damaged = [event for event in events(ran.attempts[1], "notice") if event["code"] == "bad_checkpoint"]
    assert len(damaged) == 2 and len(list(ran.attempts[1].glob("checkpoints/bad-*"))) == 2
    resumed = [events(attempt, "resumed")[0] for attempt in ran.attempts[1:]]
    assert [(one["step"], one["micro_step"]) for one in resumed] == [(one["step"], one["micro_step"]) for one in left]
    steps = {event["step"]: event["values"] for attempt in ran.attempts for event in events(attempt, "metrics")}
    for event in events(ran.calm, "metrics"):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert steps[event["step"]][name] == event["values"][name], (event["step"], name)
    assert weights(ran.attempts[-1]) == weights(ran.calm)


@pytest.mark.parametrize("stage", ROLLOUTS)
def test_two_ranks_answer_what_one_does(ran: Ran, stage: str) -> None:
    two, one = (
        [json.loads(line) for line in (found[stage] / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
        for found in (ran.two, ran.one)
    )
    assert len(two) == len(one) > 0 and len({line["line"] for line in two}) > 8
    for here, there in zip(two, one, strict=True):
        assert here.pop("advantage") == pytest.approx(there.pop("advantage"), rel=1e-4, abs=1e-5)
        assert here == there, "prompts, answers and rewards, in the same order"
    for here, there in zip(events(ran.two[stage], "metrics"), events(ran.one[stage], "metrics"), strict=True):
        figures = [name for name in there["values"] if "reward" in name or "completions" in name]
        assert figures and all(here["values"][name] == there["values"][name] for name in figures)
    held = [[event["values"] for event in events(found[stage], "evaluation")] for found in (ran.two, ran.one)]
    assert held[0] == [pytest.approx(values) for values in held[1]]


@pytest.mark.parametrize("stage", ROLLOUTS)
def test_rollouts_of_two_ranks_resume_to_the_bit(ran: Ran, stage: str) -> None:
    attempts, calm = ran.rollouts[stage], ran.two[stage]
    left = [events(attempt, "checkpoint")[-1] for attempt in attempts[:-1]]
    if stage == "grpo":
        assert [(one["step"] > 0, one["micro_step"] > 0) for one in left] == [(False, True), (True, False)]
    assert all(one["step"] + one["micro_step"] > 0 for one in left) and left[-1]["step"] < 5
    assert [event["step"] for attempt in attempts[1:] for event in events(attempt, "resumed")]
    assert weights(attempts[-1]) == weights(calm)
    merged = [(folder / "artifacts" / "rollouts.jsonl").read_text() for folder in (attempts[-1], calm)]
    assert merged[0] == merged[1]


def test_two_ranks_try_the_rewards_that_one_does(ran: Ran) -> None:
    two, one = (events(folder, "result")[0]["result"] for folder in ran.trials)
    for result in (two, one):
        assert result["step"].pop("train_seconds") > 0 and result["step"].pop("rollout_seconds") > 0
    assert two == one and two["prompts"] == 8


def test_ranks_draw_numbers_of_their_own(ran: Ran) -> None:
    """Dropout over the rows of two ranks must not be the same mask twice."""
    checkpoint = ran.attempts[0] / events(ran.attempts[0], "checkpoint")[-1]["path"]
    first, second = (load_file(checkpoint / name)["torch"] for name in ("rng.safetensors", "rng-1.safetensors"))
    assert not torch.equal(first, second)


def test_another_number_of_ranks_is_refused_in_words(ran: Ran, tiny_dir: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(21))
    alone = write_run(tmp_path / "alone", tiny_dir, train, resume_from=[ran.calm], **RESUMED)
    run(alone)
    error = events(alone)[-1]
    assert error["code"] == "checkpoint_mismatch" and error["failure"] == "user"
    assert "written by 2 ranks" in error["message"] and "resources.gpus: 2" in error["message"]


def test_smaller_batches_after_a_window_was_begun_see_its_other_rows_on_all_ranks() -> None:
    """Out of memory: which rank did a row makes no difference to the sum, so the halved batches are counted as one."""
    sizes = {"batch_size": 4, "accumulation": 2, "seed": 3, "world": 2}
    before = [BatchOrder(32, rank=rank, **sizes) for rank in (0, 1)]
    done = {row for order in before for row in order.window(1)[0]}
    halved = [BatchOrder(32, rank=rank, **sizes | {"batch_size": 2, "accumulation": 4}) for rank in (0, 1)]
    for order in halved:
        order.load_state_dict(before[0].state_dict())
        assert order.translate(1, 1) == 2
    assert {row for order in halved for rows in order.window(1)[:2] for row in rows} == done
    rest = [row for order in halved for rows in order.window(1)[2:] for row in rows]
    assert sorted([*done, *rest]) == sorted(before[0].rows_of(1))


def test_buckets_are_bounded_and_of_one_kind() -> None:
    small, large = torch.zeros(1 << 20), torch.zeros(BUCKET_BYTES // 4 + 1)
    half = torch.zeros(4, dtype=torch.bfloat16)
    found = list(buckets([small, small, large, small, half, half]))
    assert [len(bucket) for bucket in found] == [2, 1, 1, 2]
    assert [id(tensor) for bucket in found for tensor in bucket] == [
        id(tensor) for tensor in (small, small, large, small, half, half)
    ]
