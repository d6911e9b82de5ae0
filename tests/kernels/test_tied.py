"""Adapters on the embeddings and on the output head, tied or not, over packed layers: trained and merged apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from core.train.export.compare import compare
from core.train.export.merge import write_merged
from core.train.loss.head import OutputHead, head_of
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized
from tests.support import small_llama
from tests.support.small_llama import IDS


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_what_is_merged_into_one_is_not_merged_into_the_other(tmp_path: Path, target: str, tied: bool) -> None:
    small_llama.save(tmp_path / "base", tie_word_embeddings=tied, num_hidden_layers=1)
    model = small_llama.adapted(tmp_path / "base", target_modules=["q_proj", target])
    assert fuse_adapters(model).fused == 1
    found = head_of(model)
    assert found == "the output head has an adapter" if target == "lm_head" else isinstance(found, OutputHead)

    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all(grad is not None and grad.abs().sum() > 0 for grad in trained.values())

    with torch.no_grad():
        wanted = model.eval()(IDS).logits
        with model.disable_adapter():
            without = model(IDS).logits
    write_merged(model, tmp_path / "merged", model_dir=tmp_path / "base", dtype=torch.float32)
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits
        assert torch.equal(model(IDS).logits, wanted)  # the model itself is as before
    check = compare(wanted.flatten(0, 1), without.flatten(0, 1), merged.flatten(0, 1), 2, torch.float32)
    assert check.fault() is None and check.adapter_kept == pytest.approx(1, abs=1e-3)

    model.save_pretrained(tmp_path / "adapter")
    again: Any = PeftModel.from_pretrained(load_quantized(tmp_path / "base", torch.float32)[0], tmp_path / "adapter")
    fuse_adapters(again)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(IDS).logits, wanted)
