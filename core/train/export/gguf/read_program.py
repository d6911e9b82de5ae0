"""A program over the `gguf` tools: what llama.cpp's engine says of a GGUF file.

    read_program.py QUESTIONS ANSWERS LOGITS

QUESTIONS and ANSWERS are JSON files (core/train/export/gguf/proof.py writes and reads them), LOGITS a NumPy file of the
logits of all rows, one row below the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ggufdoctor.engines.llamacpp_engine import LlamaCppEngine

from core.train.export.gguf.llama import Llama


def main() -> None:
    questions, answers, logits = map(Path, sys.argv[1:])
    asked = json.loads(questions.read_text(encoding="utf-8"))
    rows: list[list[int]] = asked["rows"]
    model = Llama(asked["file"], context=max(map(len, rows)), threads=asked["threads"])
    found: dict[str, Any] = {
        "tokens": model.tokens,
        "special": model.special(),
        "ends": [token for token in asked["ends"] if model.ends(token)],
        "texts": [model.tokenize(text, special=False) for text in asked["texts"]],
        "chats": _chats(model, asked["chats"]),
    }
    out = np.lib.format.open_memmap(logits, "w+", np.float32, (sum(map(len, rows)), model.tokens))
    place = 0
    for row in rows:
        out[place : place + len(row)] = model.logits(row)
        place += len(row)
    out.flush()
    answers.write_text(json.dumps(found), encoding="utf-8")


def _chats(model: Llama, chats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each chat as the engine renders it with the file's own template: its text and its tokens, or why it refuses."""
    template = model.template()
    if template is None:
        return [{"refused": "the file has no chat template"} for _ in chats]
    engine = LlamaCppEngine()
    found: list[dict[str, Any]] = []
    for chat in chats:
        rendered = engine.render(template, chat)
        if rendered.text is None:
            found.append({"refused": rendered.error})
        else:
            found.append({"text": rendered.text, "tokens": _as_served(model, rendered.text, chat.get("bos_token"))})
    return found


def _as_served(model: Llama, text: str, bos: str | None) -> list[int]:
    """Tokens of a rendered chat as llama.cpp's server makes them: a BOS of the template's gives way to its own."""
    if bos and model.special()["add_bos"]:
        text = text.removeprefix(bos)
    return model.tokenize(text, special=True)


if __name__ == "__main__":
    main()
