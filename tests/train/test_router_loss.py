"""The load-balancing loss of mixture-of-experts models against transformers' own, and how a run has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from core.spec.run.exit_codes import EXIT_OK
from core.train.batch import IGNORE_INDEX, Batch, share_prefixes
from core.train.loss.router import RouterBalance, add_balance
from tests.support.mixtures import MODELS, mixture, saved
from tests.support.preferences import preferences
from tests.support.trainer import PLAIN, chats, events, run, write_rows, write_run

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    return saved(tmp_path_factory.mktemp("mixture") / "model", tiny_dir)


def packed(rows: list[list[int]], sequences: int = 1) -> Batch:
    ids = torch.tensor([token for row in rows for token in row])
    lengths = tuple(map(len, rows))
    labels = ids.clone()
    labels[[sum(lengths[:at]) for at in range(len(rows))]] = IGNORE_INDEX
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(ids[None], labels[None], lengths, len(ids) - len(rows), positions[None], ends, sequences=sequences)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return found


def of_router(name: str) -> bool:
    return "gate." in name or "router" in name


@pytest.mark.parametrize("name", MODELS)
def test_one_sequence_has_the_loss_of_transformers(name: str) -> None:
    model: Any = mixture(name)
    ids = torch.randint(2, 258, (1, 24))
    theirs = model(input_ids=ids, labels=ids, output_router_logits=True)
    theirs.loss.backward()
    expected = gradients(model)
    balance = RouterBalance(model)
    with balance.watching(Batch(ids, ids, (24,), 23)) as watched:
        loss = model(input_ids=ids, labels=ids).loss
    total = add_balance(loss, watched, 0.5)
    total.backward()
    torch.testing.assert_close(watched.balance(), theirs.aux_loss, **CLOSE)
    torch.testing.assert_close(total, theirs.loss, **CLOSE)
    found = gradients(model)
    assert found.keys() == expected.keys() and any(map(of_router, found))
    for part, gradient in expected.items():
        assert (found[part] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), part
    model(input_ids=ids, labels=ids).loss.backward()
    router = next(filter(of_router, found))
    assert not torch.allclose(gradients(model)[router], found[router], rtol=1e-2), "the balance has a part in it"


ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 40, 41, 42], [11, 12, 13], [11, 12, 90, 91]]


def summed(model: nn.Module, balance: RouterBalance, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Sum of the balance over all rows, and its gradient; the rows' logits have none."""
    value = 0.0
    for batch in batches:
        with balance.watching(batch) as watched:
            inputs = batch.inputs()
            if batch.packed:  # a row after the other for the attention, all in one line for the routers
                inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
            logits = model(**inputs).logits
        add_balance(logits.sum() * 0.0, watched, 0.25).backward()  # type: ignore[no-untyped-call]
        value += float(watched.balance())
    return value, gradients(model)


def test_the_sum_over_rows_is_that_of_each_row_alone(mixture_dir: Path) -> None:
    """In a padded batch; padding is counted for nothing."""
    model, width = mixture(), max(map(len, ROWS))
    ids = torch.tensor([row + [3] * (width - len(row)) for row in ROWS])
    balance = RouterBalance(model)
    whole, together = summed(model, balance, [Batch(ids, ids, tuple(map(len, ROWS)), 1)])
    alone = [Batch(torch.tensor([row]), torch.tensor([row]), (len(row),), 1) for row in ROWS]
    apart, one_by_one = summed(model, balance, alone)
    assert whole == pytest.approx(apart, rel=1e-6)
    for name, gradient in one_by_one.items():
        torch.testing.assert_close(together[name], gradient, msg=name, rtol=1e-4, atol=1e-6)


def test_tokens_of_a_shared_prompt_count_for_each_answer() -> None:
    batch = packed(ROWS, sequences=2)
    shared = share_prefixes(batch)
    assert shared.input_ids.shape[1] == batch.tokens - 4 - 2
    logits = torch.randn(shared.input_ids.shape[1], 4)
    assert shared.shared is not None
    of = {"shared": (shared, logits), "apart": (batch, logits[shared.shared.places])}
    found = {}
    for name, (batch_of, router_logits) in of.items():
        balance = RouterBalance(mixture())
        with balance.watching(batch_of) as watched:
            watched.count(router_logits, 2)
        watched.upstream = torch.tensor(1.0)
        found[name] = watched.balance(), watched.gradient(router_logits)
    torch.testing.assert_close(found["shared"][0], found["apart"][0])
    added = torch.zeros_like(logits).index_add_(0, shared.shared.places, found["apart"][1])
    torch.testing.assert_close(found["shared"][1], added)


def test_blocks_computed_twice_count_once() -> None:
    """By torch's checkpoints here; by our own in the streamed run below."""
    from torch.utils.checkpoint import checkpoint

    model: Any = mixture()
    balance = RouterBalance(model)
    ids = torch.tensor([[5, 9, 11, 40, 41, 6, 90]])
    batch = Batch(ids, ids, (7,), 6)
    wanted = summed(model, balance, [batch])
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **named: checkpoint(forward, *args, use_reentrant=False, **named)
    found = summed(model, balance, [batch])
    assert found[0] == wanted[0]
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name, rtol=1e-4, atol=1e-6)


# --- runs ------------------------------------------------------------------------------------------------


def train(folder: Path, model: Path, stage: str, *, code: int = EXIT_OK, **axes: Any) -> list[dict[str, Any]]:
    pairs = stage == "dpo"
    rows = write_rows(folder.with_suffix(".jsonl"), preferences(8) if pairs else chats(8))
    source = {"type": "path", "path": str(rows), "format": "preference" if pairs else "messages"}
    axes["training"] = {"max_steps": 2, "max_length": 64, "precision": "fp32"} | axes.get("training", {})
    run_dir = write_run(
        folder,
        model,
        rows,
        data={"train": source, "eval": source, "rendering": PLAIN},
        stage=stage,
        method={"type": "lora", "r": 4, "target_modules": "attention"},
        optimizer={"learning_rate": 5e-3},
        schedule={"type": "linear", "warmup_ratio": 0.0},
        **axes,
    )
    assert run(run_dir) == code, events(run_dir)[-1]
    return events(run_dir)


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "artifacts" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_an_update_does_not_depend_on_the_cut(tmp_path: Path, mixture_dir: Path, stage: str) -> None:
    cuts: dict[str, dict[str, Any]] = {
        "whole": {"training": {"per_device_train_batch_size": 8}},
        "parts": {"training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}},
        "packed": {"batching": {"type": "packed", "tokens_per_batch": 1024}},
        "streamed": {"training": {"per_device_train_batch_size": 8}, "memory": {"stream": "host"}},
    }
    found = {name: train(tmp_path / name, mixture_dir, stage, **axes) for name, axes in cuts.items()}
    whole = [event["values"] for event in found["whole"] if event["type"] == "metrics"]
    assert whole[0]["aux_loss"] > 1.0, "a balance over sequences is 1 at least, where experts are chosen evenly"
    record = next(event["record"] for event in found["whole"] if event["type"] == "run_record")
    assert record["router_loss"] == {"coefficient": 0.5}
    for name, told in found.items():
        metrics = [event["values"] for event in told if event["type"] == "metrics"]
        for here, there in zip(metrics, whole, strict=True):
            for figure in ("loss", "aux_loss", "grad_norm"):
                assert here[figure] == pytest.approx(there[figure], rel=1e-4), (name, figure)
        for tensor, value in adapter(tmp_path / name).items():
            torch.testing.assert_close(value, adapter(tmp_path / "whole")[tensor], rtol=0, atol=2e-5, msg=name)
        before = next(event["values"] for event in told if event["type"] == "evaluation")
        assert before["eval_loss"] == pytest.approx(whole[0]["loss"], rel=1e-4)
        assert before["eval_aux_loss"] == pytest.approx(whole[0]["aux_loss"], rel=1e-4)


def test_the_job_decides(tmp_path: Path, mixture_dir: Path, tiny_dir: Path) -> None:
    off = train(tmp_path / "off", mixture_dir, "sft", training={"router_aux_loss_coef": 0, "max_steps": 1})
    assert not any("aux_loss" in event["values"] for event in off if event["type"] == "metrics")
    record = next(event["record"] for event in off if event["type"] == "run_record")
    assert record["router_loss"] == {"coefficient": 0.0}
    dense = train(tmp_path / "dense", tiny_dir, "sft", code=1, training={"router_aux_loss_coef": 0.1})
    assert dense[-1]["field"] == "training.router_aux_loss_coef" and "no routers" in dense[-1]["message"], dense[-1]
