"""Resuming is exact to the bit: killed or asked to leave anywhere, the final weights are those of a run nobody touched.

LoRA with dropout 0.1, the same over NF4 with gradient checkpointing, and full fine-tuning; bf16, windows of 4
micro-steps, shuffled rows of different lengths.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_FENCED, EXIT_OK
from core.train.base.stop import Stop
from core.train.checkpoint import store
from tests.support.trainer import (
    Forked,
    events,
    log,
    notices,
    pairs,
    run,
    start,
    wait_until,
    weights,
    write_rows,
    write_run,
)

STEPS, WINDOW, SAVE = 9, 4, 4
AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "schedule": "cosine",
    "training": {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": WINDOW,
        "precision": "bf16",
        "max_length": 64,
    },
    "checkpoint": {"type": "disk", "save_steps": SAVE, "keep_last": 2},
}
METHODS = {
    "lora": AXES,
    "qlora": AXES
    | {"method": AXES["method"] | {"type": "qlora"}, "memory": {"type": "resident", "gradient_checkpointing": True}},
    "full": AXES
    | {"method": "full", "optimizer": {"learning_rate": 1e-3}, "memory": {"gradient_checkpointing": "selective"}},
    "tokens": AXES | {"batching": {"type": "tokens", "tokens_per_batch": 56}},
    "packed": AXES
    | {"batching": {"type": "packed", "tokens_per_batch": 48}, "memory": {"activation_offloading": True}},
}
ATTENDED = {"training": AXES["training"] | {"max_steps": 16}, "checkpoint": {"type": "disk", "save_steps": 3}}


class StopAt(Stop):
    """Asked to leave at the n-th place where the run looks whether it should; given its folder, n-th in training."""

    def __init__(self, place: int, run_dir: Path | None = None) -> None:
        self.left = place
        self.run_dir = run_dir

    @property  # type: ignore[override]
    def requested(self) -> bool:
        if self.run_dir is not None:
            if all(event["phase"] != "training" for event in events(self.run_dir, "phase")):
                return False
            self.run_dir = None
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "train.jsonl", pairs(27)), write_rows(folder / "held.jsonl", pairs(6))


@pytest.fixture(scope="module")
def undisturbed(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, list[Any], Path]]:
    """Final weights, metrics and folders of runs that nobody touched, the first of them in a process of its own, which
    writes down what it imports."""
    found = {}
    for name, axes in METHODS.items():
        run_dir = write_run(tmp_path_factory.mktemp("calm") / name, tiny_dir, rows[0], held_out=rows[1], **axes)
        if name == "lora":
            assert start(run_dir, "-X", "importtime", "-m", "core.train").wait(250) == EXIT_OK, log(run_dir)
            imported = {line.rpartition("|")[2].strip() for line in log(run_dir).splitlines()}
            assert {"torch", "peft", "transformers"} <= imported
            asked_for = {name for name in imported if name.startswith(("torchao.", "bitsandbytes."))}
            assert not asked_for, "no run has them imported that does not ask (core/train/__main__.py)"
        else:
            assert run(run_dir) == EXIT_OK, events(run_dir)[-1]
        found[name] = (weights(run_dir), figures(run_dir), run_dir)
    return found


def figures(*run_dirs: Path) -> list[Any]:
    """Loss, rate and norm of each step over the attempts; a later attempt's word counts."""
    steps = {}
    for run_dir in run_dirs:
        for event in events(run_dir, "metrics"):
            steps[event["step"]] = [event["values"][name] for name in ("loss", "learning_rate", "grad_norm")]
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize("method", METHODS)
def test_leaving_at_every_place_in_turn(
    tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path, method: str
) -> None:
    """Every attempt does a few micro-steps more and leaves; each goes on from the checkpoint of the one before. Two of
    three of full fine-tuning have their optimizer in host memory."""
    axes, attempts = METHODS[method], list[Path]()
    for number in range(60):
        held = {"memory": {"offload_optimizer": "host"}} if method == "full" and number % 3 else {}
        run_dir = write_run(
            tmp_path / f"attempt-{number}",
            tiny_dir,
            rows[0],
            held_out=rows[1],
            resume_from=list(reversed(attempts)),
            **axes | held,
        )
        attempts.append(run_dir)
        code = run(run_dir, StopAt(3 + number % 3, run_dir))
        if code == EXIT_OK:
            break
        assert code == EXIT_CHECKPOINTED, events(run_dir)[-1]
    else:
        pytest.fail("the run never came to its end")
    assert number >= 8
    micro = {event["micro_step"] for attempt in attempts for event in events(attempt, "checkpoint")}
    if method == "tokens":  # its windows differ in length
        assert len(micro) >= 4, "too few attempts left inside a window"
    else:
        assert {0, 1, 2, 3} <= micro, "no attempt left inside a window"
    assert weights(attempts[-1]) == undisturbed[method][0]
    assert figures(*attempts) == undisturbed[method][1]
    before = events(attempts[-1], "result")[0]["result"]["eval_before"]
    assert before is not None, "the first evaluation is remembered over all attempts"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_real_processes_killed_and_stopped(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    """Over packed weights the second start reads what the first has packed."""
    axes = METHODS[method] | ATTENDED
    calm = write_run(tmp_path / "calm", tiny_dir, rows[0], **axes)
    assert run(calm) == EXIT_OK, events(calm)[-1]

    def attempt(folder: Path, *before: Path) -> Path:
        cache = folder.parents[len(before)] / "cache"
        return write_run(folder, tiny_dir, rows[0], resume_from=list(before), cache_dir=cache, **axes)

    first, code = disturbed(lambda turn: attempt(tmp_path / turn / "attempt-1"), 7, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert events(first, "checkpoint")

    second, code = disturbed(lambda turn: attempt(first.parent / turn / "attempt-2", first), 6, signal.SIGTERM)
    assert code == EXIT_CHECKPOINTED, log(second)
    cache = first.parent / "cache"
    (left,) = events(second, "checkpoint")[-1:]
    assert events(second)[-1] == left, "the checkpoint is the last word"

    third = write_run(tmp_path / "attempt-3", tiny_dir, rows[0], resume_from=[second, first], cache_dir=cache, **axes)
    assert run(third) == EXIT_OK, log(third)
    resumed = events(third, "resumed")[0]
    assert (resumed["step"], resumed["micro_step"]) == (left["step"], left["micro_step"])
    assert not notices(third)
    if method == "qlora":
        sources = [events(one, "run_record")[0]["record"]["quantization"]["source"] for one in (calm, first, third)]
        assert sources == ["quantised", "quantised", "cache"]
        stored = {path.name for path in left_behind(second).iterdir()}
        assert "packed" not in " ".join(stored) and sum(p.stat().st_size for p in left_behind(second).iterdir()) < 2**18
    assert weights(third) == weights(calm)
    assert figures(first, second, third) == figures(calm)


def disturbed(attempt: Callable[[str], Path], steps: int, number: signal.Signals) -> tuple[Path, int]:
    """A run that is sent the signal after so many steps, and how it ended. One that came to its end before the signal
    has shown nothing: then it is another's turn."""
    for turn in range(10):
        run_dir = attempt(f"turn-{turn}")
        process = Forked(run_dir)
        wait_until(lambda run_dir=run_dir: len(events(run_dir, "metrics")) >= steps, process)
        process.send_signal(number)
        code = process.wait()
        if code != EXIT_OK:
            return run_dir, code
    pytest.fail("each of ten runs was quicker than the test")


def left_behind(run_dir: Path) -> Path:
    return store.newest_first([run_dir / "checkpoints"])[0].path


def killed_at(sync: int) -> Callable[[], None]:
    """Have a fork killed in place of the n-th sync."""

    def prepare() -> None:
        left, real = sync, store.sync

        def deadly(path: Path) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path)

        store.sync = deadly

    return prepare


@pytest.mark.parametrize("sync", [3, 7, 14])
def test_killed_inside_the_saving_of_a_checkpoint(
    tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path, sync: int
) -> None:
    """A checkpoint has 5 files and a manifest: 6 syncs, the folder's, the rename, the parent's. Killed at the third
    file of the first, at its folder, at the last but one of the second."""
    first = write_run(tmp_path / "attempt-1", tiny_dir, rows[0], held_out=rows[1], **AXES)
    assert run(first, prepare=killed_at(sync)) == -signal.SIGKILL, log(first)
    left = sorted(path.name for path in (first / "checkpoints").iterdir())
    assert any(name.startswith("tmp-") for name in left), left
    second = write_run(tmp_path / "attempt-2", tiny_dir, rows[0], held_out=rows[1], resume_from=[first], **AXES)
    assert run(second) == EXIT_OK, events(second)[-1]
    assert bool(events(second, "resumed")) == any(name.startswith("step-") for name in left)
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == left, "the old attempt is not touched"
    assert weights(second) == undisturbed["lora"][0]


def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_taken(
    tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path
) -> None:
    first = tmp_path / "attempt-1"
    checkpoints = first / "checkpoints"
    shutil.copytree(undisturbed["lora"][2] / "checkpoints", checkpoints)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000004", "step-00000008"]
    target = checkpoints / "step-00000008" / "optimizer.safetensors"
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    second = write_run(tmp_path / "attempt-2", tiny_dir, rows[0], held_out=rows[1], resume_from=[first], **AXES)
    assert run(second) == EXIT_OK
    (notice,) = notices(second)
    assert notice["code"] == "bad_checkpoint" and "optimizer.safetensors has another SHA-256" in notice["message"]
    assert events(second, "resumed")[0]["step"] == 4
    assert sorted(path.name for path in checkpoints.iterdir()) == ["bad-step-00000008", "step-00000004"]
    assert weights(second) == undisturbed["lora"][0]


def test_a_checkpoint_of_other_data_is_refused(
    tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path
) -> None:
    first = undisturbed["lora"][2]
    second = write_run(tmp_path / "attempt-2", tiny_dir, rows[1], held_out=rows[1], resume_from=[first], **AXES)
    assert run(second) == EXIT_FAILED
    error = events(second)[-1]
    assert (error["failure"], error["code"]) == ("user", "checkpoint_mismatch")


def test_drift_is_told(tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path) -> None:
    newest = store.newest_first([undisturbed["lora"][2] / "checkpoints"])[0].path
    state = json.loads((newest / "state.json").read_text())
    state["parts"]["environment"]["threads"] = 77
    state["parts"]["environment"]["versions"]["torch"] = "1.0"
    again = tmp_path / "again"

    def fill(folder: Path) -> None:
        for path in newest.iterdir():
            if path.name not in (store.MANIFEST, "state.json"):
                os.link(path, folder / path.name)
        (folder / "state.json").write_text(json.dumps(state))

    store.write(again / "checkpoints", newest.name, fill)
    second = write_run(tmp_path / "attempt-2", tiny_dir, rows[0], held_out=rows[1], resume_from=[again], **AXES)
    assert run(second) == EXIT_OK
    (notice,) = notices(second)
    assert notice["code"] == "drift"
    assert "threads was 77" in notice["message"] and "torch was 1.0" in notice["message"]


def test_asked_before_anything_was_done(tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "attempt-1", tiny_dir, rows[0], **AXES)
    assert run(run_dir, StopAt(0)) == EXIT_CHECKPOINTED
    assert not events(run_dir, "checkpoint") and not events(run_dir, "error")


def test_the_same_folder_goes_on(tiny_dir: Path, rows: tuple[Path, Path], undisturbed: Any, tmp_path: Path) -> None:
    """By hand there is one folder: its events go on counting."""
    run_dir = write_run(tmp_path / "run", tiny_dir, rows[0], held_out=rows[1], **AXES)
    assert run(run_dir, StopAt(22, run_dir)) == EXIT_CHECKPOINTED
    assert run(run_dir) == EXIT_OK
    assert [event["seq"] for event in events(run_dir)] == list(range(1, len(events(run_dir)) + 1))
    assert weights(run_dir) == undisturbed["lora"][0]


def test_silence_ends_it_at_once(tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path) -> None:
    """The worker's end of the heartbeat is closed in mid-run: exit 76, and not a word more in the events."""
    endless = {"training": AXES["training"] | {"max_steps": 100_000}}
    run_dir = write_run(tmp_path / "run", tiny_dir, rows[0], fence_seconds=900.0, **AXES | endless)
    heard, worker = os.pipe()

    def listen() -> None:
        os.dup2(heard, 0)
        os.close(worker)

    process = Forked(run_dir, prepare=listen)
    wait_until(lambda: len(events(run_dir, "metrics")) >= 3, process)
    os.close(worker)
    assert process.wait() == EXIT_FENCED
    os.close(heard)
    assert events(run_dir)[-1]["type"] not in ("result", "error")
