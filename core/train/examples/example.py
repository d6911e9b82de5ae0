"""An example: what training makes of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from core.data.rows import (
    Chat,
    Instruction,
    Labelled,
    Numbered,
    Preference,
    PromptCompletion,
    PromptOnly,
    Stepwise,
    Text,
)
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered


@dataclass(frozen=True, slots=True)
class Example:
    """Token sequences that stay together in one batch, with numbers of their own. All examples of a file have as many
    sequences, and values of the same names."""

    sequences: tuple[Rendered, ...]
    """One (a chat, a judged answer), or the chosen and the rejected answer, each with its prompt."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the example, such as a label or a margin: `Batch.values`."""
    token_values: Mapping[str, tuple[Sequence[float], ...]] = field(default_factory=dict)
    """Numbers of each sequence's tokens, aligned with its ids; those of learned tokens are `Batch.token_values`."""


def examples_of(rows: Sequence[Numbered], renderer: Renderer) -> list[Example]:
    """Make tokens of rows of one format; one call into the tokenizer where a row is one answer. DataError for the first
    row that cannot be rendered."""
    if any(isinstance(numbered.row, Preference | Labelled | Stepwise | PromptOnly) for numbered in rows):
        return [example_of(numbered, renderer) for numbered in rows]
    rendered = renderer.render_many([(numbered.row, numbered.line) for numbered in rows])
    return [Example((one,)) for one in rendered]


def example_of(numbered: Numbered, renderer: Renderer) -> Example:
    """Make tokens of one row. DataError when it cannot be rendered."""
    line = numbered.line
    match numbered.row:
        case Preference() as row:
            return Example(renderer.render_pair(row, line), {"margin": row.margin or 0.0})
        case Labelled() as row:
            return Example((renderer.render_labelled(row, line),), {"label": float(row.label)})
        case Stepwise() as row:
            rendered = renderer.render_steps(row, line)
            judged, labels = iter(row.labels), []
            for learned in rendered.learned:
                labels.append(float(next(judged)) if learned else 0.0)
            return Example((rendered,), {}, {"label": (labels,)})
        case PromptOnly() as row:
            return Example((renderer.render_prompt(row, line),))
        case Chat() | PromptCompletion() | Instruction() | Text() as row:
            return Example((renderer.render(row, line),))
        case _ as never:
            assert_never(never)
