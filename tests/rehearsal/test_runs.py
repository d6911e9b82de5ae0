"""Whole runs on GPUs that are not there: stopped, killed and resumed, out of memory, of two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.jobs.admission.oom_backoff import apply, smaller
from core.plan.steps import BATCH
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.train.kernels.scratch import _streams as scratches
from core.train.recipe import run
from tests.rehearsal.forking import ForkedProgram
from tests.support.gang import CODES, AskedAt
from tests.support.trainer import (
    ENVIRONMENT,
    ROOT,
    events,
    log,
    pairs,
    wait_until,
    weights,
    write_rows,
    write_run,
)

GPU = {"accelerator": "gpu"}
STEPS = 6
RESUMED: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "memory": {"gradient_checkpointing": True, "activation_offloading": "host"},
    "optimizer": {"learning_rate": 1e-2},
    "checkpoint": {"type": "disk", "save_steps": 2},
    "training": {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 64,
        "precision": "bf16",
    },
    "resources": GPU,
}  # fmt: skip
"""With dropout, which draws from the GPU's generator."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(20))


@pytest.mark.xdist_group("forks")
def test_a_run_that_was_paused_and_killed_ends_with_the_same_bits(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    calm = write_run(tmp_path / "calm", tiny_dir, rows, **RESUMED)
    assert run(calm) == EXIT_OK, log(calm)
    memory = tmp_path / "memory"  # where the copies of its state go first, beside the steps
    attempts = [write_run(tmp_path / "1", tiny_dir, rows, memory_dir=memory / "1", **RESUMED)]
    assert run(attempts[0], AskedAt(3, attempts[0])) == EXIT_CHECKPOINTED
    attempts.append(write_run(tmp_path / "2", tiny_dir, rows, resume_from=attempts, memory_dir=memory / "2", **RESUMED))
    killed = ForkedProgram("core.train", str(attempts[1]), log=attempts[1] / "log.txt")
    wait_until(lambda: any(event["step"] >= 3 for event in events(attempts[1], "metrics")), killed)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    left = [memory / "2", *reversed(attempts)]
    attempts.append(write_run(tmp_path / "3", tiny_dir, rows, resume_from=left, **RESUMED))
    assert run(attempts[2]) == EXIT_OK, log(attempts[2])
    assert events(attempts[2], "resumed"), "it began anew"
    assert weights(attempts[2]) == weights(calm)


@pytest.mark.xdist_group("forks")
def test_out_of_memory_ends_in_the_halved_micro_batch(tmp_path: Path, tiny_dir: Path) -> None:
    """The allocator's own refusal, of a device on which only half of the rows fit at once."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "completion": " go" * 150} for n in range(32)])
    training = {"max_steps": 1, "per_device_train_batch_size": 16, "max_length": 512, "precision": "fp32"}
    axes: dict[str, Any] = {"method": {"type": "lora", "r": 4}, "training": training, "resources": GPU}
    adjusted: dict[str, int] = {}
    ends = []
    for attempt in range(4):
        run_dir = write_run(tmp_path / str(attempt), tiny_dir, rows, **axes)
        order = json.loads((run_dir / ORDER_FILE).read_text())
        order["spec"] = apply(JobSpec.model_validate(order["spec"]), adjusted).model_dump(mode="json")
        (run_dir / ORDER_FILE).write_text(json.dumps(order))
        code = ForkedProgram("core.train", str(run_dir), log=run_dir / "log.txt", devices=1, bytes=260 << 20).wait()
        ends.append(code)
        if code == EXIT_OK:
            break
        (error,) = events(run_dir, "error")
        assert code == EXIT_FAILED and error["failure"] == "memory", (error, log(run_dir)[-2000:])
        found = smaller(JobSpec.model_validate(order["spec"]), BATCH)
        assert found is not None
        adjusted |= found
    assert len(ends) > 1 and ends[-1] == EXIT_OK, ends
    batch, accumulation = (adjusted[f"training.{name}"] for name in
                           ("per_device_train_batch_size", "gradient_accumulation_steps"))  # fmt: skip
    assert batch < 16 and batch * accumulation == 16


@pytest.mark.xdist_group("ranks")
def test_two_ranks_with_a_gpu_each_train_what_one_does(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    """Collectives are calls of NCCL, which the runtime answers over shared memory; and the gang resumes exactly."""
    training = {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 64, "precision": "fp32"}
    axes: dict[str, Any] = {"method": {"type": "lora", "r": 4}, "optimizer": {"learning_rate": 1e-2}}

    def order(name: str, gpus: int, accumulation: int, resume_from: list[Path] | None = None, **more: Any) -> Path:
        return write_run(
            tmp_path / name, tiny_dir, rows, resume_from=resume_from, cache_dir=tmp_path / "cache",
            training=training | {"gradient_accumulation_steps": accumulation}, resources=GPU | {"gpus": gpus},
            **axes, **more,
        )  # fmt: skip

    two, one = order("two", 2, 2), order("one", 1, 4)
    part = order("part", 2, 2)
    rest = order("rest", 2, 2, resume_from=[part])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "0", "-m", "tests.support.gang", str(two), f"{part}@1:3", str(rest)),
        ],
        cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name in (CODES, "codes-1.json"):
        assert json.loads((two / name).read_text()) == [EXIT_OK, EXIT_CHECKPOINTED, EXIT_OK]
    assert run(one) == EXIT_OK, log(one)
    figures = [[(event["values"]["loss"], event["values"]["grad_norm"]) for event in events(folder, "metrics")]
               for folder in (two, one)]  # fmt: skip
    assert len(figures[0]) == 4
    for mine, wanted in zip(*figures, strict=True):
        assert mine == pytest.approx(wanted, rel=2e-6)
    assert weights(rest) == weights(two)


@pytest.mark.xdist_group("forks")
def test_a_run_leaves_no_scratch_to_the_next_of_its_process(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    axes = {**RESUMED, "method": {"type": "qlora", "r": 4}, "training": RESUMED["training"] | {"max_steps": 1}}
    assert run(write_run(tmp_path / "run", tiny_dir, rows, **axes)) == EXIT_OK
    assert [scratch.nbytes for scratch in scratches.values() if scratch.nbytes] == []
