"""A chain on a real model, through the service: `python -m bench.chain`.

Submits examples/voice-intents/chain.yaml (`eft submit --wait`) to a service of its own: supervised fine-tuning, then
direct preference optimization, then a reward model, each over the adapter of the step before. The pairs are made from
the example's rows (`pairs`): the right intent of a command against a wrong one.

What the jobs report is computed a second time from the downloaded adapters with plain transformers and PEFT: the share
of held-out commands for which the model, greedy and from the prompt alone, writes exactly the intent, and the share of
held-out pairs whose right answer has the larger score. The exit status is 1 unless both accuracies are at least 0.9,
the two computations of the reward model's accuracy agree, and the exact match rises from step to step.

`--write-pairs` writes the example's two files of pairs anew and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bench import wheel
from bench.qlora import Tee
from bench.report import finish, hardware
from tests.support.service import ROOT, Service

EXAMPLE = ROOT / "examples" / "voice-intents"
PAIRS = {"train.jsonl": ("pairs.jsonl", 2), "heldout.jsonl": ("heldout-pairs.jsonl", 1)}
"""Rows, the pairs that are made from them, and how many of each row."""
ENOUGH = 0.9
NEW_TOKENS = 16
SECONDS = 3600
Row = dict[str, Any]


def pairs(rows: Sequence[Row], each: int) -> list[Row]:
    """`each` pairs of every row: its own intent against others in turn, so that every intent is wrong as often as it
    is right."""
    intents = sorted({row["messages"][-1]["content"] for row in rows})
    found = []
    for number, row in enumerate(rows):
        *prompt, answer = row["messages"]
        place = intents.index(answer["content"])
        for turn in range(each):
            step = 1 + (number // len(intents) * each + turn) % (len(intents) - 1)
            wrong = {"role": "assistant", "content": intents[(place + step) % len(intents)]}
            found.append({"prompt": prompt, "chosen": [answer], "rejected": [wrong]})
    return found


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_pairs() -> None:
    for source, (name, each) in PAIRS.items():
        lines = [json.dumps(row) + "\n" for row in pairs(read(EXAMPLE / source), each)]
        (EXAMPLE / name).write_text("".join(lines), encoding="utf-8")


# --- through the service ---------------------------------------------------------------------------------------------


def submitted(service: Service, model: Path, folder: Path) -> dict[str, Any]:
    """The pipeline at its end, as `eft submit --wait --json` prints it."""
    copy = folder / "example"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    document = yaml.safe_load((copy / "chain.yaml").read_text(encoding="utf-8"))
    document["steps"][0]["job"]["model"] = {"type": "gguf", "path": str(model)} if model.is_file() else str(model)
    (copy / "chain.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    done = eft(service, "submit", str(copy / "chain.yaml"), "--wait", "--json")
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def eft(service: Service, *words: str) -> subprocess.CompletedProcess[str]:
    environment = service.environment | {"EFT_URL": service.note()["url"], "EFT_API_KEY": service.key}
    return subprocess.run(
        [sys.executable, "-m", "eft.cli", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip


def model_folder(service: Service, job_id: str) -> Path:
    reply = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000}).json()["data"]
    found = [event["data"]["result"]["model_dir"] for event in reply if "model_dir" in event["data"].get("result", {})]
    return Path(found[0])


# --- by plain transformers -------------------------------------------------------------------------------------------


def exact_match(model_dir: Path, adapter: Path | None, rows: Sequence[Row]) -> float:
    """Share of rows for which the model, greedy and from the prompt alone, writes the answer and ends."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(adapter or model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    end = tokenizer.eos_token_id
    prompts = [_rendered(tokenizer, row["messages"][:-1], add_generation_prompt=True) for row in rows]
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    written = model.eval().generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=end
    )
    right = 0
    for answer, row in zip(written[:, width:].tolist(), rows, strict=True):
        text = tokenizer.decode(answer[: answer.index(end)]) if end in answer else None
        right += text == row["messages"][-1]["content"]
    return right / len(rows)


def accuracy(model_dir: Path, adapter: Path, rows: Sequence[Row]) -> float:
    """Share of pairs whose chosen answer has the larger score."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    model: Any = PeftModel.from_pretrained(base, adapter).eval()
    right = 0
    with torch.no_grad():
        for row in rows:
            chosen, rejected = (
                float(model(torch.tensor([_rendered(tokenizer, row["prompt"] + row[answer])])).logits)
                for answer in ("chosen", "rejected")
            )
            right += chosen > rejected
    return right / len(rows)


def _rendered(tokenizer: Any, messages: list[Row], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    return ids


# --- the report ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: SmolLM2-135M from the demo's wheel)")
    parser.add_argument("--report", type=Path, help="file for the report")
    parser.add_argument("--write-pairs", action="store_true")
    given = parser.parse_args()
    if given.write_pairs:
        write_pairs()
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped on the way out
    return _bench(given)


def _bench(given: argparse.Namespace) -> int:
    model = (given.model or wheel.gguf()).absolute()
    with tempfile.TemporaryDirectory(prefix="eft-chain-") as name:
        folder = Path(name)
        usual = {"EFT_LEASE_SECONDS": "90", "EFT_RENEW_SECONDS": "15", "EFT_FENCE_SECONDS": "60"}
        roots = {"EFT_MODEL_ROOTS": str(model.parent), "EFT_OFFLINE": "true", "EFT_NODE": "chain"}
        threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        service = Service(folder, usual | roots | {"OMP_NUM_THREADS": threads})
        try:
            service.start()
            began = time.monotonic()
            found = submitted(service, model, folder)
            took = time.monotonic() - began
            if found["status"] != "succeeded":
                print(json.dumps(found, indent=1), file=sys.stderr)
                return 1
            figures = _figures(service, found, folder, took)
        finally:
            service.stop()
    with Tee(given.report or ROOT / "bench" / "results" / f"chain-cpu-{datetime.now(UTC).date()}.txt"):
        return _report(figures)


def _figures(service: Service, found: dict[str, Any], folder: Path, took: float) -> dict[str, Any]:
    sft, dpo, reward = (service.job(step["job"]) for step in found["steps"])
    base = model_folder(service, sft["id"])
    adapters = []
    for job in (sft, dpo, reward):
        into = folder / job["id"]
        done = eft(service, "download", job["id"], "adapter", "--output", str(into))
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        adapters.append(into / "adapter")
    rows, held_out = read(EXAMPLE / "heldout.jsonl"), read(EXAMPLE / "heldout-pairs.jsonl")
    exact = [exact_match(base, adapter, rows) for adapter in (None, *adapters[:2])]
    return {
        "commands": len(rows),
        "pairs": len(held_out),
        "exact_match": exact,
        "rewards/accuracies": dpo["result"]["eval_after"]["eval_rewards/accuracies"],
        "rewards/margins": dpo["result"]["eval_after"]["eval_rewards/margins"],
        "accuracy": reward["result"]["eval_after"]["eval_accuracy"],
        "accuracy_before": reward["result"]["eval_before"]["eval_accuracy"],
        "accuracy_by_transformers": accuracy(base, adapters[2], held_out),
        "steps": [job["result"]["steps"] for job in (sft, dpo, reward)],
        "train_seconds": [round(job["result"]["train_seconds"], 1) for job in (sft, dpo, reward)],
        "seconds": round(took, 1),
        "hardware": hardware(),
    }


def _report(found: dict[str, Any]) -> int:
    exact, again = found["exact_match"], found["accuracy_by_transformers"]
    print(f"{found['commands']} held-out commands, {found['pairs']} held-out pairs; {found['hardware']}")
    print("exact match of what is written   " + " → ".join(f"{value:.3f}" for value in exact) + "   (base, sft, dpo)")
    print(f"dpo: rewards/accuracies          {found['rewards/accuracies']:.3f}")
    print(f"dpo: rewards/margins             {found['rewards/margins']:.3f}")
    print(f"reward: accuracy                 {found['accuracy_before']:.3f} → {found['accuracy']:.3f}")
    print(f"reward: by plain transformers    {again:.3f}")
    print(f"steps {found['steps']}, seconds of training {found['train_seconds']}, of all {found['seconds']:.0f}")
    finish({"chain": found})
    good = min(found["rewards/accuracies"], found["accuracy"]) >= ENOUGH
    return 0 if good and abs(again - found["accuracy"]) < 0.02 and exact[0] < exact[1] < exact[2] else 1


if __name__ == "__main__":
    sys.exit(main())
