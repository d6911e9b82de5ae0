"""Batches without padding, and tokenising: `python -m bench.data [--data DIR] [--layers N] [--runs N]`.

Rows of different lengths: `alpaca*.jsonl` and `gsm8k*.jsonl` of `--data`, else rows that are made here with lengths
like theirs. The model has SmolLM2-135M's width, vocabulary and tokenizer and `--layers` of its 30 layers, random
weights, LoRA r 16 on all linear layers, bf16. Figures, all in turn in one process:

- trained tokens a second, padding not counted: `batching: packed` and `tokens` against a fixed number of rows, all with
  the memory of the fixed batches: tokens_per_batch is what their widest batch holds. Measured are steps typical of an
  epoch (`typical`). Peak memory is measured apart, each in a process of its own;
- `packed` against TRL's own packing (`packing=True`, best fit decreasing, padding-free) with as many tokens a line, the
  model's own loss (`loss_type="nll"`), no logging, no checkpoints: from the beginning to the end of its steps;
- rows a second to tokens and loss masks, against `datasets.map` of the tokenizer's own chat template in batches, which
  makes no mask. One process and one thread in the tokenizer on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from bench import process
from bench.report import compare, finish, in_turn, show
from core.train.__main__ import before_torch

ROWS, LENGTH, SEED = 8, 512, 42
BUDGET = ROWS * LENGTH
"""Tokens that a fixed batch has room for."""
STEPS = {"rows": 4, "tokens": 2, "packed": 2}
"""Optimizer steps of one measurement: 6,000 to 8,000 trained tokens."""
ARMS: dict[str, Any] = {
    "rows": "rows",
    "tokens": {"type": "tokens", "tokens_per_batch": BUDGET},
    "packed": {"type": "packed", "tokens_per_batch": BUDGET},
}


class Bench:
    def __init__(self, data: Path | None, layers: int) -> None:
        from bench import wheel
        from core.train.data.tokenise.whole import tokenise
        from core.train.vocabulary.tokenizer import load_tokenizer

        self.layers = layers
        self.model_dir = wheel.model()
        self.tokenizer = load_tokenizer(self.model_dir)
        self.chats = real_chats(data) if data is not None else made_chats()
        self.dataset, self.report = tokenise(self.rows(), self.renderer(), LENGTH)

    def renderer(self) -> Any:
        from core.spec.axes.rendering import ModelTemplate
        from core.train.render.options import RenderOptions
        from core.train.render.renderer import Renderer

        return Renderer(self.tokenizer, RenderOptions("completions", ModelTemplate()))

    def rows(self) -> list[Any]:
        from core.data.rows import Chat, Message, Numbered

        return [
            Numbered(line, Chat(tuple(Message(turn["role"], turn["content"]) for turn in chat)))
            for line, chat in enumerate(self.chats, 1)
        ]

    def model(self) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from core.spec.axes.method import LoRA
        from core.train.base.rng import seed_all
        from core.train.methods.lora import adapt_lora

        seed_all(SEED)
        config = AutoConfig.from_pretrained(self.model_dir)
        config.num_hidden_layers = self.layers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return adapt_lora(model, LoRA(r=16, lora_alpha=32), autocast=True)

    # --- training --------------------------------------------------------------------------------------

    @cache  # noqa: B019 -- one bench a process
    def order(self, arm: str) -> Any:
        from core.spec.load import parse_job
        from core.train.data.order import build_order

        training = {"per_device_train_batch_size": ROWS, "max_length": LENGTH, "seed": SEED}
        spec = parse_job({"model": "a/b", "data": "/rows", "batching": ARMS[arm], "training": training})
        return build_order(spec, self.dataset.sizes(packed=spec.batching.type == "packed"))

    def padding(self, arm: str) -> float:
        """Share of a whole epoch's slots."""
        order, lengths = self.order(arm), self.dataset.lengths
        batches = [rows for step in range(order.steps_of(0)) for rows in order.window(step)]
        if arm == "packed":
            return 0.0
        return 1 - sum(lengths) / sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)

    @cache  # noqa: B019 -- one bench a process
    def typical(self, arm: str) -> list[int]:
        """Steps of an epoch in which padding and labels have the shares that they have in all of it: a few steps taken
        as they come differ by a third in both, and so in time."""
        order, lengths, counts = self.order(arm), self.dataset.lengths, self.dataset.label_counts
        found = []
        for step in range(order.steps_of(0)):
            slots = tokens = labels = 0
            for rows in order.window(step):
                held = [lengths[row] for row in rows]
                tokens += sum(held)
                slots += sum(held) if arm == "packed" else len(rows) * max(held)
                labels += sum(counts[row] for row in rows)
            found.append((slots / tokens, labels / tokens))
        means = [sum(values) / len(found) for values in zip(*found, strict=True)]
        return sorted(
            range(len(found)),
            key=lambda step: sum(abs(value / mean - 1) for value, mean in zip(found[step], means, strict=True)),
        )[: STEPS[arm]]

    def train(self, arm: str, *, widest: bool = False) -> float:
        """Trained tokens a second in `STEPS` steps of an arm; `widest`: with its widest batch alone, once."""
        import torch

        from core.spec.axes.optimizer import AdamW
        from core.train.attention.probe import prepare_packing
        from core.train.data.loaders import RowLoader
        from core.train.engine import build_engine
        from core.train.stages.sft import SupervisedFineTuning

        model, order = self.model(), self.order(arm)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device)
        engine = build_engine(model, AdamW(learning_rate=1e-4), device=device, autocast=torch.bfloat16)
        if arm == "packed":
            prepare_packing(engine)
        stage = SupervisedFineTuning()
        pad = self.tokenizer.pad_token_id
        loader = RowLoader(self.dataset, order, stage.shares, packed=arm == "packed", pad_token_id=pad)
        steps = self.typical(arm)
        if widest:
            slots = [sum(make().slots for make in loader.batches(step).batches) for step in range(order.steps_of(0))]
            steps = [max(range(len(slots)), key=slots.__getitem__)]
        tokens, began = 0, time.perf_counter()
        for step in steps:
            window = loader.batches(step)
            for make in window.batches:
                batch = make()
                engine.backward(engine.forward(batch, stage.loss, window.totals).total)
                tokens += batch.tokens
            engine.step()
        return tokens / (time.perf_counter() - began)

    def trl(self) -> float:
        """Trained tokens a second of TRL's trainer with its own packing."""
        import torch
        from datasets import Dataset, disable_progress_bars
        from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

        from bench.trl_clock import Clock
        from core.train.batch import IGNORE_INDEX
        from core.train.verify.peer import quiet

        disable_progress_bars()

        class Counted(SFTTrainer):
            tokens = 0

            def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                self.tokens += inputs["input_ids"].numel()  # packed: no padding
                return super().training_step(model, inputs, *more, **named)

        items = []
        for ids, learned in (self.dataset[row] for row in range(len(self.dataset))):
            items.append({"input_ids": ids.tolist(), "labels": torch.where(learned, ids, IGNORE_INDEX).tolist()})
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Counted(
                model=self.model(),
                args=SFTConfig(
                    **quiet(folder, device="cuda" if torch.cuda.is_available() else "cpu", precision="bf16"),
                    logging_strategy="no",
                    loss_type="nll",
                    packing=True,
                    per_device_train_batch_size=1,
                    max_steps=STEPS["packed"],
                    learning_rate=1e-4,
                    max_length=BUDGET,
                    seed=SEED,
                ),
                train_dataset=Dataset.from_list(items),
                processing_class=self.tokenizer,
                callbacks=[clock],
            )
            assert "labels" in trainer.train_dataset.column_names, "TRL would learn the prompts too"
            trainer.train()
        return trainer.tokens / clock.seconds

    # --- tokenising ------------------------------------------------------------------------------------

    def tokenise(self, times: int) -> float:
        from core.train.data.tokenise.chunks import render_rows

        rows, renderer = self.rows() * times, self.renderer()
        began = time.perf_counter()
        render_rows(rows, renderer)
        return len(rows) / (time.perf_counter() - began)

    def datasets_map(self, times: int) -> float:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        rows = Dataset.from_list([{"messages": chat} for chat in self.chats * times])

        def tokens(batch: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": self.tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]}

        began = time.perf_counter()
        rows.map(tokens, batched=True, remove_columns=["messages"], load_from_cache_file=False)
        return len(rows) / (time.perf_counter() - began)


def real_chats(folder: Path) -> list[list[dict[str, str]]]:
    found = []
    for path in sorted([*folder.glob("alpaca*.jsonl"), *folder.glob("gsm8k*.jsonl")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "question" in row:
                found.append(_chat(row["question"], row["answer"]))
            else:
                asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
                found.append(_chat(asked, row["output"]))
    if not found:
        raise SystemExit(f"{folder} has neither alpaca*.jsonl nor gsm8k*.jsonl")
    return found


def made_chats() -> list[list[dict[str, str]]]:
    """912 rows whose lengths are spread as those of Alpaca and GSM8K together."""
    chance = random.Random(SEED)  # noqa: S311 -- data for a measurement
    words = ["the", "a", "model", "learns", "what", "rows", "say", "and", "how", "long", "they", "are", "unpadded"]

    def text(median: float) -> str:
        return " ".join(chance.choices(words, k=max(3, int(chance.lognormvariate(0, 0.75) * median))))

    return [_chat(text(40), text(75)) for _ in range(912)]


def _chat(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def peak_bytes(arguments: list[str], arm: str) -> float:
    """Peak resident memory of a process that trains on an arm's widest batch, over what it holds once the model is
    made."""
    command = [sys.executable, "-m", "bench.data", *arguments, "--peak", arm]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--times", type=int, default=4, help="how often the rows are tokenised in one measurement")
    parser.add_argument("--peak", choices=list(ARMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    before_torch()
    from core.train.model.load import quiet

    quiet()
    bench = Bench(options.data, options.layers)
    if options.peak is not None:
        process.reset_peak()
        before = process.resident()
        bench.train(options.peak, widest=True)
        print(process.peak() - before)
        return

    lengths = bench.dataset.lengths
    print(
        f"{len(lengths)} rows, {sum(lengths)} tokens, {sum(lengths) / len(lengths):.0f} a row, longest {max(lengths)}; "
        f"{options.layers} layers; load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    results: dict[str, dict[str, Any]] = {}
    arguments = ["--layers", str(options.layers)] + (["--data", str(options.data)] if options.data else [])
    for arm in ARMS:
        peak = peak_bytes(arguments, arm)
        results[f"batches_{arm}"] = {"padding": bench.padding(arm), "peak_bytes": peak}
        print(
            f"{arm:<8} padding {bench.padding(arm):6.1%} of an epoch   peak {peak / 2**20:7.0f} MiB over load",
            flush=True,
        )
    speeds: dict[str, list[float]] = {arm: [] for arm in (*ARMS, "trl")}
    for run in range(options.runs):
        for arm in [*speeds][:: 1 if run % 2 == 0 else -1]:
            speeds[arm].append(bench.trl() if arm == "trl" else bench.train(arm))
    for arm, peer in (("packed", "rows"), ("tokens", "rows"), ("packed", "trl")):
        name = f"{arm}_tokens_per_second_against_{peer}"
        results[name] = compare(speeds[arm], speeds[peer])
        show(name, results[name], "/s")
    name = "tokenised_rows_per_second_against_datasets_map"
    results[name] = in_turn(
        lambda: bench.tokenise(options.times), lambda: bench.datasets_map(options.times), options.runs
    )
    show(name, results[name], "/s")
    finish(results)


if __name__ == "__main__":
    main()
