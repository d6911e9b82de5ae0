"""TRL's trainers of preference stages on the same batches give the same trajectory.

Same initial adapters, the same tokens in the same batches, AdamW, a linear schedule, clipping, accumulation: loss,
gradient norm and learning rate of every step agree within a relative 1e-5 in float32, the final adapters within 1e-5
absolute. Windows are full and batches of one size, since TRL takes means of batches. KTO's divergence is a mean over
the step here and over a batch there, so its batches are whole steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.spec.axes.method import LoRA
from core.spec.run.orders import RunOrder
from core.train.base.rng import seed_all
from core.train.data.dataset import TokenDataset
from core.train.data.order import BatchOrder
from core.train.data.tokens import TokenReader
from core.train.data.truncate import truncate
from core.train.examples.mismatched import arrange
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model, load_tokenizer
from core.train.recipe import run
from core.train.verify.columns import columns
from core.train.verify.peer import Replay, train, trained_parameters
from tests.support.preferences import judged, preferences
from tests.support.trainer import PLAIN, events, write_rows, write_run

ROWS, BATCH, ACCUMULATION, SEED = 16, 4, 2, 7
METHOD = LoRA(r=4, lora_alpha=8, lora_dropout=0.0)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # our stage, and the same for TRL
    "sigmoid": ({"type": "dpo"}, {"loss_type": ["sigmoid"]}),
    "hinge": ({"type": "dpo", "loss": "hinge", "beta": 0.5}, {"loss_type": ["hinge"], "beta": 0.5}),
    "ipo": ({"type": "dpo", "loss": "ipo"}, {"loss_type": ["ipo"]}),
    "robust": (
        {"type": "dpo", "loss": "robust", "label_smoothing": 0.1},
        {"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    "simpo": ({"type": "simpo"}, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}),
    "orpo": ({"type": "orpo"}, {"beta": 0.1}),
    "kto": ({"type": "kto", "undesirable_weight": 1.5}, {"undesirable_weight": 1.5}),
}
OURS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "kl")
"""Metrics of ours that TRL has by the same name and with the same meaning."""


def replay(
    tmp_path: Path,
    model_dir: Path,
    name: str,
    *,
    packed: bool = False,
    precision: str = "fp32",
    tolerance: float = 1e-5,
) -> None:
    stage, options = CASES[name]
    kto = stage["type"] == "kto"
    accumulation = 1 if kto or stage["type"] == "orpo" else ACCUMULATION
    rows = write_rows(tmp_path / "rows.jsonl", judged(ROWS) if kto else preferences(ROWS))
    axes: dict[str, Any] = (
        {"data": {"train": {"type": "path", "path": str(rows), "format": "kto"}, "rendering": PLAIN}} if kto else {}
    )
    folder = write_run(
        tmp_path / "run",
        model_dir,
        rows,
        stage=stage,
        method=METHOD.model_dump(),
        optimizer={"learning_rate": 2e-3, "weight_decay": 0.0},
        schedule={"type": "linear", "warmup_ratio": 0.1},
        training={
            "num_train_epochs": 2,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": accumulation,
            "max_length": 96,
            "precision": precision,
            "seed": SEED,
        },
        **axes,
    )
    assert run(folder) == 0, events(folder)[-1]
    ours = events(folder, "metrics")

    order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
    tokenizer = load_tokenizer(model_dir)
    tokens = TokenReader(order, tokenizer, lambda *_: None, lambda _: None).read(order.train).tokens
    whole, _ = truncate(arrange(tokens.dataset, order.spec.stage, SEED), 96, "cut_right")
    cut = BatchOrder(ROWS, batch_size=BATCH, accumulation=accumulation, seed=SEED)
    batches = [rows for step in range(len(ours)) for rows in cut.window(step)]
    seed_all(SEED)
    model = adapt_lora(load_model(model_dir, torch.float32), METHOD)
    theirs = train(
        Replay(
            stage["type"],
            [columns(stage["type"], sequences(whole, row), values(whole, row)) for row in range(len(whole))],
            batches,
            accumulation,
            order.spec.optimizer,  # type: ignore[arg-type]
            order.spec.schedule,
            len(ours),
            seed=SEED,
            precision=precision,
            options=options,
        ),
        model,
        tokenizer,
    )
    assert len(theirs.curve) == len(ours) >= 4
    for there, event in zip(theirs.curve, ours, strict=True):
        here = event["values"]
        for figure in ("loss", "grad_norm", "learning_rate"):
            assert here[figure] == pytest.approx(there[figure], rel=tolerance, abs=1e-9), (event["step"], figure)
        for figure in OURS:
            if figure == "rewards/accuracies" and event["step"] < 3:
                continue  # before the first update all rewards are 0, but for rounding
            if figure in here and figure in there and not (stage["type"] != "dpo" and figure.startswith("logps")):
                assert here[figure] == pytest.approx(there[figure], rel=10 * tolerance, abs=10 * tolerance), figure
    final = load_file(folder / "artifacts" / "adapter" / "adapter_model.safetensors")
    there = trained_parameters(theirs.model)
    assert there.keys() == final.keys()
    for parameter, value in there.items():
        torch.testing.assert_close(final[parameter], value, rtol=0, atol=tolerance, msg=parameter)


def sequences(dataset: TokenDataset, row: int) -> list[tuple[list[int], list[bool]]]:
    found = (dataset.sequence(row * dataset.sequences + place) for place in range(dataset.sequences))
    return [(ids.tolist(), learned.tolist()) for ids, learned in found]


def values(dataset: TokenDataset, row: int) -> dict[str, float]:
    return {name: float(array[row]) for name, array in dataset.values.items()}


def test_in_bf16_it_is_trls_but_for_rounding(tmp_path: Path, tiny_dir: Path) -> None:
    replay(tmp_path, tiny_dir, "sigmoid", precision="bf16", tolerance=2e-2)


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_trls(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    replay(tmp_path, tiny_dir, name)
