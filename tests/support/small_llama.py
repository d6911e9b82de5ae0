"""A Llama of random weights with 97 tokens and two layers, and adapters over its packed form, for tests of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from core.train.quant.model import load_quantized

IDS = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(3))


def save(folder: Path, dtype: torch.dtype = torch.float32, *, shards: str = "5GB", **changes: Any) -> Path:
    """Write it into `folder`; `changes` are fields of LlamaConfig."""
    torch.manual_seed(0)
    config = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**config | changes)).to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def adapted(folder: Path, dtype: torch.dtype = torch.float32, *, dense: bool = False, **lora: Any) -> Any:
    """PEFT's model over NF4 or the dense weights, not fused, whose adapters do something: LoRA r 4 on all linear
    layers, or `lora`."""
    base: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype) if dense else load_quantized(folder, dtype)[0]
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora})
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.05)
    return model
