"""Mixture-of-experts models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": 1, "max_position_embeddings": 512}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "intermediate_size": 48, "head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "intermediate_size": 48,
                  "shared_expert_intermediate_size": 48},
    "olmoe": {"num_experts": 4, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 48, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "intermediate_size": 48},
}  # fmt: skip


def mixture(name: str = "mixtral") -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | MODELS[name]))
    for part, value in model.named_parameters():
        if "gate" in part or "router" in part:  # choices that are far from even
            value.data.mul_(20)
    return model.train()


def saved(folder: Path, tiny_dir: Path) -> Path:
    """A folder with a mixture and the tokenizer of the tiny model."""
    if not folder.exists():
        mixture().save_pretrained(folder)  # type: ignore[operator]
        AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(folder)
    return folder
