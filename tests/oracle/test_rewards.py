"""Reward stages against their peers on the same batches: TRL's RewardTrainer, and the loss of transformers'
AutoModelForTokenClassification under plain torch (TRL has no trainer of process reward models any more).

Same initial adapters and head, AdamW, a linear schedule, clipping, accumulation: loss, gradient norm and scores of
every step agree within a relative 1e-5 in float32, the final adapters and heads within 1e-5 absolute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import get_scheduler

from core.spec.axes.method import LoRA
from core.spec.run.orders import RunOrder
from core.train.base.rng import seed_all
from core.train.data.dataset import TokenDataset
from core.train.data.order import BatchOrder
from core.train.data.tokens import TokenReader
from core.train.model.heads import backbone_of, head_of_model, pad_token_of
from core.train.verify.columns import columns
from core.train.verify.peer import Replay, train
from core.train.verify.replay import start_of
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.oracle.test_preferences import sequences, values
from tests.support.rewards import margins, solutions
from tests.support.trainer import events, run, write_rows, write_run

ROWS, BATCH, ACCUMULATION, SEED = 16, 4, 2, 7
METHOD = LoRA(r=4, lora_alpha=8, lora_dropout=0.0)
TOLERANCE = 1e-5


def trained(
    tmp_path: Path,
    model_dir: Path,
    stage: dict[str, Any],
    rows: list[dict[str, Any]],
    precision: str = "fp32",
    **axes: Any,
) -> Path:
    folder = write_run(
        tmp_path / "run",
        model_dir,
        write_rows(tmp_path / "rows.jsonl", rows),
        stage=stage,
        method=METHOD.model_dump(),
        optimizer={"learning_rate": 2e-3, "weight_decay": 0.0},
        schedule={"type": "linear", "warmup_ratio": 0.1},
        training={
            "num_train_epochs": 2,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "max_length": 96,
            "precision": precision,
            "seed": SEED,
        },
        **axes,
    )
    assert run(folder) == 0, events(folder)[-1]
    return folder


def dataset_of(order: RunOrder, tokenizer: Any) -> TokenDataset:
    return TokenReader(order, tokenizer, lambda *_: None, lambda _: None).read(order.train).tokens.dataset


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", TOLERANCE), ("bf16", 2e-2)])
def test_a_reward_model_is_trls(tmp_path: Path, tiny_dir: Path, precision: str, tolerance: float) -> None:
    stage = {"type": "reward", "center_rewards_coefficient": 0.01}
    folder = trained(tmp_path, tiny_dir, stage, margins(ROWS), precision)
    ours, tokenizer = events(folder, "metrics"), load_tokenizer(tiny_dir)
    order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
    dataset, pad = dataset_of(order, tokenizer), pad_token_of(tokenizer)
    assert pad is not None
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    cut = BatchOrder(ROWS, batch_size=BATCH, accumulation=ACCUMULATION, seed=SEED)
    seed_all(SEED)
    model = start_of(tiny_dir, METHOD, torch.float32, head="score", pad_token_id=pad)
    theirs = train(
        Replay(
            "reward",
            [columns("reward", sequences(dataset, row), values(dataset, row)) for row in range(ROWS)],
            [rows for step in range(len(ours)) for rows in cut.window(step)],
            ACCUMULATION,
            order.spec.optimizer,  # type: ignore[arg-type]
            order.spec.schedule,
            len(ours),
            seed=SEED,
            precision=precision,
            options={"center_rewards_coefficient": 0.01},
        ),
        model,
        tokenizer,
    )
    assert len(theirs.curve) == len(ours) == 4
    for there, event in zip(theirs.curve, ours, strict=True):
        here = event["values"]
        for figure in ("loss", "grad_norm", "learning_rate", "margin", "mean_reward"):
            about = pytest.approx(there[figure], rel=tolerance, abs=tolerance / 10)
            assert here[figure] == about, (event["step"], figure)
        if precision == "fp32":  # scores that are nearly equal may change places in bf16
            assert here["accuracy"] == there["accuracy"]
        # TRL's are means over the batches of the step, ours are of the whole step.
        assert here["min_reward"] <= there["min_reward"] + tolerance
        assert here["max_reward"] >= there["max_reward"] - tolerance
    same(folder, theirs.model, tolerance)


def test_a_process_reward_model_is_that_of_transformers(tmp_path: Path, tiny_dir: Path) -> None:
    folder = trained(tmp_path, tiny_dir, {"type": "process_reward"}, solutions(ROWS), batching="rows")
    ours, tokenizer = events(folder, "metrics"), load_tokenizer(tiny_dir)
    order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
    dataset = dataset_of(order, tokenizer)
    cut = BatchOrder(ROWS, batch_size=BATCH, accumulation=ACCUMULATION, seed=SEED)
    seed_all(SEED)
    model: Any = start_of(tiny_dir, METHOD, torch.float32, head="labels", pad_token_id=pad_token_of(tokenizer))
    assert type(model.get_base_model()).__name__ == "LlamaForTokenClassification"
    model.get_base_model().dropout.p = 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=len(ours))
    model.train()
    for step, event in enumerate(ours):
        rows = [row for batch in cut.window(step) for row in batch]
        ids, labels = zip(*(judged(dataset, row) for row in rows), strict=True)
        loss = model(
            input_ids=pad_sequence(list(ids), batch_first=True),
            labels=pad_sequence(list(labels), batch_first=True, padding_value=-100),
        ).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found = {"loss": loss.item(), "grad_norm": float(norm), "learning_rate": rate}
        for figure, value in found.items():
            assert event["values"][figure] == pytest.approx(value, rel=TOLERANCE, abs=1e-9), (step, figure)
    same(folder, model)


def judged(dataset: TokenDataset, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) of a row; -100 at every token but the separators behind its steps."""
    ids, learned = dataset.sequence(row)
    start, end = dataset.starts[row], dataset.ends[row]
    labels = torch.from_numpy(dataset.token_values["label"][start:end].astype("int64"))
    return ids.long(), labels.masked_fill(~learned, -100)


def same(folder: Path, model: Any, tolerance: float = TOLERANCE) -> None:
    final = load_file(folder / "artifacts" / "adapter" / "adapter_model.safetensors")
    there = get_peft_model_state_dict(model)
    assert there.keys() == final.keys() and any(".score." in name for name in final)
    for parameter, value in there.items():
        torch.testing.assert_close(final[parameter], value.detach(), rtol=0, atol=tolerance, msg=parameter)
    assert isinstance(model, PeftModel) and head_of_model(model) is not None and backbone_of(model) is not None
