"""Checkpoints pass through the memory of the box: snapshots that outlive the trainer, and a disk that no step waits
for."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from core.spec.run.exit_codes import EXIT_OK
from core.storage.checkpoints import Snapshots
from core.train.checkpoint import store
from tests.support.trainer import events, killed_after, log, notices, pairs, run, weights, write_rows, write_run

AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"max_steps": 12, "per_device_train_batch_size": 2, "precision": "fp32", "max_length": 64},
}
JOB = "job-test"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", pairs(24))


@pytest.fixture(scope="module")
def calm(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of a run without any tier but the disk, each checkpoint of which its step waited for."""
    folder = write_run(tmp_path_factory.mktemp("calm") / "run", tiny_dir, rows, checkpoint={"save_steps": 4}, **AXES)
    assert run(folder) == EXIT_OK
    return weights(folder)


def at(*runs: Path) -> list[int]:
    return [event["step"] for one in runs for event in events(one, "checkpoint")]


def test_a_snapshot_outlives_the_trainer_and_is_resumed_to_the_bit_from_memory_and_from_disk(
    tiny_dir: Path, rows: Path, calm: str, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    snapshots = Snapshots(tmp_path / "memory", tmp_path)
    assert snapshots.open() is None
    first = tmp_path / "runs" / JOB / "attempt-1"
    steps = {"save_steps": 4, "memory_steps": 1}
    write_run(first, tiny_dir, rows, memory_dir=snapshots.attempt(JOB, 1), checkpoint=steps, **AXES)
    at_step_8 = killed_after(lambda type, fields: type == "metrics" and fields["step"] == 8)
    assert run(first, prepare=at_step_8) == -signal.SIGKILL, log(first)
    assert at(first) == [4] and not notices(first)
    (left,) = store.newest_first(path / "checkpoints" for path in snapshots.left(JOB))
    assert left.step in (6, 7), "at most the step under way, and a snapshot that was not complete"

    def ends(name: str) -> str:
        again = first.with_name(name)
        write_run(again, tiny_dir, rows, resume_from=[*snapshots.left(JOB), first], checkpoint=steps, **AXES)
        assert run(again) == EXIT_OK, events(again)[-1]
        assert events(again, "resumed")[0]["step"] == left.step
        return weights(again)

    assert ends("from-memory") == calm
    assert snapshots.bring_down(JOB, first) == left.path.name
    assert snapshots.jobs() == [], "its memory is free"
    assert ends("from-disk") == calm


def test_the_disk_is_written_beside_the_steps(tiny_dir: Path, rows: Path, calm: str, tmp_path: Path) -> None:
    """With snapshots as often as they are cheap. Where memory cannot be had the run goes on without, and says so."""
    made = tmp_path / "made"
    write_run(made, tiny_dir, rows, memory_dir=tmp_path / "memory", checkpoint={"save_steps": 4}, **AXES)
    assert run(made) == EXIT_OK, events(made)[-1]
    assert at(made) == [4, 8] and weights(made) == calm and not notices(made)
    assert [one.step for one in store.newest_first([made / "checkpoints"])] == [8, 4]
    (tmp_path / "file").touch()
    without = tmp_path / "without"
    write_run(without, tiny_dir, rows, memory_dir=tmp_path / "file" / "memory", checkpoint={"save_steps": 4}, **AXES)
    assert run(without) == EXIT_OK, events(without)[-1]
    assert at(without) == [4, 8] and weights(without) == calm
    (told,) = notices(without)
    assert told["code"] == "no_snapshots" and "cannot be made: Not a directory" in told["message"]


def filled(root: Path, name: str, content: bytes = b"weights") -> Path:
    return store.write(root / "checkpoints", name, lambda folder: (folder / "a.weights").write_bytes(content) and None)


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    (tmp_path / "memory").mkdir()
    found = Snapshots(tmp_path / "memory", tmp_path)
    assert found.open() is None
    (tmp_path / "attempt-1").mkdir()
    return found


def test_only_what_is_further_and_whole_is_brought_down(snapshots: Snapshots, tmp_path: Path) -> None:
    memory, folder = snapshots.attempt(JOB, 1), tmp_path / "attempt-1"
    filled(folder, "step-00000004")
    filled(memory, "step-00000004", b"as far as the disk")
    assert snapshots.bring_down(JOB, folder) is None and snapshots.jobs() == []

    filled(memory, "step-00000005")
    torn = filled(memory, "step-00000006")
    (torn / "a.weights").write_bytes(b"weighty")
    (memory / "checkpoints" / "tmp-step-00000007-1").mkdir()
    assert snapshots.bring_down(JOB, folder) == "step-00000005" and snapshots.jobs() == []
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]
    assert store.fault(folder / "checkpoints" / "step-00000005") is None


def test_what_the_disk_has_no_room_for_stays_in_memory(snapshots: Snapshots, tmp_path: Path) -> None:
    folder = tmp_path / "attempt-1"
    filled(snapshots.attempt(JOB, 1), "step-00000005", b"w" * 5000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert snapshots.bring_down(JOB, folder) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((folder / "checkpoints").iterdir())
    assert snapshots.left(JOB) == [snapshots.attempt(JOB, 1)], "the next attempt finds it"
    assert snapshots.bring_down(JOB, folder) == "step-00000005"


def test_a_folder_that_others_may_read_is_not_used_and_an_empty_one_goes(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, tmp_path)
    assert snapshots.open() is None
    (made,) = tmp_path.iterdir()
    kept = snapshots.attempt(JOB, 1)
    kept.mkdir(parents=True)
    snapshots.close()
    assert kept.is_dir(), "a later worker brings it to the disk"
    snapshots.forget(JOB)
    snapshots.close()
    assert not made.exists()
    assert snapshots.open() is None
    made.chmod(0o755)
    assert "not a folder of this user alone" in (snapshots.open() or "")
    made.rmdir()
    made.symlink_to(tmp_path)
    assert "not a folder of this user alone" in (snapshots.open() or "")
    assert "cannot be made" in (Snapshots(tmp_path / "gone", tmp_path).open() or "")
