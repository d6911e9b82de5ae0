"""Does a model learn to use what an environment says? `python -m bench.episodes_learn [--model DIR] [--steps N]`.

A game of two turns: a number from 2 to 9 is guessed, the environment says where it lies (`It is one more than 4.`), and
the model guesses again. The reward is 1 for the number at either guess, else 0. The first guess is luck, so the reward
can rise far only where the second one follows what the environment has said. `stage: grpo` trains SmolLM2-135M-Instruct
on it as it is, by the program behind `eft train`. The reward of a step is that of its episodes, drawn before it is
trained on them; the last steps are held against the first ones, as in `bench.math_rl`. There are eight games only: the
bench shows that learning reaches across turns, not what is made of it elsewhere.

The exit status is 1 unless the reward has risen by more than three standard errors, and the share of right answers to a
hint with it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import wheel
from bench.math_rl import verdict
from bench.qlora import Tee
from bench.report import Children, finish, hardware
from tests.support.service import ROOT

RESPOND = """
import re

def respond(answers, secret):
    found = re.search(r"[0-9]", answers[-1])
    if found and int(found[0]) == secret:
        return 1.0
    if len(answers) == 2:
        return 0.0
    return f" No. It is one more than {secret - 1}. Guess:"
"""
PROMPT = "Guess a number from 2 to 9. Guess:"
PROMPTS, ANSWERS = 8, 6
"""Prompts of a step, and episodes to each."""


def job(model: Path, folder: Path, given: argparse.Namespace) -> Path:
    """The job's file, beside its rows."""
    rows = [{"prompt": PROMPT, "secret": 2 + at % 8} for at in range(given.steps * PROMPTS)]
    (folder / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    document = {
        "version": 1,
        "model": str(model),
        "data": {
            "train": {"type": "path", "path": str(folder / "games.jsonl"), "format": "prompt"},
            "rendering": {"type": "model", "pairs": "joined"},
        },
        "stage": {
            "type": "grpo",
            "num_generations": ANSWERS,
            "max_completion_length": 32,
            "environment": {"type": "python", "source": RESPOND, "max_turns": 2, "max_turn_length": 2},
            "reward": ["environment"],
            "slots": PROMPTS * ANSWERS,
        },
        "method": {"type": "lora", "r": 16},
        "optimizer": {"learning_rate": given.rate},
        "schedule": "constant",
        "training": {
            "max_steps": given.steps,
            "max_length": 64,
            "precision": "fp32",
            "per_device_train_batch_size": PROMPTS * ANSWERS,
        },
        "evaluation": "none",
    }
    path = folder / "job.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def after_hints(episodes: list[dict[str, Any]]) -> float:
    """Share of episodes of two turns whose second guess is right."""
    answered = [one for one in episodes if len(one["turns"]) > 1]
    return sum(one["rewards"]["environment"] == 1 for one in answered) / max(len(answered), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder (default: SmolLM2-135M-Instruct from the demo's wheel)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--few", type=int, default=4, help="steps at either end that are compared")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    model = (given.model or wheel.model()).absolute()
    spent = Children()
    with tempfile.TemporaryDirectory(prefix="eft-episodes-") as name:
        folder, output = Path(name), Path(name) / "run"
        command = [sys.executable, "-m", "core.train.entry.cli", "--spec", str(job(model, folder, given)), "--offline"]
        command += ["--output", str(output), "--models-dir", str(folder / "models")]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-4000:], file=sys.stderr)
            return 1
        told = next(output.rglob("rollouts.jsonl")).read_text(encoding="utf-8").splitlines()
    steps: list[list[dict[str, Any]]] = [[] for _ in range(given.steps)]
    for line in told:
        episode = json.loads(line)
        steps[episode["rollout"]].append(episode)
    rewards = [sum(one["reward"] for one in step) / len(step) for step in steps]
    hints = [after_hints([one for step in part for one in step]) for part in (steps[: given.few], steps[-given.few :])]
    found = verdict(rewards, given.few) | {"hints_first": round(hints[0], 4), "hints_last": round(hints[1], 4)}
    with Tee(given.report or ROOT / "bench" / "results" / f"episodes-learn-cpu-{datetime.now(UTC).date()}.txt"):
        print(f"{model.name}; {hardware()}; {given.steps} steps of {PROMPTS} games with {ANSWERS} episodes each")
        for number, reward in enumerate(rewards):
            print(f"step {number:3}   reward {reward:.3f}")
        print(f"mean of the first and last {given.few} steps {found['first']:.3f}, {found['last']:.3f}")
        print(f"right answers to a hint in them          {hints[0]:.3f}, {hints[1]:.3f}")
        print(f"CPU seconds of all processes {spent.processor:.0f}")
        facts = {"steps": given.steps, "rate": given.rate, "cpu_seconds": round(spent.processor)}
        finish({"episodes_learn": found | facts | {"hardware": hardware()}})
    return 0 if found["rose"] and hints[1] > hints[0] else 1


if __name__ == "__main__":
    sys.exit(main())
