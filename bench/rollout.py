"""Tokens a CPU second of the slot generator against transformers' generate and generate_batch, on the same prompts.

    python -m bench.rollout [--model DIR] [--slots 8] [--rows 32] [--new 96] [--runs 3]

`equal`: every answer has `--new` tokens. `ragged`: the lengths of answers are log-normal, as those of a reasoning task
are; a static batch goes on until its longest answer has ended. Prompts are random tokens, greedy, no adapter. The three
take turns; a figure is the median over the runs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig

from bench import wheel
from core.spec.axes.optimizer import AdamW
from core.train.engine import Engine, build_engine
from core.train.generation.generator import SlotGenerator
from core.train.generation.products import few_rows
from core.train.generation.sampling import SamplingParams, Stops
from core.train.model.load import load_model, quiet

END = -1


class Budgets(Stops):
    """Ends each answer after its own number of tokens, which are told apart by the first of them."""

    def __init__(self, params: SamplingParams, budgets: Sequence[int]) -> None:
        super().__init__(params, None)
        self.waiting, self.known = list(budgets), dict[int, int]()

    def ended(self, tokens: Sequence[int]) -> bool:
        if len(tokens) == 1:
            self.known[id(tokens)] = self.waiting.pop(0)
        return len(tokens) >= self.known[id(tokens)]


def prompts_of(rows: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(100, vocabulary - 100, (32 + row * 7 % 32,), generator=generator).tolist() for row in range(rows)
    ]


def in_slots(engine: Engine, prompts: list[list[int]], budgets: list[int], slots: int) -> list[int]:
    params = SamplingParams(max(budgets))
    keys = [[(row,)] for row in range(len(prompts))]
    with engine.inference() as model, few_rows(model, engine.device):
        generator = SlotGenerator(
            model,
            engine.policy.head(),
            params,
            Budgets(params, budgets),
            slots=slots,
            prompt_tokens=4096,
            device=engine.device,
        )
        found = generator.complete(prompts, keys, lambda: None)
    return [len(one.tokens) for (one,) in found]


def by_generate(engine: Engine, prompts: list[list[int]], budgets: list[int], slots: int) -> list[int]:
    for start in range(0, len(prompts), slots):
        some, longest = prompts[start : start + slots], max(budgets[start : start + slots])
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in some])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
        wanted = GenerationConfig(max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0, eos_token_id=None)
        with engine.inference() as model:
            model.generate(input_ids=ids, attention_mask=mask, generation_config=wanted)
    return budgets


def by_generate_batch(engine: Engine, prompts: list[list[int]], budgets: list[int], slots: int) -> list[int]:
    """It takes one number of new tokens for all: only for answers of equal length."""
    wanted = GenerationConfig(max_new_tokens=budgets[0], pad_token_id=0, eos_token_id=END, do_sample=False)
    with engine.inference() as model:
        found = model.generate_batch(inputs=prompts, generation_config=wanted, progress_bar=False)
    return [len(one.generated_tokens) for one in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-generate-batch", action="store_true")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    model = load_model(args.model or wheel.model(), torch.bfloat16)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    engine = build_engine(model, AdamW(learning_rate=1e-5), autocast=torch.bfloat16)
    prompts = prompts_of(args.rows, int(model.config.vocab_size))
    random.seed(4)
    ragged = [min(args.new, max(4, int(random.lognormvariate(3.2, 0.8)))) for _ in prompts]
    contenders: dict[str, Callable[[Engine, list[list[int]], list[int], int], list[int]]] = {
        "slots": in_slots,
        "generate": by_generate,
        "generate_batch": by_generate_batch,
    }
    told: dict[str, object] = {"slots": args.slots, "rows": args.rows, "new": args.new}
    for kind, budgets in (("equal", [args.new] * len(prompts)), ("ragged", ragged)):
        rates: dict[str, list[float]] = {}
        for run in range(args.runs):
            for name, contender in contenders.items():
                if name == "generate_batch" and (kind == "ragged" or args.no_generate_batch):
                    continue
                began = time.process_time()
                lengths = contender(engine, prompts, budgets, args.slots)
                took = time.process_time() - began
                if name == "slots":
                    assert lengths == budgets, "an answer has another length than it was to have"
                rates.setdefault(name, []).append(sum(budgets) / took)
                print(f"{kind:7} run {run} {name:15} {sum(budgets) / took:8.1f} tokens a CPU second", flush=True)
        ours = statistics.median(rates["slots"])
        for name, values in rates.items():
            told[f"{kind}/{name}"] = round(statistics.median(values), 1)
            if name != "slots":
                each = [a / b for a, b in zip(rates["slots"], values, strict=True)]
                told[f"{kind}/ratio_{name}"] = [
                    round(v, 2) for v in (ours / statistics.median(values), min(each), max(each))
                ]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
