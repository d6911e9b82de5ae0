"""A model's tokenizer from its folder, in processes without torch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from core.errors import ModelError
from core.train.base.reading import reading


def load_tokenizer(folder: Path) -> Any:
    """ModelError when transformers cannot read it."""
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}", field="model")
    with reading("the model's tokenizer"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def pad_token(tokenizer: Any) -> int:
    """The token that rows are padded with; what it is makes no difference, since no token sees it."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
