"""Small random models of the families people tune, each with a tuning that says something, as formats see them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from core.spec.axes.method import Full, LoRA
from core.train.export.formats.subject import Subject
from core.train.quant.model import load_quantized
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.family_tokenizers import family_tokenizer
from tests.support.tools import CACHE

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 16,
            "vocab_size": 436,
        },
    ),
    "mistral": ("MistralConfig", {}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""Configuration of a family, and what is special about it. Of Gemma's numbers llama.cpp knows some by heart: the order
of its layers, the scale of its attention, and as many rows as its tokenizer's file has tokens."""
METHODS = ("lora", "dora", "qlora", "full")
TARGETS = {"phi3": ["qkv_proj", "o_proj", "down_proj"]}
OTHER_TARGETS = ["q_proj", "o_proj", "down_proj"]


def tuned(family: str, method: str, folder: Path, *, spread: float = 0.3) -> Subject:
    """A random model of the family, tuned by the method. `spread`: standard deviation of its weights; the larger, the
    more quantised weights lose."""
    name, special = MODELS[family]
    tokenizer = copy.deepcopy(family_tokenizer("chatml"))
    torch.manual_seed(1)
    about = SMALL | {"initializer_range": spread, "vocab_size": 448} | special
    config = getattr(transformers, name)(**about, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    base, artifacts = folder / "base", folder / "artifacts"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    tokenizer = load_tokenizer(base)  # some families add tokens of their own
    artifacts.mkdir()
    if method == "full":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(artifacts / "model")
        tokenizer.save_pretrained(artifacts / "model")
    else:
        if method == "qlora":
            model = load_quantized(base, torch.float32)[0]
        chosen = LoraConfig(
            init_lora_weights=False,
            r=4,
            use_dora=method == "dora",
            target_modules=TARGETS.get(family, OTHER_TARGETS),
        )
        model = get_peft_model(model, chosen)
        for parameter in (one for name, one in model.named_parameters() if "magnitude" in name):
            parameter.data.mul_(1 + 0.1 * torch.randn_like(parameter))  # its start would say nothing
        model.save_pretrained(artifacts / "adapter")
    ids = [torch.tensor(tokenizer(text).input_ids) for text in ("Name a colour, please: red.", "What is one and one?")]
    return Subject(
        model.eval(),
        Full() if method == "full" else LoRA(),
        tokenizer,
        model_dir=base,
        artifacts=artifacts,
        trained_dir=artifacts / ("model" if method == "full" else "adapter"),
        cache_dir=CACHE,
        rows=ids,
        rows_of="training",
        calibration=ids,
        name="phi3 tuned",  # llama.cpp takes such a name for a Phi 3 with its vocabulary
        between=lambda: None,
    )
