"""The name of a model in its GGUF file, by which llama.cpp decides how special tokens are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.train.export.gguf.tokenizer_names import model_name_of

PHI3 = [
    {"content": "<unk>", "special": True, "rstrip": False},
    {"content": "<s>", "special": True, "rstrip": False},
    {"content": "</s>", "special": True, "rstrip": True},
    {"content": "<|endoftext|>", "special": True, "rstrip": False},
    {"content": "<|user|>", "special": True, "rstrip": True},
]
"""As in the tokenizer.json of Phi-3-mini-4k-instruct."""
OTHER = [{"content": "<|im_start|>", "special": True, "rstrip": False}]


@pytest.mark.parametrize(
    ("tokens", "name", "found"),
    [
        (PHI3, "support bot", "support bot (Phi-3)"),
        (PHI3, "Phi-3.5 support", "Phi-3.5 support"),
        (OTHER, "phi3 support", "phi 3 support"),
        (OTHER, "Phi-3-mini like", "phi 3-mini like"),
        (OTHER, "support bot", "support bot"),
        (PHI3[2:], "support bot", "support bot"),
        (None, "phi3", "phi 3"),
    ],
)
def test_the_name_says_what_the_tokenizer_does(
    tmp_path: Path, tokens: list[dict[str, object]] | None, name: str, found: str
) -> None:
    if tokens is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert model_name_of(tmp_path, name) == found
