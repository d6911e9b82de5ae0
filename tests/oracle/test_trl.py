"""TRL's SFTTrainer on the same batches gives the same trajectory.

Same initial weights (and adapters), the same tokens and labels in the same order, AdamW, linear schedule with warm-up,
clipping, accumulation over 4 batches with unequal numbers of label tokens, a partial batch and a partial window at the
end of each epoch. fp32, one computation against the other: loss, gradient norm and learning rate of every step agree
within a relative 1e-4, the final weights within 1e-4 absolute (they move by about 1e-2). The rest is the order of
float32 sums: TRL computes its head in tiles over all positions, we compute it on the labelled ones.

QLoRA is held against TRL over a base that bitsandbytes has packed and PEFT's layers for it: other code for the packing,
the dequantisation, base and adapter, head and loss; the same tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.spec.axes.method import Full, LoRA, QLoRA
from core.spec.axes.optimizer import AdamW, Linear
from core.spec.run.orders import DataOrder
from core.train.base.rng import seed_all
from core.train.data.order import BatchOrder
from core.train.data.reader import rows_of
from core.train.data.tokenise.whole import tokenise
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.verify.columns import columns
from core.train.verify.peer import Replay
from core.train.verify.peer import train as train_under_trl
from core.train.verify.replay import start_of
from tests.support.trainer import chats, events, run, write_rows, write_run

TOLERANCE = 1e-4
APART = 2e-2
"""How far a parameter may end from TRL's, as a share of the way it went. AdamW's first steps have the size of the
learning rate whatever the gradient is, so an element whose gradient is all rounding goes its own way."""
BATCH, ACCUMULATION, SEED, LENGTH = 2, 4, 7, 96


def compare(
    tmp_path: Path,
    model_dir: Path,
    method: Full | LoRA | QLoRA,
    *,
    rows: int,
    epochs: int,
    learning_rate: float,
    elementwise: bool = True,
) -> None:
    train = write_rows(tmp_path / "train.jsonl", chats(rows))
    ours = write_run(
        tmp_path / "run",
        model_dir,
        train,
        method=method.model_dump(),
        optimizer={"learning_rate": learning_rate, "weight_decay": 0.01},
        schedule={"type": "linear", "warmup_ratio": 0.1},
        training={
            "num_train_epochs": epochs,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "max_length": LENGTH,
            "precision": "fp32",
            "seed": SEED,
        },
    )
    assert run(ours) == 0, events(ours)[-1]
    metrics = events(ours, "metrics")

    # TRL: the same start, the same tokens, in our batches.
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    numbered = list(rows_of(DataOrder.of(train))[1])
    dataset, _ = tokenise(numbered, Renderer(tokenizer, RenderOptions()), LENGTH)
    order = BatchOrder(len(dataset), batch_size=BATCH, accumulation=ACCUMULATION, seed=SEED)
    seed_all(SEED)
    model = their_start(model_dir, method)
    if epochs > 1 and rows % (BATCH * ACCUMULATION):
        pytest.fail("partial windows are compared over one epoch: two of TRL's epochs have one order")
    total = order.total_steps(epochs, None)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    found = train_under_trl(
        Replay(
            stage="sft",
            examples=[columns("sft", [tuple(part.tolist() for part in dataset[n])], {}) for n in range(len(dataset))],
            batches=[batch for step in range(total) for batch in order.window(step)],
            accumulation=ACCUMULATION,
            optimizer=AdamW(learning_rate=learning_rate, weight_decay=0.01),
            schedule=Linear(warmup_ratio=0.1),
            total_steps=total,
            seed=SEED,
        ),
        model,
        tokenizer,
    )
    losses = found.curve
    assert len(losses) == len(metrics) == total
    for theirs, event in zip(losses, metrics, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            expected = event["values"][name]
            assert float(theirs[name]) == pytest.approx(expected, rel=TOLERANCE, abs=1e-9), (event["step"], name)

    final = load_final(ours, method)
    moved = apart = 0.0
    for name, parameter in found.model.named_parameters():
        if parameter.requires_grad:
            there, here = parameter.detach(), final[name.replace(".default", "")]
            if elementwise:
                torch.testing.assert_close(there, here, rtol=0, atol=TOLERANCE, msg=name)
            way = float((there - start[name]).norm())
            apart = max(apart, float((here - there).norm()) / way) if way else apart
            moved += way
    assert moved > 0
    assert apart < APART, apart


def their_start(model_dir: Path, method: Full | LoRA | QLoRA) -> Any:
    model = start_of(model_dir, method, torch.float32)
    packed = sum(type(module).__name__ == "Linear4bit" for module in model.modules())
    assert (packed > 0) == isinstance(method, QLoRA)
    return model


def load_final(run_dir: Path, method: Full | LoRA | QLoRA) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    match method:
        case LoRA() | QLoRA():
            return load_file(run_dir / "artifacts" / "adapter" / "adapter_model.safetensors")
        case Full():
            return load_file(run_dir / "artifacts" / "model" / "model.safetensors")


METHODS = [Full(), LoRA(r=4, lora_alpha=8, lora_dropout=0.0), QLoRA(r=4, lora_alpha=8, lora_dropout=0.0)]


@pytest.mark.parametrize("method", METHODS, ids=["full", "lora", "qlora"])
def test_two_epochs_with_accumulation(tmp_path: Path, tiny_dir: Path, method: Full | LoRA | QLoRA) -> None:
    compare(tmp_path, tiny_dir, method, rows=32, epochs=2, learning_rate=2e-3)


@pytest.mark.parametrize("method", METHODS[:2], ids=["full", "lora"])
def test_partial_batch_and_window(tmp_path: Path, tiny_dir: Path, method: Full | LoRA | QLoRA) -> None:
    compare(tmp_path, tiny_dir, method, rows=37, epochs=1, learning_rate=2e-3)


@pytest.fixture(scope="module")
def six_layers_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six of SmolLM2's thirty layers: real weights of real widths, a fifth of the minutes."""
    folder = tmp_path_factory.mktemp("six") / "model"
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16, num_hidden_layers=6)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_dir).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", [LoRA, QLoRA])
def test_real_weights(tmp_path: Path, six_layers_dir: Path, method: Any) -> None:
    compare(
        tmp_path,
        six_layers_dir,
        method(r=8, lora_alpha=16, lora_dropout=0.0),
        rows=16,
        epochs=1,
        learning_rate=2e-4,
        elementwise=method is not LoRA,
    )
