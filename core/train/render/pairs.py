"""Pairs of strings: which way a renderer takes, and rows that are a chat already.

A model that is asked gets the prompt's tokens, whatever the completion would be. So prompt and completion are tokenised
apart: a tokenizer that sees them as one string may make one token of the prompt's last letters and the completion's
first ones, and the prompt that training shows is then another than the one that is asked. `joined` does so all the
same; it is what TRL does, and what the tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.data.rows import Message
from core.errors import DataError, SpecError
from core.spec.axes.pairs import Way, way_of
from core.spec.axes.rendering import Rendering
from core.train.render.controls import Controls
from core.train.render.jinja.template import Asked
from core.train.render.setup import Setup

QUESTION = "How many?"
"""User message of the trial that finds out how a template ends a prompt."""


def chosen_way(rendering: Rendering, setup: Setup) -> Way:
    """SpecError where a chat is asked for and the model has no template for one."""
    if rendering.pairs == "chat" and setup.template is None:
        raise SpecError(
            "`chat` needs a chat template, and the model's tokenizer has none; name a family as data.rendering, or "
            "leave `pairs` out",
            field="data.rendering.pairs",
        )
    return way_of(rendering.pairs, has_template=setup.template is not None)


class ChatsInStrings:
    """Finds pairs whose strings have a chat template's text in them already, and which a template would wrap again."""

    def __init__(self, setup: Setup) -> None:
        self._controls: Controls = setup.encoder.controls
        self._ending = _ending(setup)

    def refuse(self, prompt: str, completion: str, line: int) -> None:
        """DataError for such a pair."""
        pattern, words = self._controls.pattern, prompt.rstrip()
        found = pattern.match(prompt.lstrip())
        what = f"the prompt begins with the control token {found[0]}" if found else None
        if what is None and self._ending and words.endswith(self._ending):
            what = f"the prompt ends as the chat template ends one ({self._ending!r})"
        if what is None and (written := list(pattern.finditer(completion, max(0, len(completion) - 256)))):
            last = written[-1]
            if not completion[last.end() :].strip():
                what = f"the completion ends with the control token {last[0]}"
        if what is not None:
            raise DataError(
                f"{what}, so the row looks like a chat that was rendered before, and the model's chat template would "
                "be put around it once more; set data.rendering.pairs to `apart` to take the strings as they are, or "
                "to `chat` to take them as text",
                field=f"line {line}",
            )


def _ending(setup: Setup) -> str:
    """What the template writes between a question and its answer."""
    if setup.template is None:
        return ""
    turns: Sequence[dict[str, Any]] = [Message("user", QUESTION).as_dict()]
    try:
        text = setup.template.text(Asked(list(turns), (), 0), list(turns), prompt=True)
    except DataError:
        return ""
    return text.rpartition(QUESTION)[2].strip()
