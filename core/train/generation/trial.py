"""Can this model be generated from in slots? It is tried, not looked up: token by token, and all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from core.train.generation.generator import LastLogits
from core.train.generation.slots import NoSlotForm, SlotCache, attention_over
from core.train.loss.head import OutputHead

PROMPTS = (5, 3)
TOKENS = 3
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 4e-2
"""Largest difference that rounding may make, of the largest logit: in float32, and in 16 bits."""


@dataclass(frozen=True, slots=True)
class SlotTrial:
    """What came of it."""

    refused: str | None
    """Why the model has no form for slots; None: it has one."""
    window: int | None = None
    """Tokens of prompt and answer up to which it has; None: any number."""

    def why_not(self, room: int) -> str | None:
        """Why answers that take so many tokens with their prompts are not generated in slots."""
        if self.refused is None and self.window is not None and room > self.window:
            return f"a layer looks back {self.window} tokens, and prompt and answer may have {room}"
        return self.refused


def try_slots(model: nn.Module, head: OutputHead | str, computed: torch.dtype, device: torch.device) -> SlotTrial:
    """Go on with two prompts of different lengths token by token in slots, and compare the logits with those of whole
    passes. `computed`: dtype of the model's products. The model computes without gradients."""
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    rows = [[(at * 7919 + 31 * row + 11) % vocabulary for at in range(n + TOKENS)] for row, n in enumerate(PROMPTS)]
    last = LastLogits(model, head, len(rows))
    try:
        found, windows = _in_slots(model, last, rows, device)
        gaps, largest = [], 1e-30
        for row, ids in enumerate(rows):
            places = torch.arange(PROMPTS[row] - 1, len(ids), device=device)
            line = torch.tensor([ids], device=device)
            whole = last.at(places, line, torch.arange(len(ids), device=device).unsqueeze(0))
            gaps.append(float((whole - torch.stack(found[row])).abs().max()))
            largest = max(largest, float(whole.abs().max()))
    except NoSlotForm as reason:
        return SlotTrial(str(reason))
    except (TypeError, NotImplementedError, RuntimeError, ValueError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return SlotTrial(f"its forward pass refuses slots ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    gap = max(gaps) / largest
    if gap > TOLERANCE.get(computed, COARSE):
        return SlotTrial(f"its logits in slots differ by {gap:.1%} of the largest")
    return SlotTrial(None, min(windows, default=None))


def _in_slots(
    model: nn.Module, last: LastLogits, rows: list[list[int]], device: torch.device
) -> tuple[list[list[Tensor]], set[int]]:
    """Logits behind each prompt and behind each further token, and the windows of layers."""
    cache = SlotCache(len(rows), max(map(len, rows)))
    found: list[list[Tensor]] = [[] for _ in rows]
    width = max(PROMPTS)
    with attention_over(cache, model):
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        for row, tokens in enumerate(PROMPTS):
            ids[row, :tokens] = torch.tensor(rows[row][:tokens])
        cache.before_prompts(range(len(rows)), range(len(rows)), device)
        places = torch.tensor([row * width + tokens - 1 for row, tokens in enumerate(PROMPTS)], device=device)
        logits = last.at(places, ids.to(device), torch.arange(width, device=device).expand(len(rows), width))
        if not cache.layers:
            raise NoSlotForm("none of its layers asks for attention by its name")
        for step in range(TOKENS + 1):
            for row in range(len(rows)):
                found[row].append(logits[row])
            if step < TOKENS:
                lengths = [tokens + step for tokens in PROMPTS]
                cache.before_tokens(lengths, device)
                following = torch.tensor([[rows[row][n]] for row, n in enumerate(lengths)], device=device)
                positions = torch.tensor(lengths, device=device).unsqueeze(1)
                logits = last.at(torch.arange(len(rows), device=device), following, positions)
    return found, cache.windows
