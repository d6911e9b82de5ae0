"""TRL's trainers of preference stages on the same batches give the same trajectory.

Same initial adapters, the same tokens in the same batches, AdamW, a linear schedule, clipping, accumulation: loss,
gradient norm and learning rate of every step agree within a relative 1e-5 in float32, the final adapters within 1e-5
absolute. Windows are full and batches of one size, since TRL takes means of batches. KTO's divergence is a mean over
the step here and over a batch there, so its batches are whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import get_scheduler

from core.spec.axes.method import LoRA
from core.spec.run.folder import REFERENCE
from core.spec.run.orders import RunOrder
from core.train.base.rng import seed_all
from core.train.data.dataset import TokenDataset
from core.train.data.order import BatchOrder
from core.train.data.tokens import TokenReader
from core.train.data.truncate import truncate
from core.train.examples.mismatched import arrange
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.verify.columns import columns
from core.train.verify.peer import Replay, train, trained_parameters
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.preferences import judged, preferences
from tests.support.trainer import PLAIN, events, run, write_rows, write_run

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
WHOLE_STEPS = ("kto", "orpo")
"""Losses with a mean over answers or tokens of a batch in TRL, of a step in ours: each step is one batch."""
BETA, SMOOTHING, NLL = 0.5, 0.1, 0.5


def trained(
    tmp_path: Path,
    model_dir: Path,
    stage: dict[str, Any],
    accumulation: int,
    precision: str = "fp32",
    epochs: int = 2,
    adapter: Path | None = None,
) -> Path:
    kto = stage["type"] == "kto"
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
            "num_train_epochs": epochs,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": accumulation,
            "max_length": 96,
            "precision": precision,
            "seed": SEED,
        },
        **axes,
    )
    if adapter is not None:
        order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
        (folder / "run.json").write_text(order.model_copy(update={"adapter_dir": str(adapter)}).model_dump_json())
    assert run(folder) == 0, events(folder)[-1]
    return folder


def examples(folder: Path, tokenizer: Any) -> TokenDataset:
    order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
    tokens = TokenReader(order, tokenizer, lambda *_: None, lambda _: None).read(order.train).tokens
    return truncate(arrange(tokens.dataset, order.spec.stage, SEED), 96, "cut_right")[0]


def replay(
    tmp_path: Path, model_dir: Path, name: str, *, precision: str = "fp32", tolerance: float = 1e-5, epochs: int = 2
) -> None:
    stage, options = CASES[name]
    accumulation = 1 if name in WHOLE_STEPS else ACCUMULATION
    folder = trained(tmp_path, model_dir, stage, accumulation, precision, epochs)
    ours = events(folder, "metrics")

    order = RunOrder.model_validate_json((folder / "run.json").read_bytes())
    tokenizer = load_tokenizer(model_dir)
    whole = examples(folder, tokenizer)
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
    assert len(theirs.curve) == len(ours) >= 2 * epochs
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


@pytest.mark.parametrize("name", CASES)
def test_in_bf16_it_is_trls_but_for_rounding(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    replay(tmp_path, tiny_dir, name, precision="bf16", tolerance=2e-2, epochs=1)


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_trls(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    replay(tmp_path, tiny_dir, name)


def kto_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
    """As TRL 0.8 and the authors' HALOs have it; the divergence is over the whole step and has no gradient."""
    kl_chosen, kl_rejected = (ratios.mean().clamp(min=0).detach() for ratios in (chosen, rejected))
    halves = torch.sigmoid(BETA * (chosen - kl_rejected)), torch.sigmoid(BETA * (kl_chosen - rejected))
    return (1 - torch.cat(halves)).mean()


def smoothed(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Conservative DPO (Mitchell 2023): a label is wrong with the probability SMOOTHING."""
    delta = BETA * (chosen - rejected)
    return (-functional.logsigmoid(delta) * (1 - SMOOTHING) - functional.logsigmoid(-delta) * SMOOTHING).mean()


@pytest.mark.parametrize(
    "formula, stage",
    [
        (kto_pair, {"loss": "kto_pair", "beta": BETA}),
        (smoothed, {"loss": "sigmoid", "beta": BETA, "label_smoothing": SMOOTHING, "nll_weight": NLL}),
    ],
    ids=["kto_pair", "smoothed sigmoid with nll"],
)
def test_what_trl_lacks_is_the_formula_of_its_authors(
    tmp_path: Path, tiny_dir: Path, formula: Callable[[Tensor, Tensor], Tensor], stage: dict[str, Any]
) -> None:
    """Under plain torch, over plain transformers and PEFT."""
    folder = trained(tmp_path, tiny_dir, {"type": "dpo"} | stage, ACCUMULATION)
    ours, dataset = events(folder, "metrics"), examples(folder, load_tokenizer(tiny_dir))
    cut = BatchOrder(ROWS, batch_size=BATCH, accumulation=ACCUMULATION, seed=SEED)
    seed_all(SEED)
    model = adapt_lora(load_model(tiny_dir, torch.float32), METHOD)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=len(ours))
    with torch.no_grad():
        start = log_probabilities(model, dataset, range(ROWS))
    for step, event in enumerate(ours):
        rows = [row for batch in cut.window(step) for row in batch]
        logps = log_probabilities(model, dataset, rows)
        loss = formula(*(logps - start[rows]).unbind(1))
        if weight := stage.get("nll_weight"):
            answers = sum(sum(sequences(dataset, row)[0][1]) for row in rows)
            loss = loss - weight * logps[:, 0].sum() / answers
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for figure, value in {"loss": loss.item(), "grad_norm": norm.item()}.items():
            assert event["values"][figure] == pytest.approx(value, rel=1e-5), (step, figure)
    final = load_file(folder / "artifacts" / "adapter" / "adapter_model.safetensors")
    for parameter, value in trained_parameters(model).items():
        torch.testing.assert_close(final[parameter], value, rtol=0, atol=1e-5, msg=parameter)


def test_the_reference_of_a_continued_adapter_is_that_adapter(tmp_path: Path, tiny_dir: Path) -> None:
    """To the bit the same whatever the loss, and that of plain PEFT with the adapter; the base model's is another."""
    first = trained(tmp_path, tiny_dir, {"type": "simpo"}, ACCUMULATION, epochs=1)
    adapter = first / "artifacts" / "adapter"
    found = []
    for loss in ("sigmoid", "ipo"):
        folder = tmp_path / loss
        folder.mkdir()
        folder = trained(folder, tiny_dir, {"type": "dpo", "loss": loss}, ACCUMULATION, epochs=1, adapter=adapter)
        found.append((folder / REFERENCE).read_bytes())
    assert found[0] == found[1]
    ours = load_file(folder / REFERENCE)["train"]
    base, dataset = load_model(tiny_dir, torch.float32), examples(folder, load_tokenizer(tiny_dir))
    with torch.no_grad():
        alone = log_probabilities(base, dataset, range(ROWS))
        continued = log_probabilities(PeftModel.from_pretrained(base, adapter), dataset, range(ROWS))
    torch.testing.assert_close(ours, continued, rtol=1e-5, atol=1e-5)
    assert (ours - alone).abs().min() > 1e-3


def log_probabilities(model: Any, dataset: TokenDataset, rows: Sequence[int]) -> Tensor:
    """Summed log-probability of the answers [rows, chosen and rejected], by plain transformers."""
    both = [part for row in rows for part in sequences(dataset, row)]
    ids = pad_sequence([torch.tensor(one) for one, _ in both], batch_first=True)
    learned = pad_sequence([torch.tensor(one) for _, one in both], batch_first=True)[:, 1:]
    told = torch.log_softmax(model(input_ids=ids).logits[:, :-1], dim=-1)
    return (told.gather(-1, ids[:, 1:, None]).squeeze(-1) * learned).sum(1).view(-1, 2)
