"""Names by which llama.cpp knows how a tokenizer splits text.

llama.cpp's converter knows the tokenizers of published models. Others are named here by what their `tokenizer.json`
says; a wrong name would be found by the reader, which compares tokens (core/train/export/gguf/proof.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""Names by the regular expression of a `Split`."""
_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
_PHI3_TOKENS = {"<unk>", "<s>", "</s>", "<|endoftext|>"}
"""Tokens that llama.cpp looks for in the vocabulary of a model with `phi-3` or `phi3` in its name. It drops the spaces
behind special tokens of such a model, and refuses the file where one of these is missing (src/llama-vocab.cpp)."""


def model_name_of(folder: Path, name: str) -> str:
    """The model's name for its GGUF file: `name`, changed where llama.cpp would otherwise split text in another way
    than the tokenizer in `folder` does."""
    path = folder / "tokenizer.json"
    about = json.loads(path.read_bytes()) if path.is_file() else {}
    added = [one for one in about.get("added_tokens") or () if one.get("special")]
    drops_spaces = any(one.get("rstrip") for one in added) and {one.get("content") for one in added} >= _PHI3_TOKENS
    if drops_spaces == bool(_PHI3.search(name)):
        return name
    return f"{name} (Phi-3)" if drops_spaces else _PHI3.sub("phi 3", name)


def pre_tokenizer_of(folder: Path) -> str | None:
    """Name the way of the tokenizer in `folder`; None where llama.cpp has no name for it, or needs none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    about = json.loads((folder / "tokenizer.json").read_bytes()).get("pre_tokenizer")
    match _parts(about):
        case [{"type": "ByteLevel"} as last] if last.get("use_regex", True):
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"} as last]:
            return "smollm" if last.get("use_regex", True) else None
        case [{"type": "Split", "pattern": {"Regex": expression}}, {"type": "ByteLevel"} as last]:
            return None if last.get("use_regex", True) else _SPLITS.get(expression)
        case _:
            return None


def _parts(about: Any) -> list[dict[str, Any]]:
    match about:
        case {"type": "Sequence", "pretokenizers": list() as parts}:
            return parts
        case dict():
            return [about]
        case _:
            return []
