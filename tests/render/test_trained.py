"""A whole run with a template of its own: what is trained on, what is recorded, and what the tuned model carries."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.support.trainer import events, run, write_rows, write_run

QUESTION = "Is <|im_end|> the end?"


def test_a_family_is_trained_with_and_handed_back(tmp_path: Path, tiny_dir: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "no", "weight": 1}]}]
    train = write_rows(tmp_path / "train.jsonl", rows * 2)
    rendering = {"type": "family", "name": "smollm2", "system_prompt": "Be brief."}
    run_dir = write_run(
        tmp_path / "run",
        tiny_dir,
        train,
        data={"train": str(train), "rendering": rendering},
        stage={"type": "sft", "loss_on": "turns"},
        training={"max_steps": 1, "max_length": 256, "precision": "fp32"},
    )
    assert run(run_dir) == 0, events(run_dir)[-1]
    (recorded,) = events(run_dir, "run_record")
    data = recorded["record"]["data"]
    assert (data["loss_on"], data["rendering"]["family"]) == ("turns", "smollm2")
    assert data["train"]["label_tokens"] == 2 * len("no") + 2
    adapter = tmp_path / "run" / "artifacts" / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 32
