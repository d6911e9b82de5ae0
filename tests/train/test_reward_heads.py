"""What reward stages hand back loads in plain transformers and PEFT and judges as it did at the end of training; a new
head goes over any weights and any language model's adapter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from core.errors import EftError
from core.spec.axes.method import Full, LoRA
from core.train.base.adapters import load_adapter
from core.train.base.rng import seed_all
from core.train.data.dataset import TokenDataset
from core.train.data.truncate import cut_rows
from core.train.examples.steps import last_labels
from core.train.model.heads import head_of_model, pad_token_of, with_head
from core.train.model.load import load_model
from core.train.optim.groups import decay_groups
from core.train.verify.replay import start_of
from tests.support.rewards import margins, solutions
from tests.support.trainer import ROOT, events, pairs, run, write_rows, write_run

ROWS = 8
LORA, QLORA = {"type": "lora", "r": 4, "lora_dropout": 0.0}, {"type": "qlora", "r": 4, "lora_dropout": 0.0}
EXACT = [{"type": "merged", "dtype": "fp32"}]
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": {"type": "full"}},
    "full, offloaded": {"method": {"type": "full"}, "memory": {"offload_optimizer": "host"}},
    "lora": {"method": LORA, "export": EXACT},
    "lora, packed rows": {"method": LORA, "batching": {"type": "packed", "tokens_per_batch": 256}},
    "lora, streamed": {"method": LORA, "memory": {"stream": {"type": "host", "slots": 1}}},
    "nf4, from disk": {"method": QLORA, "memory": {"stream": {"type": "disk", "slots": 1}}, "export": EXACT},
    "dora": {"method": LORA | {"use_dora": True}},
    "oft": {"method": {"type": "oft"}},
    "nf4": {"method": QLORA, "export": EXACT},
    "int8": {"method": QLORA, "quantization": "int8", "export": EXACT},
}


def trained(tmp_path: Path, model_dir: Path, stage: str, **axes: Any) -> Path:
    rows = {"reward": margins, "process_reward": solutions, "sft": pairs}[stage](ROWS)
    path = write_rows(tmp_path / f"{stage}.jsonl", rows)
    folder = write_run(
        tmp_path / f"{stage}-run",
        model_dir,
        path,
        held_out=path if stage != "sft" else None,
        stage=stage,
        cache_dir=tmp_path / "cache",
        optimizer={"learning_rate": 5e-3},
        training={"max_steps": 3, "max_length": 96, "precision": "fp32"},
        **axes,
    )
    assert run(folder) == 0, events(folder)[-1]
    return folder


@pytest.fixture(scope="module")
def judges(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of each case. It is everybody's: nothing is written there."""
    return {name: trained(tmp_path_factory.mktemp("judge"), tiny_dir, "reward", **axes) for name, axes in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_plain_transformers_scores_as_training_did(judges: dict[str, Path], tiny_dir: Path, name: str) -> None:
    folder = judges[name]
    before, after = (event["values"] for event in events(folder, "evaluation"))
    assert after["eval_accuracy"] > before["eval_accuracy"] and after["eval_loss"] < before["eval_loss"]
    artifacts = folder / "artifacts"
    found = {path.name for path in artifacts.iterdir() if path.is_dir()}
    assert (
        found == {"model"}
        if "full" in name
        else found == {"adapter"} | ({"merged"} if "export" in CASES[name] else set())
    )
    for kind in found:
        if kind == "adapter" and CASES[name]["method"]["type"] == "qlora":
            continue  # judged over packed weights, which are no plain model's
        scores = scored(artifacts / kind, tiny_dir)
        shown = {"min": scores.min(), "mean": scores.mean(), "max": scores.max()}
        for figure, value in shown.items():
            assert float(value) == pytest.approx(after[f"eval_{figure}_reward"], abs=2e-5), (kind, figure)
    record = (artifacts / next(iter(found)) / "README.md").read_text()
    assert "Reward model (" in record and "AutoModelForSequenceClassification" in record


def scored(folder: Path, model_dir: Path) -> torch.Tensor:
    """Scores of chosen and rejected answers, in one padded batch, as a user would compute them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    if (folder / "adapter_config.json").exists():
        base: Any = AutoModelForSequenceClassification.from_pretrained(
            model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
        )
        model: Any = PeftModel.from_pretrained(base, folder)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    texts = [row["prompt"] + row[answer] for row in margins(ROWS) for answer in ("chosen", "rejected")]
    batch = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return found.squeeze(-1)


def test_plain_transformers_judges_steps(tmp_path: Path, tiny_dir: Path) -> None:
    folder = trained(tmp_path, tiny_dir, "process_reward", method=LORA, export=EXACT)
    model: Any = AutoModelForTokenClassification.from_pretrained(folder / "artifacts" / "merged")
    assert model.config.id2label == {0: "wrong", 1: "right"}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "artifacts" / "merged")
    right = total = 0
    for row in solutions(ROWS):
        ids = tokenizer(row["prompt"])["input_ids"]
        places = []
        for step in row["completions"]:
            ids += tokenizer(step, add_special_tokens=False)["input_ids"]
            ids += tokenizer("\n", add_special_tokens=False)["input_ids"]
            places.append(len(ids) - 1)
        with torch.no_grad():
            said = model.eval()(torch.tensor([ids])).logits[0, places].argmax(-1)
        right += int((said.bool() == torch.tensor(row["labels"])).sum())
        total += len(places)
    *_, after = events(folder, "evaluation")
    assert right / total == pytest.approx(after["values"]["eval_accuracy"])


def test_a_new_head_goes_over_the_adapter_of_a_language_model(
    judges: dict[str, Path], tmp_path: Path, tiny_dir: Path
) -> None:
    method = LoRA(r=4, lora_dropout=0.0, lora_alpha=8)
    sft = trained(tmp_path, tiny_dir, "sft", method=LORA) / "artifacts" / "adapter"
    seed_all(0)
    model: Any = start_of(tiny_dir, method, torch.float32, head="score")
    head = head_of_model(model).weight.clone()
    load_adapter(model, sft)
    saved = load_file(sft / "adapter_model.safetensors")
    held = model.state_dict()
    for name, tensor in saved.items():
        assert torch.equal(held[name.replace(".weight", ".default.weight")], tensor), name
    assert torch.equal(head_of_model(model).weight, head) and head_of_model(model).weight.requires_grad
    reward = judges["lora"] / "artifacts" / "adapter"
    with pytest.raises(EftError, match="no place for"):
        load_adapter(start_of(tiny_dir, method, torch.float32), reward)


def test_a_reward_model_is_trained_further_with_its_head(judges: dict[str, Path], tmp_path: Path) -> None:
    first = judges["full"]
    second = trained(tmp_path, first / "artifacts" / "model", "reward", method=LORA)
    *_, end = events(first, "evaluation")
    begin, *_ = events(second, "evaluation")
    for figure, value in end["values"].items():
        assert begin["values"][figure] == pytest.approx(value, rel=1e-5), figure


def test_a_reward_models_files_are_not_packed(judges: dict[str, Path], tmp_path: Path) -> None:
    first = judges["full"]
    rows = write_rows(tmp_path / "rows.jsonl", margins(ROWS))
    folder = write_run(tmp_path / "run", first / "artifacts" / "model", rows, stage="reward", method="qlora")
    assert run(folder) != 0
    (error,) = events(folder, "error")
    assert error["field"] == "method" and "already have the head of a reward model" in error["message"]
    command = [sys.executable, "-m", "core.train.generate", str(first / "artifacts" / "model"), "--prompt", "hi"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 1 and "reward model (LlamaForSequenceClassification)" in asked.stderr


def test_a_solution_that_is_cut_has_no_last_step() -> None:
    ids = np.arange(12, dtype=np.int32)
    marked = np.isin(ids, [2, 4, 7, 9, 11])  # [0 … 4], [5 … 11]
    whole = TokenDataset(
        ids,
        marked,
        np.array([0, 5]),
        np.array([5, 12]),
        np.array([1, 2]),
        token_values={"label": marked * np.float32(1)},
    )
    last = last_labels(whole)
    assert list(last.sequence_labels) == [1, 1] and last.learned[[4, 11]].all()
    cut, report = cut_rows(last, 5, "cut_right")
    assert (list(cut.lines), report.dropped) == ([1], 1)
    assert list(cut_rows(whole, 5, "cut_right")[0].lines) == [1, 2]


@pytest.mark.parametrize("pad, bos, unk, found", [(3, 1, 0, 3), (2, 1, 0, 1), (None, None, 0, 0), (2, 2, None, None)])
def test_what_ends_an_answer_is_no_padding(pad: Any, bos: Any, unk: Any, found: Any) -> None:
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=pad, bos_token_id=bos, unk_token_id=unk)
    assert pad_token_of(tokenizer) == found


@pytest.mark.parametrize("method", [Full(), LoRA(r=4, lora_dropout=0.0, lora_alpha=8)], ids=["full", "lora"])
def test_the_head_is_no_hidden_matrix_to_an_optimizer(tiny_dir: Path, method: Any) -> None:
    for head in ("score", "labels"):
        (decays, spared) = decay_groups(start_of(tiny_dir, method, torch.float32, head=head))
        assert any(".score." in f".{name}" for name in decays.names), "it is trained and decays as other weights"
        assert decays.hidden and not any("score" in name for name in decays.hidden | spared.hidden)


def test_what_cannot_have_a_head_says_why(tiny_dir: Path) -> None:
    model: Any = load_model(tiny_dir, torch.float32)
    model.config.__class__ = type("Unknown", (type(model.config),), {"model_type": "unknown"})
    with pytest.raises(EftError, match="sequence classification, and transformers has no such class"):
        with_head(model, "score", None)
