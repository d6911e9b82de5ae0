"""`stage: {type: sft, loss: dft}` against TRL's SFTTrainer with `loss_type="dft"`: same weights, tokens and order.

fp32, one step of four unequal batches at a time: losses and gradient norms agree within a relative 1e-5, final weights
within 1e-5 absolute. A mixture of experts, trained with its load-balancing loss, stands beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from core.spec.axes.method import Full, LoRA
from core.train.verify.peer import train, trained_parameters
from core.train.verify.replay import prepare
from tests.oracle.test_trl import load_final
from tests.support.trainer import chats, events, run, write_rows, write_run

TOLERANCE = 1e-5


def compare(tmp_path: Path, model_dir: Path, method: Any, figures: tuple[str, ...], **axes: Any) -> list[str]:
    """Metrics of the run's steps and its final weights against TRL's; returns what is known to differ."""
    rows = write_rows(tmp_path / "train.jsonl", chats(16))
    ours = write_run(
        tmp_path / "run",
        model_dir,
        rows,
        method=method.model_dump(),
        optimizer={"learning_rate": 2e-3},
        schedule={"type": "linear", "warmup_ratio": 0.1},
        **axes,
    )
    assert run(ours) == 0, events(ours)[-1]
    found = prepare(ours, 100)
    theirs = train(found.replay, found.model, found.tokenizer)
    for there, event in zip(theirs.curve, events(ours, "metrics"), strict=True):
        for name in ("loss", "grad_norm", *figures):
            assert there[name] == pytest.approx(event["values"][name], rel=TOLERANCE), (event["step"], name)
    final = load_final(ours, method) if isinstance(method, LoRA) else written(ours)
    for name, parameter in trained_parameters(theirs.model).items():
        torch.testing.assert_close(parameter, final[name], rtol=0, atol=TOLERANCE, msg=name)
    return found.differing


def written(run_dir: Path) -> dict[str, torch.Tensor]:
    """The trained model by the names of its modules, which are not those of the file for a mixture of experts."""
    found: Any = AutoModelForCausalLM.from_pretrained(run_dir / "artifacts" / "model")
    return dict(found.named_parameters())


@pytest.mark.parametrize("method", [Full(), LoRA(r=4, lora_alpha=8)], ids=["full", "lora"])
def test_a_run_is_that_of_trl(tmp_path: Path, tiny_dir: Path, method: Any) -> None:
    common: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    stage = {"type": "sft", "loss": "dft"}
    training = common | {"max_length": 96, "precision": "fp32", "seed": 7}
    compare(tmp_path, tiny_dir, method, (), stage=stage, training=training)
    for event in events(tmp_path / "run", "metrics"):
        assert event["values"]["nll_loss"] > 5 * event["values"]["loss"], "improbable tokens count for less"


@pytest.mark.parametrize("coefficient", [None, 0.0], ids=["balanced", "not balanced"])
def test_a_mixture_of_experts_is_balanced_as_by_trl(tmp_path: Path, tiny_dir: Path, coefficient: float | None) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(tmp_path / "model")
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_length": 96,
                "precision": "fp32", "seed": 7, "router_aux_loss_coef": coefficient}  # fmt: skip
    figures = ("aux_loss",) if coefficient is None else ()
    assert compare(tmp_path, tmp_path / "model", Full(), figures, training=training) == []
