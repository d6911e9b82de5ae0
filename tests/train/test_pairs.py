"""What a job reports of pairs is what its users meet: `eval_exact_match` is the share of held-out rows for which the
tuned model, asked by plain transformers with the prompt alone, writes exactly the completion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from core.spec.axes.pairs import Way, asked, bordered
from tests.support.tiny_model import CHAT
from tests.support.trainer import ROOT, events, run, write_rows, write_run


def intents(name: str) -> list[dict[str, str]]:
    """Real rows: what people say to their machine, and what they mean."""
    found = []
    for line in (ROOT / "examples" / "voice-intents" / name).read_text().splitlines():
        words = {one["role"]: one["content"] for one in json.loads(line)["messages"]}
        found.append({"prompt": words["user"], "completion": words["assistant"]})
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, with byte pairs learned from such rows: words merge, as they do in real models."""
    folder = tmp_path_factory.mktemp("small")
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [f"{row['prompt']} {row['completion']}" for row in intents("train.jsonl")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    wrapped.chat_template = CHAT
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def question(tokenizer: Any, way: Way, prompt: str) -> list[int]:
    if way == "chat":
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(asked(way, prompt))["input_ids"])


@torch.no_grad()
def written(folder: Path, way: Way, rows: list[dict[str, str]]) -> float:
    """With plain transformers, one row at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for row in rows:
        ids = torch.tensor([question(tokenizer, way, row["prompt"])])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        answer = tokenizer.decode(out[0, ids.shape[1] :])
        right += answer == bordered(way, row["prompt"], row["completion"])[1] + tokenizer.eos_token
    return right / len(rows)


def inside_a_word(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same texts with the border three characters later, where tokens merge unless the two are tokenised apart."""
    return [{"prompt": f"{row['prompt']} {row['completion'][:3]}", "completion": row["completion"][3:]} for row in rows]


@pytest.mark.parametrize("way", ["newline", "chat"])
def test_exact_match_is_what_the_model_writes(small: Path, tmp_path: Path, way: Way) -> None:
    """By default: `newline` is that of a model without a chat template. With `joined` the two figures differ."""
    model, train_rows, held_out = small, intents("train.jsonl"), intents("heldout.jsonl")
    if way == "newline":
        model = Path(shutil.copytree(small, tmp_path / "base"))
        (model / "chat_template.jinja").unlink()
        train_rows, held_out = inside_a_word(train_rows), inside_a_word(held_out)
    train = write_rows(tmp_path / "train.jsonl", train_rows)
    held = write_rows(tmp_path / "held.jsonl", held_out)
    run_dir = write_run(
        tmp_path / "run",
        model,
        train,
        data={"train": str(train), "eval": str(held)},
        method="full",
        optimizer={"learning_rate": 3e-3},
        training={"num_train_epochs": 20, "max_length": 96, "precision": "fp32"},
        evaluation={"type": "held_out", "at_start": False, "per_device_eval_batch_size": 30},
    )
    assert run(run_dir) == 0, events(run_dir)[-1]
    (record,) = (event["record"] for event in events(run_dir, "run_record"))
    about = record["data"]["rendering"]
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "artifacts" / "model")
    assert about["pairs"] == way
    assert about["example"]["sent"] == tokenizer.decode(question(tokenizer, way, about["example"]["prompt"]))
    card = (run_dir / "artifacts" / "model" / "README.md").read_text()
    assert about["ask"] in card and json.dumps(about["example"]["sent"]) in card
    reported = events(run_dir)[-1]["result"]["eval_after"]["eval_exact_match"]
    assert 0.2 < reported < 1, "the figure says nothing where the answers are trivial"
    assert written(run_dir / "artifacts" / "model", way, held_out) == reported
