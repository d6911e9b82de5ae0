"""`eft train` without a server: the same order, the same child, a folder that goes on where it was stopped.

docs/qlora.md shows it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.entry import cli
from tests.support.trainer import ENVIRONMENT, ROOT, Forked, chats, events, log, wait_until, weights_file, write_rows

STEPS = 48


def command(model: Path, train: Path, held: Path, output: Path, steps: int, *more: str) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "core.train.entry.cli",
            str(model),
            str(train),
            "--eval",
            str(held),
            "--method",
            "qlora",
        ),
        *("--set", f"training.max_steps={steps}", "--set", "training.max_length=64", "--set", "method.r=4"),
        *("--set", "training.per_device_train_batch_size=2", "--set", "optimizer.learning_rate=1e-3"),
        *("--output", str(output), "--models-dir", str(output.parent / "models"), "--offline", *more),
    ]


def test_a_run_by_hand_is_interrupted_and_goes_on(tmp_path: Path, tiny_dir: Path) -> None:
    train, held = write_rows(tmp_path / "train.jsonl", chats(20)), write_rows(tmp_path / "held.jsonl", chats(5))
    environment = os.environ | ENVIRONMENT
    for turn in range(10):  # one that ends before it is interrupted has shown nothing
        output = tmp_path / f"turn-{turn}" / "out"
        line = command(tiny_dir, train, held, output, STEPS, "--json")
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda output=output: len(events(output, "metrics")) >= 5, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=250)
        if process.returncode != EXIT_OK:
            break
    assert process.returncode == EXIT_CHECKPOINTED, told.decode()
    assert b"the same command continues" in told
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)
    assert answer["steps"] == STEPS
    assert answer["eval_after"]["eval_loss"] < answer["eval_before"]["eval_loss"]
    assert Path(answer["adapter"], "adapter_model.safetensors").samefile(weights_file(output))
    assert len(events(output, "resumed")) == 1
    sources = [event["record"]["quantization"]["source"] for event in events(output, "run_record")]
    assert sources == ["quantised", "cache"]

    code, said = forked(tmp_path, *command(tiny_dir, train, held, output, 3)[3:])
    assert code == 1
    assert "holds another run" in said


def forked(folder: Path, *arguments: str) -> tuple[int, str]:
    """The command line as a fork of this process, which has imported what it needs: its exit status, and what it said
    there, on one line."""

    def become() -> int:
        sys.argv = [cli.__file__, *arguments]
        return cli.main()

    (folder / "log.txt").unlink(missing_ok=True)
    return Forked(folder, program=become).wait(), " ".join(log(folder).split())


def test_mistakes_are_told_in_words(tmp_path: Path) -> None:
    def told(*arguments: str) -> str:
        code, said = forked(tmp_path, *arguments, "--output", str(tmp_path / "out"))
        assert code == 1
        assert "Traceback" not in said
        return said

    assert "did you mean `lora`" in told("some/model", "rows.jsonl", "--method", "lore")
    assert "the steps of packed weights" in told(
        "some/model", "rows.jsonl", "--method", "full", "--set", "quantization=nf4"
    )
    assert "rows.jsonl is not a file" in told("some/model", str(tmp_path / "rows.jsonl"))
