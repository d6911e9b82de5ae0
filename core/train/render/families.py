"""The registry of template families: one training template each, and what is proven of it.

A family's template (`templates/<name>.jinja`) writes what the models of that family write, token for token, for every
chat that it takes; it raises for what it has no form for. Its `{% generation %}` marks say what is learned. `extends`
says that a chat's tokens begin with the tokens of its beginning: tokens(messages[:k]) is a prefix of tokens(messages).
Where it holds, a chat of n answers is one sequence; where it does not, a model has seen other tokens by the time it
answered than the whole chat shows. tests/render proves every flag, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from core.spec.axes.rendering import Family

_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class TemplateFamily:
    name: Family
    models: str
    """Models that use it, for docs/rendering.md."""
    tokens: tuple[str, ...]
    """Control tokens that a tokenizer must have for it, beside BOS and EOS."""
    extends: bool
    """Chats of at most one system message (the first), then user and assistant in turns."""
    extends_with_tools: bool | None = None
    """The same with tool calls and their results; None: it has no form for tools."""
    reasoning: bool = False
    """It has a form for `reasoning_content`."""
    signs: tuple[str, ...] = ()
    """What the source of a model's template has in it, if it may be of this family; default: `tokens`."""

    @property
    def source(self) -> str:
        return _source(self.name)

    def may_be(self, source: str) -> bool:
        return all(sign in source for sign in self.signs or self.tokens)


@cache
def _source(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")
_COMMAND_R = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)

FAMILIES: dict[str, TemplateFamily] = {
    family.name: family
    for family in (
        TemplateFamily("chatml", "any model with ChatML's tokens", _CHATML, extends=True),
        TemplateFamily("command-r", "Command R, Aya", _COMMAND_R, extends=True),
        TemplateFamily(
            "deepseek",
            "DeepSeek V2.5, V3",
            ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
            extends=True,
        ),
        TemplateFamily("gemma", "Gemma 1 and 2", _GEMMA, extends=True),
        TemplateFamily("gemma3", "Gemma 3", _GEMMA, extends=True),
        TemplateFamily(
            "granite", "Granite 3.0", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), extends=True
        ),
        TemplateFamily("llama2", "Llama 2, Code Llama", (), extends=True, signs=("[INST]", "<<SYS>>")),
        TemplateFamily("llama3", "Llama 3", _LLAMA3, extends=True),
        TemplateFamily("llama3.1", "Llama 3.1, 3.3", _LLAMA3, extends=True, signs=(*_LLAMA3, "Cutting Knowledge")),
        TemplateFamily("mistral", "Mistral 7B v0.3, Mixtral", ("[INST]", "[/INST]"), extends=False),
        TemplateFamily("phi3", "Phi 3, 3.5", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), extends=False),
        TemplateFamily("phi4", "Phi 4", (*_CHATML, "<|im_sep|>"), extends=True),
        TemplateFamily("qwen2.5", "Qwen2.5", _CHATML, extends=True, extends_with_tools=False),
        TemplateFamily("qwen3", "Qwen3", _CHATML, extends=False, extends_with_tools=False, reasoning=True),
        TemplateFamily("smollm2", "SmolLM2", _CHATML, extends=True),
        TemplateFamily("zephyr", "Zephyr, TinyLlama", (), extends=True, signs=("<|", "|>", "eos_token")),
    )
}
assert set(FAMILIES) == set(get_args(Family)), "core/spec/axes/rendering.py names the families too"
