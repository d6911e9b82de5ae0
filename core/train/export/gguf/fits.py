"""What llama.cpp cannot hold, found before work begins. Reads configuration and tokenizer, no weights."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.train.tools.install import Tools

OTHERWISE = "take `merged` instead, or remove `gguf` from `export`"


def refuse_gguf(model_dir: Path, tools: Tools) -> None:
    """ModelError where llama.cpp's converter or engine does not take the model in `model_dir`."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    classes = config.get("architectures") or []
    if not set(classes) & architectures(tools):
        raise _refused(
            f"llama.cpp's converter does not know {' or '.join(classes) or 'a model without `architectures`'}"
        )
    text = config.get("text_config") or config
    if (size := _head_size(text)) is not None and size % 2:
        raise _refused(
            f"its attention heads have {size} numbers, and rotary embeddings in llama.cpp turn pairs of them"
        )
    path = model_dir / "tokenizer.json"
    if path.is_file() and not (model_dir / "tokenizer.model").is_file():
        model = json.loads(path.read_bytes()).get("model") or {}
        if model.get("type") == "BPE" and not model.get("merges"):
            raise _refused("its BPE tokenizer has no merges, and llama.cpp reads none without")


def architectures(tools: Tools) -> set[str]:
    """Classes of text models that the converter knows. Its table is read as text: importing it imports torch."""
    source = (tools.folder / "conversion" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id="TEXT_MODEL_MAP"), value=ast.expr() as table):
                return set(ast.literal_eval(table))
    raise ImportError("the pinned converter keeps its table of models elsewhere")


def _head_size(config: dict[str, Any]) -> int | None:
    if isinstance(size := config.get("head_dim"), int):
        return size
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _refused(why: str) -> ModelError:
    return ModelError(f"this model cannot be exported as GGUF: {why}; {OTHERWISE}", field="export", code="gguf_refused")
