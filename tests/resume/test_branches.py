"""A job that begins with a checkpoint of another one: unchanged it ends with the same weights, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.base.files import sha256
from core.spec.run.exit_codes import EXIT_FAILED, EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.manifest import MANIFEST
from core.train.base.stop import Stop
from tests.resume.test_resume import AXES, StopAt
from tests.support.trainer import events, notices, pairs, run, weights, write_rows, write_run

KEPT: dict[str, Any] = AXES | {"checkpoint": {"save_steps": 2, "keep_last": 9}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(27))


@pytest.fixture(scope="module")
def first(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept a checkpoint of every second step, and one inside of step 3."""
    folder = tmp_path_factory.mktemp("first")
    left = write_run(folder / "left", tiny_dir, rows, **KEPT)
    run(left, StopAt(11, left))
    done = write_run(folder / "done", tiny_dir, rows, resume_from=[left], **KEPT)
    assert run(done, Stop()) == EXIT_OK, events(done)[-1]
    return done


def branch(folder: Path, model: Path, rows: Path, begins: Path, /, *changed: str, **axes: Any) -> Path:
    """A run that begins with the checkpoint."""
    made = write_run(folder, model, rows, **axes)
    order = json.loads((made / ORDER_FILE).read_bytes())
    point = {"job": "job-before", "folder": str(begins), "sha256": sha256(begins / MANIFEST)}
    order["resume_point"] = point | {"changed": list(changed)}
    (made / ORDER_FILE).write_text(json.dumps(order))
    return made


def test_an_unchanged_branch_of_any_checkpoint_ends_with_the_same_weights(
    tiny_dir: Path, rows: Path, first: Path, tmp_path: Path
) -> None:
    inside = [one for one in (first.parent / "left" / "checkpoints").iterdir() if "micro" in one.name]
    assert len(inside) == 1
    for number, checkpoint in enumerate([first / "checkpoints" / "step-00000004", *inside]):
        again = branch(tmp_path / str(number), tiny_dir, rows, checkpoint, **KEPT)
        assert run(again) == EXIT_OK, events(again)[-1]
        assert events(again, "resumed")[0]["path"] == str(checkpoint)
        assert weights(again) == weights(first), checkpoint.name
    # What goes on from the branch uses the branch's own checkpoint, not the one that it began with.
    last = branch(tmp_path / "retry", tiny_dir, rows, first / "checkpoints" / "step-00000004", **KEPT)
    order = json.loads((last / ORDER_FILE).read_bytes())
    (last / ORDER_FILE).write_text(json.dumps(order | {"resume_from": [str(tmp_path / "0")]}))
    assert run(last) == EXIT_OK, events(last)[-1]
    assert events(last, "resumed")[0]["step"] == 8
    assert weights(last) == weights(first)


def test_a_branch_takes_another_learning_rate_and_other_rows(
    tiny_dir: Path, rows: Path, first: Path, tmp_path: Path
) -> None:
    checkpoint = first / "checkpoints" / "step-00000004"
    slower = KEPT | {"optimizer": {"learning_rate": 1e-3}}
    made = branch(tmp_path / "slower", tiny_dir, rows, checkpoint, "optimizer.learning_rate", **slower)
    assert run(made) == EXIT_OK, events(made)[-1]
    before, after = ({event["step"]: event["values"] for event in events(one, "metrics")}[5] for one in (first, made))
    assert after["loss"] == before["loss"], "the same weights over the same rows"
    assert after["learning_rate"] == pytest.approx(before["learning_rate"] / 10) and weights(made) != weights(first)

    others = write_rows(tmp_path / "others.jsonl", [{**one, "completion": " y"} for one in pairs(11)])
    made = branch(tmp_path / "rows", tiny_dir, others, checkpoint, "data.train.path", **KEPT)
    assert run(made) == EXIT_OK, events(made)[-1]
    assert [event["step"] for event in events(made, "metrics")] == [5, 6, 7, 8, 9]
    # Said of the same rows, other rows are found out.
    wrong = branch(tmp_path / "wrong", tiny_dir, others, checkpoint, **KEPT)
    assert run(wrong) == EXIT_FAILED
    assert events(wrong, "error")[0]["code"] == "checkpoint_mismatch"


def test_a_branch_begins_with_that_checkpoint_or_not_at_all(
    tiny_dir: Path, rows: Path, first: Path, tmp_path: Path
) -> None:
    short = KEPT | {"training": KEPT["training"] | {"max_steps": 4}}
    far = branch(tmp_path / "far", tiny_dir, rows, first / "checkpoints" / "step-00000004", **short)
    assert run(far) == EXIT_FAILED and events(far, "error")[0]["code"] == "checkpoint_too_far"
    copy = tmp_path / "step-00000004"
    copy.mkdir()
    for file in (first / "checkpoints" / "step-00000004").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damaged = branch(tmp_path / "damaged", tiny_dir, rows, copy, **KEPT)
    file = copy / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert run(damaged) == EXIT_FAILED
    (error,) = events(damaged, "error")
    assert error["code"] == "checkpoint_gone" and "SHA-256" in error["message"]
    assert not any(path.name.startswith("bad-") for path in tmp_path.iterdir()), "another job's are left as they are"


def test_checkpoints_are_kept_by_evaluation_and_withheld_beyond_a_bound(
    tiny_dir: Path, rows: Path, tmp_path: Path
) -> None:
    held = write_rows(tmp_path / "held.jsonl", pairs(4))
    worse = KEPT | {
        "optimizer": {"learning_rate": 0.3},
        "evaluation": {"eval_steps": 1},
        "checkpoint": {"save_steps": 1, "keep_last": 1, "keep_best": 2},
    }
    made = write_run(tmp_path / "best", tiny_dir, rows, held_out=held, **worse)
    assert run(made) == EXIT_OK, events(made)[-1]
    losses = {event["step"]: event["values"]["eval_loss"] for event in events(made, "evaluation") if event["step"]}
    left = {int(path.name[5:13]) for path in (made / "checkpoints").iterdir()}
    judged = [step for step in sorted(losses, key=lambda step: losses[step]) if step < 8]
    assert left == {8, *judged[:2]}, (losses, left)

    bound = sorted(losses.values())[0] / 2
    worse["checkpoint"] = {"save_steps": 1, "metric_bound": bound}
    made = write_run(tmp_path / "bound", tiny_dir, rows, held_out=held, **worse)
    assert run(made) == EXIT_OK, events(made)[-1]
    assert not events(made, "checkpoint")
    assert [one["code"] for one in notices(made)] == ["checkpoint_withheld"]


def test_a_run_over_other_rows_or_another_base_is_refused(
    tiny_dir: Path, rows: Path, first: Path, tmp_path: Path
) -> None:
    """Rows of the same lengths would not be noticed otherwise. Another place in memory is no reason."""
    swapped = [{**one, "completion": one["completion"].replace("x", "z")} for one in pairs(27)]
    others = write_rows(tmp_path / "others.jsonl", swapped)
    left = first.parent / "left"
    made = write_run(tmp_path / "others", tiny_dir, others, resume_from=[left], **KEPT)
    assert run(made) == EXIT_FAILED
    (error,) = events(made, "error")
    assert error["code"] == "drift_refused" and "data.train" in error["message"]

    moved = KEPT | {"memory": {"offload_optimizer": "host"}}
    made = write_run(tmp_path / "moved", tiny_dir, rows, resume_from=[left], **moved)
    order = json.loads((made / ORDER_FILE).read_bytes())
    order["model_source"] |= {"commit": "0123"}  # the source had no commit, so that none was remembered
    (made / ORDER_FILE).write_text(json.dumps(order))
    assert run(made) == EXIT_OK and weights(made) == weights(first)
    (resumed,) = events(made, "resumed")
    assert {one["verdict"] for one in resumed["drift"]} == {"allow"} and resumed["result"] == "same"
    assert "drift" not in [one["code"] for one in notices(made)]
