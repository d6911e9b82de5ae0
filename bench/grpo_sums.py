"""Sums of two numbers, as `bench.grpo --only reward` asks them: questions, rewards, and the model to start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.grpo_learns import sums

LIMIT = 30
"""Steps at most."""
WINDOW = 4
"""Steps that have the named reward together: the reward of one is that of 64 answers, a matter of luck."""
FIRST = 40
"""Sums that the model is fine-tuned on before; none of them is asked later."""
FINE_TUNING_RATE = 3e-5
BATCH = 8


@dataclass(frozen=True)
class Sums:
    """As many questions, and the reward that ends a run."""

    count: int
    rate: float = 2e-4
    named: float = 0.6

    def pairs(self) -> list[tuple[str, str]]:
        return sums(FIRST + self.count)[FIRST:]

    @property
    def questions(self) -> list[str]:
        return [question for question, _ in self.pairs()]

    def rewards(self, texts: Sequence[str], rows: Sequence[int]) -> list[float]:
        """1 for an answer that is the sum of its row, else 0."""
        pairs = self.pairs()
        return [float(text.strip() == pairs[row][1].strip()) for text, row in zip(texts, rows, strict=True)]

    def reached(self, rewards: Sequence[float]) -> bool:
        """Whether the last steps together have the named reward."""
        return len(rewards) >= WINDOW and sum(rewards[-WINDOW:]) / WINDOW >= self.named


def tune(model_dir: Path, folder: Path, seed: int) -> None:
    """Write into the folder the model after one pass over the first sums, all weights trained by plain PyTorch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINE_TUNING_RATE, weight_decay=0.0)
    rows = sums(FIRST)
    for at in range(0, FIRST, BATCH):
        optimizer.zero_grad()
        for question, answer in rows[at : at + BATCH]:
            asked = tokenizer(question)["input_ids"]
            ids = [*asked, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            labels = [-100] * len(asked) + ids[len(asked) :]
            (model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss / BATCH).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
