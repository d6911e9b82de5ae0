"""Tokens of what an environment says between two turns of the model."""

from __future__ import annotations

from collections.abc import Sequence

from core.data.rows import Message, Prompt, PromptOnly
from core.errors import DataError, SpecError
from core.train.render.renderer import Renderer

MODEL, ENVIRONMENT = "assistant", "environment"
"""The speakers of turns."""
ASKED = "a question"
ANSWERS = ("one", "another 2")
"""Answers that end in different tokens: what is the same behind both is what the chat template writes there."""


class Replies:
    """Renders replies as the prompts of the rows are rendered."""

    def __init__(self, renderer: Renderer, role: str) -> None:
        self.renderer, self.role = renderer, role

    def refuse_unrendered(self, rows: Sequence[PromptOnly]) -> None:
        """SpecError where the chat template of these rows has no place for a reply."""
        if any(self._is_chat(row) for row in rows):
            self._behind("a reply")

    def between(self, row: PromptOnly, reply: str, last: int) -> list[int]:
        """Tokens from the end of the model's turn to where it is to write again. `last`: the last token of that turn,
        which may be the one that the template ends turns with."""
        if not self._is_chat(row):
            return self.renderer.render_text(reply)
        ids = self._behind(reply)
        return ids[1:] if ids[0] == last else ids

    def conversation(self, row: PromptOnly, turns: Sequence[tuple[str, str]]) -> Prompt:
        """Turns of the model and of the environment as messages; as one text behind a prompt that is no chat."""
        if not self._is_chat(row):
            return "".join(text for _, text in turns)
        return tuple(Message("assistant" if who == MODEL else self.role, text) for who, text in turns)

    def cut(self, reply: str, most: int) -> str | None:
        """The beginning of a reply that has more tokens than `most`; None where it has no more."""
        ids = self.renderer.render_text(reply)
        if len(ids) <= most:
            return None
        return str(self.renderer.tokenizer.decode(ids[:most], clean_up_tokenization_spaces=False))

    def _is_chat(self, row: PromptOnly) -> bool:
        return not isinstance(row.prompt, str) or self.renderer.pairs == "chat"

    def _behind(self, reply: str) -> list[int]:
        """What the template writes behind an answer, the reply in it, up to where the model is to write."""
        try:
            first, second = (
                self.renderer.render_prompt(
                    PromptOnly((Message("user", ASKED), Message("assistant", answer), Message(self.role, reply))), 0
                ).ids
                for answer in ANSWERS
            )
        except DataError as error:
            raise _refused(f"it refuses a turn of the role `{self.role}` there: {error.message}") from error
        same = 0
        while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
            same += 1
        if same in (0, len(first)):
            raise _refused("what it writes there depends on the answer, or leaves it out")
        return first[-same:]


def _refused(why: str) -> SpecError:
    return SpecError(
        f"the model's chat template has no place for a reply behind an answer: {why}; set `stage.environment.role` to "
        "`user`, use another template in `data.rendering`, or prompts that are plain text",
        field="stage.environment",
        code="environment_not_rendered",
    )
