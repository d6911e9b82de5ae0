"""Two ranks are one run: the same steps, the same figures, one model; resumed to the bit; under the real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.plan.constants import BUCKET_BYTES
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.data.order import BatchOrder
from core.train.ranks.reduce import buckets
from core.train.recipe import run
from tests.support.gang import CODES, AskedAt
from tests.support.preferences import judged, preferences
from tests.support.trainer import ENVIRONMENT, PLAIN, ROOT, chats, events, pairs, weights, write_rows, write_run

WEIGHTS, FIGURES = 5e-5, 2e-6
"""How far two ranks may be from one, of the largest value: sums of float32 in another order (docs/gangs.md)."""
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
RESUMED: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": TRAINING | {"precision": "bf16", "gradient_accumulation_steps": 3},
    "checkpoint": {"type": "disk", "save_steps": 2},
}
ASKED = ("1:2", "0:4", "1:5")
"""Which rank is asked to leave, and at which place in training: the other one is not."""


@dataclass(frozen=True, slots=True)
class Ran:
    two: dict[str, Path]
    one: dict[str, Path]
    gradients: tuple[Path, Path]
    """Of two ranks and of one: left when the first window's gradients are there."""
    calm: Path
    attempts: list[Path]
    codes: list[list[int]]
    """Of every rank: the exit codes of all runs."""


@pytest.fixture(scope="module")
def ran(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Every run of two ranks, in one pair of processes that torchrun started; and those of one rank, here."""
    base = tmp_path_factory.mktemp("ranks")
    train, held = write_rows(base / "train.jsonl", pairs(21)), write_rows(base / "held.jsonl", chats(5))
    judged_rows = {
        "dpo": (write_rows(base / "pairs.jsonl", preferences(21)), "preference"),
        "reward": (write_rows(base / "margins.jsonl", preferences(21)), "preference"),
        "kto": (write_rows(base / "judged.jsonl", judged(21)), "kto"),
    }

    def order(name: str, gpus: int, accumulation: int, resume_from: list[Path] | None = None, **axes: Any) -> Path:
        training = axes.pop("training", TRAINING) | {"gradient_accumulation_steps": accumulation}
        resources = {"gpus": gpus, "accelerator": "cpu"}
        where = base / name.replace(", ", "-")
        for stage, (path, row_format) in judged_rows.items():
            if axes.get("stage") == stage:
                axes["data"] = {
                    "train": {"type": "path", "path": str(path), "format": row_format}, "rendering": PLAIN
                }  # fmt: skip
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
    gradients = order("two-gradients", 2, 2, **CASES["full"]), order("one-gradients", 1, 4, **CASES["full"])
    first = next(iter(two.values()))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "0", "-m", "tests.support.gang"),
            *(str(folder) for folder in [*two.values(), f"{gradients[0]}@0:1", calm, *asked, attempts[-1]]),
        ],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for folder in one.values():
        assert run(folder) == EXIT_OK, events(folder)[-1]
    assert run(gradients[1], AskedAt(3, gradients[1])) == EXIT_CHECKPOINTED
    codes = [json.loads((first / name).read_text()) for name in (CODES, "codes-1.json")]
    return Ran(two, one, gradients, calm, attempts, codes)


def test_both_ranks_end_alike(ran: Ran) -> None:
    expected = [EXIT_OK] * len(CASES) + [EXIT_CHECKPOINTED, EXIT_OK] + [EXIT_CHECKPOINTED] * len(ASKED) + [EXIT_OK]
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
            assert two["values"][name] == pytest.approx(one["values"][name], rel=FIGURES), (two["step"], name)
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
