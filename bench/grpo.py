"""GRPO against TRL's GRPOTrainer: `python -m bench.grpo [--model DIR] [--steps N] [--runs N] [--alike SHARE]`.

`step`: both learn from the same answers, which are put in the place of TRL's generation: rewards, advantages, loss,
backward and optimizer. `loop`: both draw their own answers to the same prompts at temperature 1, by their own
generators; since draws differ, its figure is processor seconds for each token drawn. `exact`: eft's loop with
`stage.sampler: exact` over that without; `apart` is the largest difference of a token's log-probability at the draw
from that in training. Same LoRA on all linear layers, precision and micro-batches, one process, in turn. `--alike`:
share of the groups of `step` whose answers all have one reward, which eft leaves out of its passes.

`reward` (alone: `--only reward`): processor seconds until the answers to sums of two numbers have a named mean reward,
1 for the right sum and else 0, in the last four steps together (bench/grpo_sums.py). Both start from the same short
fine-tuning of all weights on other sums, and learn from the same prompts at the same rate.

`memory`: how far the resident memory of the process grew at its highest point during a contender's steps, beyond what
it was before them with the model loaded.

A ratio is TRL's figure over eft's, pair by pair: above 1, eft needs less. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import process, wheel
from bench.grpo_sums import LIMIT, Sums, tune
from bench.qlora import Tee
from bench.report import compare, finish, hardware, show
from core.train.__main__ import before_torch

ROOT = Path(__file__).resolve().parent.parent
RATE, RANK, EPSILON, SEED = 1e-5, 16, 0.2, 7
WORDS = ("river", "stone", "lamp", "bird", "cloud", "tree", "garden", "window", "paper", "letter", "bridge", "winter")


@dataclass(frozen=True)
class Setting:
    model_dir: Path
    steps: int
    prompts: int
    """Prompts of a step."""
    answers: int
    """Answers to a prompt."""
    micro: int
    new: int
    alike: float
    bf16: bool
    sums: Sums | None = None
    """What is asked in `reward`."""
    seed: int = SEED
    """Of the draws."""

    @property
    def rollout(self) -> int:
        return self.prompts * self.answers

    @property
    def rate(self) -> float:
        return RATE if self.sums is None else self.sums.rate

    def questions(self) -> list[str]:
        if self.sums is not None:
            return self.sums.questions
        draw = random.Random(SEED)  # noqa: S311
        return [
            f"Tell a short story about a {draw.choice(WORDS)} and a {draw.choice(WORDS)}, which "
            + " ".join(draw.choices(WORDS, k=draw.randint(8, 24)))
            for _ in range(self.steps * self.prompts)
        ]

    def completions(self, step: int) -> list[list[int]]:
        """Answers of a step, of log-normal lengths."""
        draw = random.Random(1000 + step)  # noqa: S311
        lengths = [min(self.new, max(4, int(draw.lognormvariate(3.0, 0.7)))) for _ in range(self.rollout)]
        return [draw.choices(range(100, 40_000), k=length) for length in lengths]

    def rewards(self, completions: Sequence[Sequence[int]]) -> list[float]:
        found = [sum(one) % 11 / 10 for one in completions]
        for group in range(int(self.alike * self.prompts)):
            found[group * self.answers : (group + 1) * self.answers] = [0.5] * self.answers
        return found

    def judged(self, texts: Sequence[str], step: int) -> list[float]:
        """Rewards of a step's own answers."""
        if self.sums is None:
            return lengths_reward(texts)
        first = step * self.prompts
        return self.sums.rewards(texts, [first + at // self.answers for at in range(len(texts))])


@dataclass
class Used:
    seconds: float = 0.0
    """Processor seconds in steps."""
    tokens: int = 0
    memory: float = 0.0
    """MiB."""
    apart: float = 0.0
    """Largest difference of a log-probability at the draw from that in training."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's answers."""


FIGURES: tuple[tuple[str, str, Callable[[Used], float]], ...] = (
    ("processor_ms_a_token", "ms", lambda one: 1000 * one.seconds / one.tokens),
    ("memory", "MiB", lambda one: one.memory),
)
TO_A_REWARD: tuple[tuple[str, str, Callable[[Used], float]], ...] = (
    ("processor_s", "s", lambda one: one.seconds),
    ("steps", "", lambda one: len(one.rewards)),
    *FIGURES[1:],
)


class Watch:
    """Processor seconds of the steps, and the highest resident memory beyond that before the first."""

    def __init__(self, used: Used) -> None:
        self.used = used

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        process.reset_peak()
        before = process.resident()
        yield
        self.used.memory = (process.peak() - before) / 2**20

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.used.seconds += time.process_time() - began


def lengths_reward(completions: Sequence[str]) -> list[float]:
    return [len(text) % 17 / 16 for text in completions]


def exactly(setting: Setting, *, drawn: bool) -> Used:
    return ours(setting, drawn=drawn, exact=True)


def ours(setting: Setting, *, drawn: bool, exact: bool = False) -> Used:
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from core.spec.axes.method import LoRA
    from core.spec.axes.optimizer import AdamW
    from core.spec.axes.rollout.stages import GRPO
    from core.train.attention.probe import prepare_packing, share_prompts
    from core.train.base.rng import seed_all
    from core.train.engine import build_engine
    from core.train.generation.sampling import SamplingParams
    from core.train.methods.lora import adapt_lora
    from core.train.model.load import load_model
    from core.train.rollout.buffer import Rollout
    from core.train.rollout.exactness import compute_exactly
    from core.train.rollout.loader import advantages
    from core.train.stages.rollout.grpo import GroupRelativePolicy

    seed_all(setting.seed)
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    tokenizer: Any = AutoTokenizer.from_pretrained(setting.model_dir)
    model: Any = adapt_lora(load_model(setting.model_dir, dtype), LoRA(r=RANK, lora_alpha=2 * RANK))
    rate = AdamW(learning_rate=setting.rate, weight_decay=0.0)
    pad = int(tokenizer.pad_token_id)
    engine = build_engine(model, rate, autocast=torch.bfloat16 if setting.bf16 else None, pad_token_id=pad)
    spec = GRPO.model_validate(
        {"num_generations": setting.answers, "max_completion_length": setting.new, "reward": ["exact"]}
    )
    stage = GroupRelativePolicy(spec)
    prompts = [tokenizer(one)["input_ids"] for one in setting.questions()]
    used = Used()
    watch = Watch(used)

    def watched(policy: Any, batch: Any, totals: Any) -> Any:
        """The stage's loss; what it has seen of the log-probabilities is read beside it."""
        kept: list[torch.Tensor] = []

        class Seen:
            def logprobs(self, *given: Any) -> torch.Tensor:
                kept.append(policy.logprobs(*given))
                return kept[-1]

        found = stage.loss(Seen(), batch, totals)  # type: ignore[arg-type]
        if drawn:
            used.apart = max(used.apart, float((kept[0].detach() - batch.token_values["sampler"]).abs().max()))
        return found

    engine.policy.head()
    engine.without_slots(8)
    longest = max(map(len, prompts)) + setting.new
    if exact:
        compute_exactly(engine, longest, 1.0)
    else:
        prepare_packing(engine)
        assert share_prompts(engine, longest) is None, "the prompts of a group cannot be computed once"
    with watch.memory():
        for step in range(setting.steps):
            some = prompts[step * setting.prompts : (step + 1) * setting.prompts]
            with watch.step():
                if drawn:
                    params = SamplingParams(setting.new, 1.0, stop_token_ids=(int(tokenizer.eos_token_id),))
                    keys = [[(setting.seed, step, at, n) for n in range(setting.answers)] for at in range(len(some))]
                    found = engine.complete(some, keys, params, slots=setting.rollout)
                    every = [one for answers in found for one in answers]
                    answers = [one.tokens for one in every]
                    sampler = [p for one in every for p in one.logprobs]
                    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
                    rewards = setting.judged(texts, step)
                else:
                    answers = setting.completions(step)
                    sampler = [0.0] * sum(map(len, answers))
                    rewards = setting.rewards(answers)
                rollout = Rollout(
                    step, some, [], answers, [True] * len(answers), {"r": rewards}, rewards, [],
                    {"sampler": np.asarray(sampler, dtype=np.float32)},
                )  # fmt: skip
                rollout.advantages = advantages(rollout, spec)
                dataset, rows = rollout.dataset(), rollout.varied()
                totals = {"tokens": float(sum(map(len, answers))), "answers": float(len(answers))}
                for at in range(0, len(rows), setting.micro):
                    some_rows = rows[at : at + setting.micro]
                    batch = dataset.collate(some_rows, pad) if exact else dataset.pack(some_rows)
                    part = engine.forward(batch, watched, totals)
                    engine.backward(part.total)
                engine.step()
            used.tokens += sum(map(len, answers))
            used.rewards.append(sum(rewards) / len(rewards))
            if setting.sums is not None and setting.sums.reached(used.rewards):
                break
    return used


def by_trl(setting: Setting, *, drawn: bool) -> Used:
    import torch
    import trl.trainer.grpo_trainer
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    from bench.trl_clock import Clock
    from core.train.model.load import load_model

    used = Used()
    calls = [0]

    theirs: Any = trl.trainer.grpo_trainer

    class Peer(theirs.GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
            if drawn:
                found = super()._generate_single_turn(prompt_ids, *args, **options)
            else:
                found = setting.completions(calls[0]), None
            calls[0] += 1
            used.tokens += sum(map(len, found[0]))
            return found

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        found = setting.judged(completions, calls[0] - 1) if drawn else setting.rewards(completion_ids)
        used.rewards.append(sum(found) / len(found))
        return found

    class Reached(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if setting.sums is not None and setting.sums.reached(used.rewards):
                control.should_training_stop = True

    clock = Clock()
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        config = theirs.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=setting.micro,
            gradient_accumulation_steps=setting.rollout // setting.micro,
            num_generations=setting.answers,
            max_completion_length=setting.new,
            loss_type="dapo",
            epsilon=EPSILON,
            temperature=1.0,
            shuffle_dataset=False,
            max_steps=setting.steps,
            learning_rate=setting.rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=setting.bf16,
            seed=setting.seed,
            disable_tqdm=True,
        )
        made: Any = Peer
        trainer = made(
            model=load_model(setting.model_dir, dtype),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": one} for one in setting.questions()]),
            processing_class=AutoTokenizer.from_pretrained(setting.model_dir),
            peft_config=LoraConfig(
                task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear"
            ),
            callbacks=[clock, Reached()],
        )
        with Watch(used).memory():
            trainer.train()
    steps = len(used.rewards) if setting.sums is not None else setting.steps
    assert calls[0] == steps, f"{calls[0]} rollouts in {steps} steps"
    used.seconds = clock.processor_seconds
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder (default: SmolLM2-135M from the demo's wheel)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--answers", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--micro", type=int, default=8, help="answers of a micro-batch")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer at most")
    parser.add_argument("--alike", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=SEED, help="of the first run's draws; each later run has the next")
    parser.add_argument("--bf16", action="store_true", help="default: fp32")
    parser.add_argument("--only", choices=["step", "loop", "exact", "reward"])
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    before_torch()
    import torch

    from core.train.model.load import quiet

    quiet()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    setting = Setting(
        given.model or wheel.model(), given.steps, given.prompts, given.answers, given.micro, given.new, given.alike,
        given.bf16,
    )  # fmt: skip
    part = "grpo" if given.only is None else f"grpo-{given.only}"  # a part leaves the whole report as it is
    report = given.report or ROOT / "bench" / "results" / f"{part}-cpu-{datetime.now(UTC).date()}.txt"
    with Tee(report), tempfile.TemporaryDirectory() as folder:
        print(f"{setting.model_dir.name}; {hardware()}; load average {os.getloadavg()[0]:.1f}")
        if given.only == "reward":
            tune(setting.model_dir, Path(folder), SEED)
            setting = replace(setting, steps=LIMIT, model_dir=Path(folder), sums=Sums(LIMIT * given.prompts))
        print(
            f"{setting.steps} steps of {given.prompts} prompts with {given.answers} answers of at most {given.new} "
            f"tokens, micro-batches of {given.micro}, LoRA of rank {RANK}, {'bf16' if given.bf16 else 'fp32'}, "
            f"{torch.get_num_threads()} thread(s); {given.alike:.0%} of the groups of `step` alike"
            + (f"; until a mean reward of {setting.sums.named}" if setting.sums is not None else "")
        )
        told: dict[str, dict[str, Any]] = {}
        for kind in ("step", "loop", "exact") if given.only is None else (given.only,):
            mine: list[Used] = []
            others: list[Used] = []
            peer = exactly if kind == "exact" else by_trl
            for run in range(given.runs):
                for side in (ours, peer) if run % 2 == 0 else (peer, ours):
                    found = side(replace(setting, seed=given.seed + run), drawn=kind != "step")
                    if setting.sums is not None and not setting.sums.reached(found.rewards):
                        raise SystemExit(f"{side.__name__} has not reached the reward in {LIMIT} steps: {found}")
                    (mine if side is ours else others).append(found)
                    print(f"{kind} run {run} {side.__name__:5} {found}", flush=True)
            for name, unit, figure in TO_A_REWARD if kind == "reward" else FIGURES:
                # The peer over eft: `compare` divides its first series by its second.
                figures = compare([figure(one) for one in others], [figure(one) for one in mine])
                figures["ours"], figures["peer"] = figures["peer"], figures["ours"]
                told[f"grpo_{kind}_{name}"] = figures
                show(f"grpo {kind}, {name}, {peer.__name__} over ours", figures, unit)
        finish(told)


if __name__ == "__main__":
    main()
