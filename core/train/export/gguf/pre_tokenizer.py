"""The name that llama.cpp has for the way in which a tokenizer splits text before BPE.

llama.cpp's converter knows the tokenizers of published models. Others are named here by what their `tokenizer.json`
says; a wrong name would be found by the reader, which compares tokens (core/train/export/gguf/proof.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""Names by the regular expression of a `Split`."""


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
