"""`stage: {type: sft, loss: dft}` against TRL's SFTTrainer with `loss_type="dft"`: same weights, tokens and order.

fp32, one step of four unequal batches at a time: losses and gradient norms agree within a relative 1e-5, final weights
within 1e-5 absolute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from core.spec.axes.method import Full, LoRA
from core.spec.run.orders import DataOrder
from core.train.base.rng import seed_all
from core.train.batch import IGNORE_INDEX
from core.train.data.order import BatchOrder
from core.train.data.reader import rows_of
from core.train.data.tokenise import tokenise
from core.train.recipe import run
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from tests.oracle.test_trl import load_final, their_start
from tests.support.trainer import chats, events, write_rows, write_run

TOLERANCE = 1e-5


class InOurOrder(SFTTrainer):
    """TRL's trainer; the data set is already in the order that our seed gives."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


@pytest.mark.parametrize("method", [Full(), LoRA(r=4, lora_alpha=8)], ids=["full", "lora"])
def test_a_run_is_that_of_trl(tmp_path: Path, tiny_dir: Path, method: Any) -> None:
    train = write_rows(tmp_path / "train.jsonl", chats(16))
    common: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours = write_run(
        tmp_path / "run",
        tiny_dir,
        train,
        method=method.model_dump(),
        stage={"type": "sft", "loss": "dft"},
        optimizer={"learning_rate": 2e-3},
        schedule={"type": "linear", "warmup_ratio": 0.1},
        training=common | {"max_length": 96, "precision": "fp32", "seed": 7},
    )
    assert run(ours) == 0, events(ours)[-1]
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    dataset, _ = tokenise(rows_of(DataOrder.of(train))[1], Renderer(tokenizer, RenderOptions()), 96)
    order = BatchOrder(len(dataset), batch_size=2, accumulation=4, seed=7)
    items = []
    for ids, learned in map(dataset.__getitem__, order.epoch_order(0)):
        items.append({"input_ids": ids.tolist(), "labels": torch.where(learned, ids, IGNORE_INDEX).tolist()})
    seed_all(7)
    trainer = InOurOrder(
        model=their_start(tiny_dir, method),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            loss_type="dft",
            learning_rate=2e-3,
            lr_scheduler_type="linear",
            warmup_steps=0.1,
            max_grad_norm=1.0,
            max_length=96,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            **common,
        ),
        train_dataset=Dataset.from_list(items),
        processing_class=tokenizer,
    )
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for there, event in zip(theirs, events(ours, "metrics"), strict=True):
        for name in ("loss", "grad_norm"):
            assert float(there[name]) == pytest.approx(event["values"][name], rel=TOLERANCE), (event["step"], name)
        assert event["values"]["nll_loss"] > 5 * event["values"]["loss"], "improbable tokens count for less"
    final = load_final(ours, method)
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            here = final[name.replace(".default", "")]
            torch.testing.assert_close(parameter.detach(), here, rtol=0, atol=TOLERANCE, msg=name)
