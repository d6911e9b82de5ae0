"""GRPO and RLOO against TRL's trainers on the same answers: losses, gradient norms and weights of steps with two
iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW, Linear
from core.spec.axes.rollout.stages import GRPO, RLOO
from core.train.attention.probe import prepare_packing, share_prompts
from core.train.base.rng import seed_all
from core.train.engine import Engine, build_engine
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.optim.schedules import build_schedule
from core.train.rollout.buffer import Rollout
from core.train.rollout.loader import advantages
from core.train.stages.rollout.grpo import GroupRelativePolicy
from core.train.stages.rollout.rloo import LeaveOneOutPolicy

MICRO, ACCUMULATION, GROUP, LR, MOST = 4, 2, 4, 2e-2, 16
EPS = 1e-4
"""Of AdamW: at the usual 1e-8 it makes a whole step of a gradient that is nothing but rounding."""
SPEC = {
    "num_generations": GROUP,
    "num_iterations": 2,
    "epsilon": 0.02,
    "max_completion_length": MOST,
    "reward": ["exact"],
}
WORDS = ["cats", "dogs", "trees", "birds", "rivers", "stones", "clouds", "lamps"]
PROMPTS = [f"question number {number} about {word}" for number, word in enumerate(WORDS)]


def answers(call: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(100 + call)
    lengths = [int(torch.randint(3, 14, (1,), generator=generator)) for _ in range(count)]
    return [torch.randint(4, 250, (length,), generator=generator).tolist() for length in lengths]


def rewards(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def start(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05


def by_trl(
    tiny_dir: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: list[list[list[int]]],
    stage: str = "GRPO",
    **options: Any,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step, and the trained weights; `seen` gets the prompts of each rollout."""
    theirs: Any = trl.trainer.grpo_trainer if stage == "GRPO" else trl.trainer.rloo_trainer
    monkeypatch.setattr(theirs, "shuffle_sequence_dict", lambda batch: batch)
    trainer_class: Any = getattr(theirs, f"{stage}Trainer")

    class Fixed(trainer_class):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            seen.append([list(prompt) for prompt in prompt_ids])
            found = answers(len(seen) - 1, len(prompt_ids))
            return (found, None) if stage == "GRPO" else found

    config = getattr(theirs, f"{stage}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GROUP,
        num_iterations=2,
        epsilon=options.pop("epsilon", 0.02),
        max_completion_length=MOST,
        shuffle_dataset=False,
        num_train_epochs=1,
        learning_rate=LR,
        adam_epsilon=EPS,
        lr_scheduler_type="linear",
        warmup_steps=0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=7,
        **options,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", bias="none"
    )
    trainer = Fixed(
        model=load_model(tiny_dir, torch.float32),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(tiny_dir),
        peft_config=lora,
    )
    start(trainer.model)
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return logged, {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}


def by_us(
    tiny_dir: Path, seen: list[list[list[int]]], spec: GRPO | RLOO, *, once: bool = False
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    seed_all(7)
    model: Any = adapt_lora(load_model(tiny_dir, torch.float32), LoRA(r=4, lora_alpha=8, lora_dropout=0.0))
    start(model)
    schedule = build_schedule(Linear(warmup_ratio=0.0), 2 * len(seen))
    engine = build_engine(model, AdamW(learning_rate=LR, weight_decay=0.0, eps=EPS), schedule, pad_token_id=1)
    if once:
        prepare_packing(engine)
        assert share_prompts(engine, 64) is None
    stage = GroupRelativePolicy(spec) if isinstance(spec, GRPO) else LeaveOneOutPolicy(spec)
    told = []
    for call, prompts in enumerate(seen):
        completions = answers(call, len(prompts))
        found = rewards(completions)
        rollout = Rollout(
            call, prompts[::GROUP], [], completions, [True] * len(prompts), {"r": found}, found,
            [], {"sampler": of_rows(engine, prompts, completions).numpy()},
        )  # fmt: skip
        rollout.token_values["old"] = rollout.token_values["sampler"]
        with model.disable_adapter():
            rollout.token_values["reference"] = of_rows(engine, prompts, completions).numpy()
        rollout.advantages = advantages(rollout, spec)
        dataset = rollout.dataset()
        totals = {"tokens": sum(map(len, completions)), "answers": len(completions)}
        for _ in range(2):
            loss = 0.0
            for at in range(0, len(completions), MICRO):
                rows = range(at, at + MICRO)
                batch = dataset.pack(rows) if once else dataset.collate(rows, 1)
                assert (batch.shared is not None) == once
                part = engine.forward(batch, stage.loss, totals)
                engine.backward(part.total)
                loss += float(part.total.detach())
            told.append((loss, float(engine.step().grad_norm)))
    return told, dict(engine.trained_parameters)


def of_rows(engine: Engine, prompts: list[list[int]], completions: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the answers' tokens, end to end."""
    lengths = [len(one) for one in completions]
    plain = Rollout(0, prompts, [], completions, [True] * len(lengths), {}, [0.0] * len(lengths), [0.0] * len(lengths))
    return torch.cat(engine.logprobs(plain.dataset().collate(range(len(lengths)), 1)))


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo", "gspo"])
def test_steps_are_those_of_trl(loss: Any, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[list[int]]] = []
    more: dict[str, Any] = {"cispo": {"epsilon_high": 0.9}, "gspo": {"epsilon": 0.002}}.get(loss, {})
    level: dict[str, Any] = {"importance_sampling_level": "sequence", "loss_type": "grpo"} if loss == "gspo" else {}
    options = {"loss_type": loss, **more, **level}
    expected = by_trl(tiny_dir, tmp_path, monkeypatch, seen, beta=0.04, **options)
    spec = GRPO.model_validate({**SPEC, "loss": loss, "beta": 0.04, **more})
    agree(by_us(tiny_dir, seen, spec), expected)
    agree(by_us(tiny_dir, seen, spec, once=True), expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_steps_of_rloo_are_those_of_trl(
    normalize: bool, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[list[int]]] = []
    options = {"beta": 0.05, "normalize_advantages": normalize, "epsilon": 0.1}
    expected = by_trl(tiny_dir, tmp_path, monkeypatch, seen, "RLOO", **options)
    agree(by_us(tiny_dir, seen, RLOO.model_validate({**SPEC, **options})), expected)


def agree(ours: tuple[list[Any], dict[str, torch.Tensor]], theirs: tuple[list[Any], dict[str, torch.Tensor]]) -> None:
    found, expected = ours[0], theirs[0]
    assert len(found) == len(expected) == 8
    for (mine, norm), (other, other_norm) in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
        assert norm == pytest.approx(other_norm, rel=5e-5)
    named = {name.removeprefix("module."): value for name, value in theirs[1].items()}
    assert named.keys() == ours[1].keys()
    for name, value in named.items():
        torch.testing.assert_close(ours[1][name].detach(), value, rtol=0, atol=1e-5)
