"""`export: vllm`: the adapter, checked against the rules by which vLLM loads one, read again over the base's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
from safetensors import safe_open

from core.spec.axes.export import VLLM_RANKS, VLLMAdapter, required_retention
from core.train.export.compare import logits_of
from core.train.export.formats.subject import Subject, Withheld, placed
from core.train.export.retention import measure
from core.train.model.load import load_model, saved_dtype

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
UNKNOWN = ("rank_pattern", "alpha_pattern", "modules_to_save", "use_dora", "layer_replication")
"""Entries of a configuration that change what an adapter computes, and that vLLM refuses or does not read."""
OTHERWISE = "take `merged` instead, which vLLM serves as a model"


def write_vllm(item: VLLMAdapter, subject: Subject, folder: Path) -> dict[str, Any]:
    """Copy the adapter and its tokenizer into `folder`; what is known of it. Withheld where vLLM would refuse it, or
    compute something else than was trained."""
    about = json.loads((subject.trained_dir / CONFIG).read_text(encoding="utf-8"))
    with safe_open(subject.trained_dir / WEIGHTS, framework="pt") as weights:
        names = list(weights.keys())
    if fault := refusal(about, names):
        raise Withheld(f"vLLM does not load it: {fault}; {OTHERWISE}")
    tuned, base = subject.logits("trained")
    folder.mkdir(parents=True)
    for path in subject.trained_dir.iterdir():
        if path.is_file() and path.name != "README.md":
            shutil.copyfile(path, folder / path.name)
    over: Any = load_model(subject.model_dir, saved_dtype(subject.model_dir))
    again = placed(peft.PeftModel.from_pretrained(over, str(folder)), subject.device)
    found = measure(
        tuned,
        base,
        logits_of(again, subject.rows, subject.between),
        rows=len(subject.rows),
        rows_of=subject.rows_of,
        required=required_retention(item),
        reader=f"peft {peft.__version__}",
    )
    if fault := found.fault():
        words = f"over the base model's own files, as vLLM serves it, {fault}; {OTHERWISE}, or set `min_retention`"
        raise Withheld(words, retention=found, kept_apart=True)
    return {"max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= about["r"]), "retention": found.as_dict()}


def refusal(about: dict[str, Any], names: list[str]) -> str | None:
    """Why vLLM does not load an adapter with this configuration and tensors of these names; None: it does."""
    if about.get("peft_type") != "LORA":
        return f"it is of type {about.get('peft_type')}, and vLLM loads LoRA"
    for name in UNKNOWN:
        if about.get(name):
            return f"`{name}` is {json.dumps(about[name])[:80]}, which vLLM does not compute"
    if about.get("bias") not in (None, "none"):
        return f"it trains biases (`bias: {about['bias']}`)"
    if about["r"] > VLLM_RANKS[-1]:
        return f"its rank is {about['r']}, and `--max-lora-rank` is at most {VLLM_RANKS[-1]}"
    odd = [name for name in names if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    odd += [name for name in names if ".lm_head." in name or ".embed_tokens." in name]
    return f"it has {odd[0]}, and vLLM takes pairs of lora_A and lora_B within the blocks alone" if odd else None
