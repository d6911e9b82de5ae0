"""Which recipes of Tinker's cookbook run against the service: `python -m bench.cookbook [--only NAME …]`.

Each recipe is the wheel's own module, unmodified, in an environment of its own, against a real service with a small
model: docs/tinker.md. It has run when it ends by itself with exit status 0 and has made the steps that were asked for.
The report, with the metrics of the last step, is bench/results/cookbook.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import cookbook
from tests.support.cookbook import MODEL
from tests.support.service import ROOT, Service

REPORT = ROOT / "bench" / "results" / "cookbook.json"
SMALL = "lora_rank=4 max_tokens=4 group_size=2 max_steps=2"
RL = f"{SMALL} groups_per_batch=4 eval_every=0 save_every=2"
MATH = f"math_rl.train {RL} loss_fn=importance_sampling"
STEERED = "renderer_name=qwen3_instruct group_size=2 batch_size=2 max_tokens=4 max_steps=1 eval_every=0"
DISTILLED = "distillation.on_policy_distillation"
ROWS = {
    "sl_loop": "sl_loop batch_size=8 max_steps=4 save_every=2 lora_rank=4 learning_rate=0.01",
    "chat_sl": "chat_sl.train dataset=no_robots batch_size=8 max_steps=3 lora_rank=4",
    "rl_loop importance_sampling": f"rl_loop {SMALL} loss_fn=importance_sampling batch_size=4",
    "rl_loop cispo": f"rl_loop {SMALL} loss_fn=cispo batch_size=4",
    "rl_loop gspo": f"rl_loop {SMALL} loss_fn=gspo batch_size=4",
    "math_rl": MATH,
    "math_rl ppo": f"{MATH} loss_fn=ppo num_substeps=2 compute_post_kl=True",
    "math_rl cispo": f"{MATH} loss_fn=cispo",
    "math_rl off policy": f"{MATH} max_steps_off_policy=2",
    "math_rl stream": f"{MATH} stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2",
    "guess_number": f"multiplayer_rl.guess_number.train {STEERED}",
    "shorter": f"preference.shorter.train {STEERED}",
    "dpo": "preference.dpo.train dataset=hhh batch_size=8 max_steps=2",
    "on_policy_distillation": f"{DISTILLED} {RL} dataset=deepmath teacher_model={MODEL}",
    "on_policy_distillation tulu3": f"{DISTILLED} {RL} dataset=tulu3 teacher_model={MODEL}",
    "on_policy_multi_teacher": f"distillation.on_policy_multi_teacher {SMALL} eval_every=0 deepmath_groups_per_batch=2 "
    f"tulu3_groups_per_batch=2 deepmath_teacher_model={MODEL} tulu3_teacher_model={MODEL}",
    "prompt_distillation": "prompt_distillation.train file_path=distillation.jsonl batch_size=8 max_steps=2",
}
"""Recipes, each with its module below the cookbook's `recipes` and its arguments. The last one for a field holds."""


def tried(service: Service, overlay: Path, name: str, seconds: float) -> dict[str, Any]:
    """What a recipe came to."""
    log = service.folder / "logs" / name.replace(" ", "-")
    began = time.monotonic()
    code, output = cookbook.run(service, overlay, ROWS[name], log, seconds)
    steps = cookbook.metrics(log)
    found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - began, 1), "steps": len(steps)}
    if steps:
        found["last"] = told({name: value for step in steps for name, value in step.items()})
    if code:
        found["output"] = output[-1500:]
    return found


def told(newest: dict[str, Any]) -> dict[str, float]:
    """Metrics that say what was learned, of the newest of each."""
    words = ("nll", "loss", "reward/total", "kl_sample_train", "accuracy", "teacher_kl")
    kept = {name: value for name, value in newest.items() if any(word in name for word in words)}
    return {name: round(value, 9) for name, value in kept.items() if isinstance(value, int | float)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cookbook", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ROWS), metavar="NAME", choices=list(ROWS))
    parser.add_argument("--seconds", type=float, default=600, help="time for one recipe")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(REPORT.read_text())["recipes"] if REPORT.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        service, overlay = cookbook.started(Path(folder))
        try:
            for name in given.only:
                found[name] = tried(service, overlay, name, given.seconds)
                print(f"{name:32} exit {found[name]['exit']} {found[name]['seconds']:6.1f} s", flush=True)
                if "output" in found[name]:
                    print(found[name]["output"], flush=True)
                whole = {"bench": "cookbook", "cookbook": "0.6.1", "sdk": "0.38.0", "recipes": found}
                REPORT.write_text(json.dumps(whole, indent=1) + "\n")
        finally:
            service.stop()
    ended = sum(one["exit"] == 0 for one in found.values())
    print(json.dumps({"bench": "cookbook", "recipes": len(found), "ended": ended}))


if __name__ == "__main__":
    main()
