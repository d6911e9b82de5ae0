"""Losses of AdamW with 8-bit means beside those of AdamW: `python -m bench.adamw_8bit [--seeds 3] [--steps 200]`.

The trainer itself trains the rows of `examples/voice-intents` (those of `bench.quality`) with each optimizer and each
seed; a seed draws the adapters and the order of the rows. Two figures of a run: the mean loss of its last tenth of the
steps, and the loss of the held-out rows after the last. The noise is the standard deviation of AdamW's figure over the
seeds; the difference is that of the pairs of one seed, and its mean is to be within the noise. `adamw_4bit` can be
compared as well (`--optimizer`).

The default model is SmolLM2-135M-Instruct with LoRA; `--model tiny` is the model of the tests, trained whole. Tensors
of fewer than 4,096 numbers keep float32 means, so adapters of a low rank over a small model would compare nothing: the
share of quantised numbers is told. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import wheel
from bench.qlora import Tee, quiet
from bench.report import finish, hardware
from core.plan.optimizers import QUANTISED_FROM

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "voice-intents"
FIGURES = ("last losses", "held-out loss")


def train(folder: Path, model_dir: Path, optimizer: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one run."""
    from core.spec.run.folder import EVENTS_FILE
    from core.train.recipe import run
    from tests.support.trainer import write_run

    method: dict[str, Any] = {"type": "full"} if args.method == "full" else {"type": "lora", "r": 16}
    run_dir = write_run(
        folder,
        model_dir,
        EXAMPLE / "train.jsonl",
        held_out=EXAMPLE / "heldout.jsonl",
        method=method,
        optimizer={"type": optimizer, "learning_rate": args.learning_rate},
        training={
            "max_steps": args.steps, "per_device_train_batch_size": args.batch, "max_length": 128, "seed": seed,
        },
        evaluation={"type": "held_out", "at_start": False, "per_device_eval_batch_size": 32},
        resources={"accelerator": "cpu"},
    )  # fmt: skip
    with redirect_stdout(sys.stderr):  # its steps are not for the report
        code = run(run_dir)
    lines = [json.loads(line) for line in (run_dir / EVENTS_FILE).read_text().splitlines()]
    if code != 0:
        raise SystemExit(f"the run ended with {code}: {lines[-1]}")
    losses = [line["values"]["loss"] for line in lines if line["type"] == "metrics" and "loss" in line["values"]]
    assert len(losses) == args.steps, f"{len(losses)} losses of {args.steps} steps"
    last = losses[-max(1, args.steps // 10) :]
    return {FIGURES[0]: statistics.fmean(last), FIGURES[1]: float(lines[-1]["result"]["eval_after"]["eval_loss"])}


def quantised_share(model_dir: Path, method: str) -> float:
    """Share of what is trained that has quantised means."""
    from core.spec.axes.method import LoRA
    from core.train.methods.lora import adapt_lora
    from core.train.model.load import load_model

    model: Any = load_model(model_dir, torch.bfloat16)
    if method == "lora":
        model = adapt_lora(model, LoRA(r=16, lora_alpha=32.0))
    sizes = [parameter.numel() for parameter in model.parameters() if method == "full" or parameter.requires_grad]
    return sum(size for size in sizes if size >= QUANTISED_FROM) / sum(sizes)


def compare(ours: list[float], adamw: list[float]) -> dict[str, Any]:
    """The pairs' mean difference beside the noise of AdamW."""
    gaps = [one - other for one, other in zip(ours, adamw, strict=True)]
    noise, gap = statistics.stdev(adamw), statistics.fmean(gaps)
    return {
        "ours": statistics.fmean(ours), "peer": statistics.fmean(adamw), "difference": gap, "noise": noise,
        "difference_min": min(gaps), "difference_max": max(gaps), "within_noise": abs(gap) <= noise,
        "ours_by_seed": ours, "peer_by_seed": adamw, "hardware": hardware(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder")
    parser.add_argument("--method", choices=("lora", "full"), help="default: full for tiny, else lora")
    parser.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_4bit"))
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", type=Path, help="default bench/results/<optimizer>-<model>-cpu-<day>.txt")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: noise takes two seeds at least")
    args.method = args.method or ("full" if args.model == "tiny" else "lora")
    quiet()
    if args.model == "tiny":
        from tests.support import models

        model_dir = models.folder() / "tiny"
    else:
        model_dir = wheel.model() if args.model == "smollm2" else Path(args.model)
    name = f"{args.optimizer}-{Path(args.model).name}-cpu-{datetime.now(UTC).date()}.txt"
    with Tee(args.report or ROOT / "bench" / "results" / name):
        print(f"python -m bench.adamw_8bit {' '.join(sys.argv[1:])}".rstrip())
        print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; {model_dir.name}")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        share = quantised_share(model_dir, args.method)
        print(f"{args.method}, {args.steps} steps of {args.batch} rows, {share:.0%} of the means quantised")
        found: dict[str, list[dict[str, float]]] = {"adamw": [], args.optimizer: []}
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(args.seeds):
                for optimizer, runs in found.items():
                    began = time.process_time()
                    runs.append(train(Path(folder) / f"{optimizer}-{seed}", model_dir, optimizer, seed, args))
                    words = ", ".join(f"{figure} {value:.4f}" for figure, value in runs[-1].items())
                    print(f"seed {seed}, {optimizer}: {words} ({time.process_time() - began:.0f} s of CPU)")
        results: dict[str, dict[str, Any]] = {}
        for figure in FIGURES:
            of = {optimizer: [each[figure] for each in runs] for optimizer, runs in found.items()}
            results[figure] = compare(of[args.optimizer], of["adamw"]) | {"quantised_share": share}
            one = results[figure]
            print(
                f"{figure}: {args.optimizer} {one['ours']:.4f}, AdamW {one['peer']:.4f}; "
                f"difference {one['difference']:+.4f} ({one['difference_min']:+.4f} to {one['difference_max']:+.4f}, "
                f"{args.seeds} seeds), noise of AdamW {one['noise']:.4f}: "
                f"{'within' if one['within_noise'] else 'NOT within'} it"
            )
        print(f"load average {os.getloadavg()[0]:.2f} after")
        finish(results)


if __name__ == "__main__":
    main()
