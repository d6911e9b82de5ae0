"""Architectures whose blocks differ from Llama's, streamed from host memory and from disk: gradients and logits of the
resident model, to the bit. (GPT-2, Gemma 2, Mixtral: test_stream_blocks.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import ModelError
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions
from tests.support.blocks import IDS, backwards, from_disk, from_host, resident, same

NF4 = QuantOptions("nf4")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8, "bos_token_id": 0}
MADE: dict[str, dict[str, Any]] = {
    "qwen2": SIZES,  # biases
    "qwen3": SIZES | {"head_dim": 16},  # norms within attention
    "gemma3_text": SIZES | {"head_dim": 16, "sliding_window": 4,
                            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi": SIZES | {"num_key_value_heads": 4},  # attention beside the feed-forward
    "gptj": GPTJ,  # rotary constants in each block
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 32},
    "gpt_neox": SIZES,
}  # fmt: skip
FUSED, RENAMED = ("qwen2_moe",), ("gpt_neox",)
"""Whose files have other names than the model: experts in one tensor, another name of the head."""


def make(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=97, **MADE[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", MADE)
def test_streams_to_the_bit(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "model", name)
    target = "attention" if name in FUSED else "all-linear"
    options = None if name in (*FUSED, *RENAMED, "gptj") else NF4
    plain = resident(folder, options, target_modules=target)
    wanted, seen = backwards(plain), logits(plain)
    assert len(wanted[1]) >= 3 * 2 * 4
    streams = [from_host(folder, options, 2, target_modules=target)]
    if name in (*FUSED, *RENAMED):
        with pytest.raises(ModelError, match=r"is in the files but not in the model .*without `memory\.stream: disk`"):
            from_disk(folder, tmp_path / "cache", options, 1, target_modules=target)
    else:
        streams.append(from_disk(folder, tmp_path / "cache", options, 1, target_modules=target))
    for model, stream in streams:
        assert same(backwards(model), wanted)
        assert torch.equal(logits(model), seen)
        assert same(backwards(model.train()), wanted)  # with slots as an evaluation has left them
        stream.close()


def test_constants_that_are_in_no_file_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """GPT-J's rotary positions, made by bfloat16's arithmetic, would be off by whole positions in long rows."""
    folder = make(tmp_path, "gptj")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours, _ = load_quantized(folder, torch.bfloat16, NF4)
    constants = dict(theirs.named_buffers())
    assert len(constants) == 3
    for name, buffer in ours.named_buffers():
        if name in constants:
            assert torch.equal(buffer, constants.pop(name)), name
    assert not constants
