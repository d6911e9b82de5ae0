"""Does reinforcement learning teach a real model sums? `python -m bench.grpo_learns [--steps N] [--report FILE]`.

Submits a pipeline of two jobs to a service of its own (`eft submit --wait`): a short supervised fine-tuning, from which
SmolLM2-135M learns how an answer looks, then `stage: grpo` over the same adapter, whose reward is 1 for the right sum
and else 0. Training prompts and held-out prompts are different sums. Held-out rewards are those of greedy answers; the
report has them for every evaluation, and a second computation from the downloaded adapter with plain transformers.

The exit status is 1 unless the held-out reward rises from below 0.3 to above 0.6, the second computation agrees within
0.03, and all processes together took at most 60 minutes of CPU time (30 minutes of two cores). The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import wheel
from bench.chain import Row, eft, model_folder
from bench.qlora import Tee
from bench.report import finish, hardware
from tests.support.service import ROOT, Service

HELD_OUT = 100
PLAIN = {"type": "model", "pairs": "apart"}
BELOW, ABOVE, AGREES, CPU_SECONDS = 0.3, 0.6, 0.03, 3600
NEW_TOKENS = 6


def sums(count: int, seed: int = 3) -> list[tuple[str, str]]:
    """Different sums of two numbers of two digits: question and answer."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)  # noqa: S311
    return [(f"What is {a} + {b}? Answer:", f" {a + b}") for a, b in every[:count]]


def write(path: Path, rows: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


def pipeline(model: Path, folder: Path, given: argparse.Namespace) -> Path:
    """The pipeline's file, beside the rows of its jobs."""
    every = sums(HELD_OUT + given.sft_rows + given.steps * given.prompts)
    held, first, rest = every[:HELD_OUT], every[HELD_OUT:][: given.sft_rows], every[HELD_OUT + given.sft_rows :]
    training = {"max_length": 64, "precision": "fp32"}
    document = {
        "version": 1,
        "name": "format then reward",
        "steps": [
            {
                "name": "format",
                "job": {
                    "model": {"type": "gguf", "path": str(model)} if model.is_file() else str(model),
                    "data": {
                        "train": write(folder / "sft.jsonl", [{"prompt": q, "completion": a} for q, a in first]),
                        "rendering": PLAIN,
                    },
                    "stage": "sft",
                    "method": {"type": "lora", "r": 16},
                    "optimizer": {"learning_rate": given.sft_rate},
                    "training": {"num_train_epochs": 1, "per_device_train_batch_size": 8, **training},
                },
            },
            {
                "name": "reward",
                "job": {
                    "data": {
                        "train": write(folder / "prompts.jsonl", [{"prompt": q, "reference": a} for q, a in rest]),
                        "eval": write(folder / "held-out.jsonl", [{"prompt": q, "reference": a} for q, a in held]),
                        "rendering": PLAIN,
                    },
                    "stage": {
                        "type": "grpo",
                        "num_generations": given.answers,
                        "max_completion_length": NEW_TOKENS,
                        "reward": ["exact"],
                        "slots": 64,
                    },
                    "optimizer": {"learning_rate": given.rate},
                    "schedule": "constant",
                    "training": {
                        "per_device_train_batch_size": 32,
                        "gradient_accumulation_steps": given.prompts * given.answers // 32,
                        **training,
                    },
                    "evaluation": {"eval_steps": given.every},
                },
            },
        ],
    }
    path = folder / "pipeline.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def by_transformers(model_dir: Path, adapter: Path) -> float:
    """Share of the held-out sums that are right, greedy and one at a time, up to the first end token."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, adapter).eval()
    right = 0
    for question, answer in sums(HELD_OUT):
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        out = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right += text.strip() == answer.strip()
    return right / HELD_OUT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: SmolLM2-135M from the demo's wheel)")
    parser.add_argument("--report", type=Path, help="file for the report")
    parser.add_argument("--steps", type=int, default=16, help="steps of grpo")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=16, help="answers to a prompt")
    parser.add_argument("--every", type=int, default=8, help="steps between evaluations")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate of grpo")
    parser.add_argument("--sft-rows", type=int, default=32)
    parser.add_argument("--sft-rate", type=float, default=2e-4)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped on the way out
    return _bench(given)


def _bench(given: argparse.Namespace) -> int:
    model = (given.model or wheel.gguf()).absolute()
    with tempfile.TemporaryDirectory(prefix="eft-learns-") as name:
        folder = Path(name)
        usual = {"EFT_LEASE_SECONDS": "90", "EFT_RENEW_SECONDS": "15", "EFT_FENCE_SECONDS": "60"}
        roots = {"EFT_MODEL_ROOTS": str(model.parent), "EFT_OFFLINE": "true", "EFT_NODE": "learns"}
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        rows = folder / "rows"
        rows.mkdir()
        service = Service(folder, usual | roots | {"OMP_NUM_THREADS": threads})
        try:
            service.start()
            began = time.monotonic()
            done = eft(service, "submit", str(pipeline(model, rows, given)), "--wait", "--json")
            took = time.monotonic() - began
            found = json.loads(done.stdout) if done.stdout else None
            if found is None or found["status"] != "succeeded":
                print(done.stdout, done.stderr, file=sys.stderr)
                return 1
            sft, grpo = (service.job(step["job"]) for step in found["steps"])
            told = service.client.get(f"/jobs/{grpo['id']}/events", params={"format": "json", "limit": 1000}).json()[
                "data"
            ]
            evaluations = [(one["data"]["step"], one["data"]["values"]) for one in told if one["type"] == "evaluation"]
            base, into = model_folder(service, sft["id"]), folder / "adapter"
            fetched = eft(service, "download", grpo["id"], "adapter", "--output", str(into))
            if fetched.returncode != 0:
                raise SystemExit(fetched.stderr)
            again = by_transformers(base, into / "adapter")
        finally:
            service.stop()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "eval_reward": {step: values["eval_reward"] for step, values in evaluations},
        "eval_reward_by_transformers": again,
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "train_seconds": [round(job["result"]["train_seconds"], 1) for job in (sft, grpo)],
        "steps": [job["result"]["steps"] for job in (sft, grpo)],
        "seconds": round(took, 1),
        "threads": threads,
        "hardware": hardware(),
    } | {name: getattr(given, name) for name in ("prompts", "answers", "rate", "sft_rows", "sft_rate")}
    with Tee(given.report or ROOT / "bench" / "results" / f"grpo-learns-cpu-{datetime.now(UTC).date()}.txt"):
        return _report(figures)


def _report(found: dict[str, Any]) -> int:
    rewards = list(found["eval_reward"].values())
    print(f"SmolLM2-135M, {HELD_OUT} held-out sums of two numbers of two digits; {found['hardware']}")
    print(f"sft: {found['sft_rows']} rows in {found['steps'][0]} steps; grpo: {found['steps'][1]} steps of", end=" ")
    print(f"{found['prompts']} prompts with {found['answers']} answers each, learning rate {found['rate']:g}")
    for step, reward in found["eval_reward"].items():
        print(f"held-out reward after step {step:>3} of grpo   {reward:.2f}")
    print(f"by plain transformers, at the end       {found['eval_reward_by_transformers']:.2f}")
    print(f"CPU seconds of all processes {found['cpu_seconds']} (allowed: {CPU_SECONDS});", end=" ")
    print(f"{found['seconds']:.0f} s from submit to end with {found['threads']} thread(s)")
    finish({"grpo_learns": found})
    good = rewards[0] < BELOW and rewards[-1] > ABOVE and found["cpu_seconds"] <= CPU_SECONDS
    return 0 if good and abs(rewards[-1] - found["eval_reward_by_transformers"]) <= AGREES else 1


if __name__ == "__main__":
    sys.exit(main())
