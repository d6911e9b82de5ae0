"""Steps of preference stages against TRL's trainers: `python -m bench.preference [--stage dpo] [--method lora]
[--rows FILE] [--model DIR] [--steps N] [--tokens N] [--runs N] [--large] [--report FILE]`.

All train the same adapters from the same weights over the same tokens in the same batches, each in a process of its
own, in turn. All have the reference's log-probabilities before the first step (TRL: `precompute_ref_log_probs`), and
that pass does not count. Ours packs the sequences of a batch end to end; TRL pads them. `shared` is ours with the
prompt of a pair computed once (`batching.share_prompts`, the default), `apart` without. In `kto` it is the prompt of a
row that is computed once, for its own answer and for another row's. Figures:

- trained tokens a second of training step: tokens of both answers of a pair, each with its prompt, without padding. On
  a CPU seconds are the process's own, so that other work on the machine does not count;
- memory beyond the loaded model: the process's peak while it trains less what it had before (on a GPU the allocator's).

`--rows`: preference rows in any form that eft reads (docs/data.md). Without it: pairs of the commands of
`examples/voice-intents`, the right intent against another command's. TRL is given them through core/train/verify, the
module of `eft verify`. For `kto` a pair is two rows, one good and one bad.

`--stage cpt` trains on text: rows with a `text`, by default the sections of this project's documentation. TRL packs the
same documents by itself (`packing=True`), with `loss_type="nll"`, which is the faster of its losses on a CPU.

The default model is SmolLM2-135M-Instruct.
The default setting takes 2 to 4 minutes of one core, `--large` an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import process, wheel
from bench.qlora import Tee
from bench.report import compare, finish, show
from core.train.__main__ import before_torch

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "voice-intents" / "train.jsonl"
SEED = 42
SETTINGS = {
    "small": {"steps": 2, "tokens": 1024, "runs": 2},
    "large": {"steps": 8, "tokens": 4096, "runs": 4},
}


def pairs_of_intents() -> list[dict[str, Any]]:
    """Each command with its intent, and with that of the next command that has another."""
    chats = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    found = []
    for at, chat in enumerate(chats):
        others = (other for other in chats[at + 1 :] + chats[:at] if other[-1] != chat[-1])
        found.append({"prompt": chat[:-1], "chosen": [chat[-1]], "rejected": [next(others)[-1]]})
    return found


def sections() -> list[dict[str, Any]]:
    """Sections of the pages in docs/, each a document."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("[a-q]*.md")))
    return [{"text": f"#{text}"} for text in pages.split("\n#") if len(text) > 100]


def rows_for(stage: str, path: Path | None) -> list[dict[str, Any]]:
    """Rows of the stage's own format."""
    if stage == "cpt" and path is None:
        return sections()
    pairs = pairs_of_intents() if path is None else [json.loads(line) for line in path.read_text().splitlines()]
    if stage != "kto":
        return pairs  # of cpt: texts
    from core.data.checker import RowChecker
    from core.data.faults import Faults
    from core.data.rows import Preference

    found: list[dict[str, Any]] = []
    checker = RowChecker("preference", {}, Faults())
    for number, pair in enumerate(pairs, 1):
        row = checker.row(number, pair)
        assert isinstance(row, Preference), checker.faults.kept
        for answer, label in ((row.chosen, True), (row.rejected, False)):
            found.append({"prompt": _plain(row.prompt), "completion": _plain(answer), "label": label})
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else [turn.as_dict() for turn in value]


# --- one measurement, in a process of its own ------------------------------------------------------------


def write_order(folder: Path, options: argparse.Namespace) -> Path:
    """A run's folder with its order: a step is one batch, packed end to end."""
    from tests.support.trainer import write_run

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_for(options.stage, options.rows)))
    return write_run(
        folder / "run",
        options.model,
        rows,
        stage=options.stage,
        method={"type": options.method, "r": 16, "lora_alpha": 32},
        batching={
            "type": "packed",
            "tokens_per_batch": options.tokens,
            "share_prompts": options.child != "apart",
        },
        training={
            "max_steps": options.steps,
            "max_length": options.length,
            "precision": options.precision,
            "seed": SEED,
        },
    )


class Memory:
    """Bytes beyond what the process (or its allocator on a GPU) held when `begin` was called."""

    def begin(self) -> None:
        import torch

        self._cuda = torch.cuda.is_available()
        if self._cuda:
            self._base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._base = process.resident()
            process.reset_peak()

    def end(self) -> int:
        import torch

        return (torch.cuda.max_memory_allocated() if self._cuda else process.peak()) - self._base


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def ours(options: argparse.Namespace) -> dict[str, float]:
    from core.spec.run.folder import EVENTS_FILE
    from core.train.recipe import run

    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_order(Path(folder), options)
        events = run_dir / EVENTS_FILE
        peak: list[int] = []
        processor: list[float] = []

        def watch() -> None:
            """The model is loaded once the first of these phases begins; saving is not training."""
            begun = False
            while not peak:
                text = events.read_text() if events.exists() else ""
                if not begun and ('"phase":"reference"' in text or '"phase":"training"' in text):
                    memory.begin()
                    begun = True
                if not processor and '"phase":"training"' in text:
                    processor.append(time.process_time())
                if begun and '"phase":"saving"' in text:
                    processor.append(time.process_time())
                    peak.append(memory.end())
                time.sleep(0.01)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        code = run(run_dir)
        last = json.loads(events.read_text().splitlines()[-1])
        if code != 0:
            raise SystemExit(str(last))
        watcher.join()
        result = last["result"]
    seconds = result["train_seconds"] if on_gpu() else processor[1] - processor[0]
    return {"seconds": seconds, "tokens": result["total_tokens"], "loss": result["train_loss"], "memory": peak[0]}


def their_packing(options: argparse.Namespace) -> dict[str, float]:
    """TRL's own packing of the documents, or parts of them, that our steps have."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    from bench.trl_clock import Clock
    from core.train.verify.peer import quiet
    from core.train.verify.replay import prepare

    class Counted(SFTTrainer):
        tokens = 0

        def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            self.tokens += inputs["input_ids"].numel()  # packed: no padding
            return super().training_step(model, inputs, *more, **named)

    disable_progress_bars()
    memory, clock = Memory(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(write_order(Path(folder), options), options.steps)
        arguments = quiet(folder, device=found.replay.device, precision=found.replay.precision) | {
            "packing": True, "max_length": options.tokens, "per_device_train_batch_size": 1, "loss_type": "nll",
            "max_steps": options.steps, "learning_rate": found.replay.optimizer.learning_rate, "logging_steps": 1,
        }  # fmt: skip
        memory.begin()
        trainer = Counted(
            model=found.model,
            args=SFTConfig(**arguments),
            train_dataset=Dataset.from_list(list(found.replay.examples)),
            processing_class=found.tokenizer,
            callbacks=[clock],
        )
        trainer.train()
        peak = memory.end()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = clock.seconds if on_gpu() else clock.processor_seconds
    return {"seconds": seconds, "tokens": trainer.tokens, "loss": sum(losses) / len(losses), "memory": peak}


def theirs(options: argparse.Namespace) -> dict[str, float]:
    if options.stage == "cpt":
        return their_packing(options)
    from bench.trl_clock import Clock
    from core.train.verify.peer import build_trainer
    from core.train.verify.replay import prepare

    memory, clock = Memory(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        found = prepare(write_order(Path(folder), options), options.steps)
        if options.stage in ("dpo", "kto"):
            found.replay.options["precompute_ref_log_probs"] = True
        memory.begin()
        trainer = build_trainer(found.replay, found.model, found.tokenizer, folder)
        trainer.add_callback(clock)
        trainer.train()
        peak = memory.end()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = clock.seconds if on_gpu() else clock.processor_seconds
    return {"seconds": seconds, "loss": sum(losses) / len(losses), "memory": peak}


def measure(side: str, options: argparse.Namespace) -> dict[str, float]:
    """One side in a fresh process."""
    command = [sys.executable, "-m", "bench.preference", "--child", side, *sys.argv[1:], "--model", str(options.model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--stage", choices=["dpo", "kto", "simpo", "orpo", "reward", "cpt"], default="dpo")
    found.add_argument("--method", choices=["lora", "qlora"], default="lora")
    found.add_argument("--rows", type=Path, help="preference rows (JSON Lines)")
    found.add_argument("--model", type=Path)
    found.add_argument(
        "--large", action="store_true", help="8 steps of 4,096 tokens, 4 runs; options given beside it win"
    )
    found.add_argument("--steps", type=int)
    found.add_argument("--tokens", type=int, help="tokens of a step at most (batching.tokens_per_batch)")
    found.add_argument("--length", type=int, default=1024, help="max_length")
    found.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    found.add_argument("--runs", type=int)
    found.add_argument("--report", type=Path, help="where the output is written, too")
    found.add_argument("--child", choices=["shared", "apart", "trl"], help=argparse.SUPPRESS)
    return found


def settled(options: argparse.Namespace) -> argparse.Namespace:
    """With the numbers of the small or the large setting where none are given."""
    for name, number in (SETTINGS["large"] if options.large else SETTINGS["small"]).items():
        if getattr(options, name) is None:
            setattr(options, name, number)
    return options


def main() -> None:
    options = settled(parser().parse_args())
    before_torch()  # the same OpenMP settings for all
    options.model = options.model or wheel.model()
    if options.child:
        print(json.dumps(theirs(options) if options.child == "trl" else ours(options)))
        return
    day = datetime.now(UTC).date()
    name = f"{options.stage}_{options.method}"
    with Tee(options.report or ROOT / "bench" / "results" / f"preference-{name.replace('_', '-')}-cpu-{day}.txt"):
        compared(options, name)


def compared(options: argparse.Namespace, name: str) -> None:
    """All sides in turn, and their ratios."""
    steps = f"{options.steps} steps of at most {options.tokens} tokens"
    print(f"{options.model.name}, {options.stage}, {options.method}, {options.precision}, {steps}")
    where = "sections of docs/" if options.stage == "cpt" else "pairs of examples/voice-intents"
    if options.rows is not None:
        where = f"{options.rows.name} (SHA-256 {hashlib.sha256(options.rows.read_bytes()).hexdigest()})"
    print(f"{where}, load average {os.getloadavg()[0]:.1f}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads\n")
    ours_in = {"cpt": ("apart",), "kto": ("shared",)}.get(options.stage, ("shared", "apart"))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in (*ours_in, "trl")}
    for run in range(options.runs):
        for side in found if run % 2 == 0 else reversed(found):
            found[side].append(measure(side, options))
    losses = [one["loss"] for side in found.values() for one in side]
    if options.stage != "cpt" and max(losses) > 1.02 * min(losses):  # the rounding of bf16 is less
        raise SystemExit(f"the sides did not train on the same examples: {found}")
    results = {}
    for side in ours_in:
        tokens = found[side][0]["tokens"]
        speed = compare(*([one.get("tokens", tokens) / one["seconds"] for one in found[of]] for of in (side, "trl")))
        memory = compare(*([one["memory"] / 2**20 for one in found[of]] for of in (side, "trl")))
        for what, figures, unit in (("tokens_per_second", speed, "/s"), ("mib_over_load", memory, "MiB")):
            label = f"{name}_{side}_{what}_against_trl"
            results[label] = figures
            show(label, figures, unit)
    finish(results)


if __name__ == "__main__":
    main()
