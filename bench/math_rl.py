"""Whether the cookbook's `math_rl` learns arithmetic here: `python -m bench.math_rl --model DIR`.

The recipe is the wheel's own module, unmodified: additions of two numbers up to 100, reward 1 for the right sum,
through the `tinker` SDK against a real service. DIR has a small instruct model whose chat format is ChatML. A model of
135M parameters is almost never right, so that nothing could be learned from its samples: the cookbook's own `chat_sl`
first fine-tunes it on a few sums as `math_rl` asks them, and `math_rl` starts from that checkpoint
(`load_checkpoint_path`). The reward of a step is that of its samples, drawn before it is trained on them. The last
steps are held against the first ones; the verdict is that their mean is higher by more than three standard errors of
the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tests.support import cookbook
from tests.support.service import ROOT, Service

REPORT = ROOT / "bench" / "results" / "math-rl.json"
REWARD = "env/all/reward/total"
ERRORS = 3.0


def verdict(rewards: list[float], few: int) -> dict[str, float | bool]:
    """Means of the first and the last `few` steps, and whether the reward has risen."""
    first, last = rewards[:few], rewards[-few:]
    error = math.sqrt(statistics.variance(first) / few + statistics.variance(last) / few)
    rise = statistics.mean(last) - statistics.mean(first)
    found = {"first": statistics.mean(first), "last": statistics.mean(last), "standard_error": error}
    return {name: round(value, 4) for name, value in found.items()} | {"rose": rise > ERRORS * error}


def sums(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of as many sums, in the form in which the recipe asks."""
    draw = random.Random(1)  # noqa: S311
    pairs = [(draw.randint(0, 100), draw.randint(0, 100)) for _ in range(count)]
    asked = [(f"What is {x} + {y}?", str(x + y)) for x, y in pairs]
    before = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
    return [
        {"messages": [*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in asked
    ]


def tuned(service: Service, overlay: Path, rows: int, rate: float, seconds: float) -> str:
    """The path of the checkpoint that `chat_sl` makes of so many sums. SystemExit where the recipe fails."""
    cookbook.write(overlay / "sums.jsonl", sums(rows))
    log = service.folder / "chat_sl"
    row = (
        f"chat_sl.train dataset=sums.jsonl train_on_what=last_assistant_message lora_rank=16 batch_size=8 "
        f"learning_rate={rate} eval_every=0"
    )
    code, output = cookbook.run(service, overlay, row, log, seconds)
    if code:
        raise SystemExit(output[-4000:])
    losses = [step["train_mean_nll"] for step in cookbook.metrics(log) if "train_mean_nll" in step]
    print(f"chat_sl: {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    *_, last = (json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines())
    return str(last["state_path"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.math_rl", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of each question")
    parser.add_argument("--few", type=int, default=5, help="steps at either end that are compared")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--sft-rows", type=int, default=160, help="sums that the model is fine-tuned on before")
    parser.add_argument("--sft-rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=3600)
    given = parser.parse_args()
    row = (
        f"math_rl.train loss_fn=importance_sampling lora_rank=16 max_tokens=5 group_size={given.samples} "
        f"groups_per_batch={given.groups} learning_rate={given.learning_rate} max_steps={given.steps} eval_every=0 "
        "save_every=0"
    )
    with tempfile.TemporaryDirectory() as folder:
        service, overlay = cookbook.started(Path(folder), model=given.model, exact=False)
        try:
            start = tuned(service, overlay, given.sft_rows, given.sft_rate, given.seconds)
            log = service.folder / "math_rl"
            whole_row = f"{row} load_checkpoint_path={start}"
            code, output = cookbook.run(service, overlay, whole_row, log, given.seconds)
            steps = cookbook.metrics(log)
        finally:
            service.stop()
    if code:
        print(output[-4000:])
        return code if code > 0 else 1
    rewards = [step[REWARD] for step in steps if REWARD in step]
    for number, reward in enumerate(rewards):
        print(f"step {number:3}   reward {reward:.3f}")
    found = verdict(rewards, given.few)
    facts = {"bench": "math_rl", "cookbook": "0.6.1", "model": given.model.name, "row": row, "steps": len(rewards)}
    facts |= {"sft_rows": given.sft_rows, "sft_rate": given.sft_rate}
    whole = facts | found | {"rewards": [round(reward, 4) for reward in rewards]}
    REPORT.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(facts | found))
    return 0 if found["rose"] else 1


if __name__ == "__main__":
    sys.exit(main())
