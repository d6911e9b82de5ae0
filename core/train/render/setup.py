"""What a renderer is made of: the template to use, the control tokens, the family that writes the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, assert_never

from jinja2 import TemplateError

from core.data.rows import Message
from core.errors import DataError, SpecError
from core.spec.axes.rendering import FamilyTemplate, GivenTemplate, ModelTemplate, Rendering
from core.train.render.complete import Completeness
from core.train.render.controls import Controls
from core.train.render.encode import Encoder
from core.train.render.families import FAMILIES, TemplateFamily
from core.train.render.jinja.template import Asked, ChatTemplate, Endless, without_marks
from core.train.render.options import RenderOptions
from core.train.render.turns import TurnFinder

VERSION = 3
"""Version of the rendering. Raise it with every change that gives other tokens or another mask."""

_SYSTEM, _ONE, _TWO, _THREE, _FOUR = (
    Message("system", "Be brief."),
    Message("user", "What is\n 1 + 1? "),
    Message("assistant", "It is 2."),
    Message("user", "And 2 + 2?"),
    Message("assistant", " 4\n"),
)
_TRIALS: tuple[tuple[Message, ...], ...] = (
    (_ONE, _TWO),
    (_ONE, _TWO, _THREE, _FOUR),
    (_SYSTEM, _ONE, _TWO),
    (_SYSTEM, _ONE, _TWO, _THREE, _FOUR),
)
"""Chats that tell whether a model's template is of a family. Which is looked at again with every chat (turns.py)."""


@dataclass(frozen=True, slots=True)
class Setup:
    template: ChatTemplate | None
    finder: TurnFinder | None
    encoder: Encoder
    family: str | None
    extends: bool | None
    own: bool
    """The template is the one that the tokenizer has."""
    knows_developer: bool
    """The template has the role `developer`; else it is a system message."""
    complete: Completeness | None
    """The check that what a chat says is in its text; None: there is no template."""

    def complete_for(self, line: int) -> Completeness:
        if self.complete is None:
            raise _no_template(line)
        return self.complete

    def template_for(self, line: int) -> ChatTemplate:
        """DataError when there is none."""
        if self.template is None:
            raise _no_template(line)
        return self.template

    def finder_for(self, line: int) -> TurnFinder:
        if self.finder is None:
            raise _no_template(line)
        return self.finder

    def saved_template(self) -> str | None:
        if self.template is None or self.own:
            return None
        return without_marks(self.template.source)

    def fingerprint(self, tokenizer: Any, options: RenderOptions) -> str:
        import tokenizers
        import transformers

        digest = hashlib.sha256()
        if tokenizer.is_fast:
            digest.update(tokenizer.backend_tokenizer.to_str().encode())
        else:
            digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        said = {
            "version": VERSION,
            "libraries": [tokenizers.__version__, transformers.__version__],
            "kind": type(tokenizer).__name__,
            "special": tokenizer.special_tokens_map,
            "template": None if self.template is None else self.template.source,
            "family": None if self.family is None else FAMILIES[self.family].source,
            "loss_on": options.loss_on,
            "rendering": options.rendering.model_dump(mode="json"),
        }
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def set_up(tokenizer: Any, rendering: Rendering) -> Setup:
    """SpecError when the tokenizer and `data.rendering` do not go together."""
    constants = {**tokenizer.special_tokens_map, **rendering.chat_template_kwargs}
    own = False
    match rendering:
        case ModelTemplate():
            own, source, name, field = True, _own_source(tokenizer), "the model's chat template", "model"
        case FamilyTemplate():
            _check_tokens(tokenizer, FAMILIES[rendering.name])
            source, name = FAMILIES[rendering.name].source, f"the template of family {rendering.name}"
            field = "data.rendering.name"
        case GivenTemplate():
            source, name, field = rendering.template, "the given template", "data.rendering.template"
        case _ as never:
            assert_never(never)
    if source is None:
        if rendering.system_prompt is not None:
            raise SpecError(
                "the model's tokenizer has no chat template that a system prompt could go into; name a family",
                field="data.rendering.system_prompt",
            )
        encoder = Encoder(tokenizer, Controls(_special_tokens(tokenizer)))
        return Setup(None, None, encoder, None, None, True, False, None)
    template = _compiled(source, constants, field, name, ours=isinstance(rendering, FamilyTemplate))
    encoder = Encoder(tokenizer, Controls(_control_tokens(tokenizer, template)))
    family = FAMILIES[rendering.name] if isinstance(rendering, FamilyTemplate) else None
    twin = None
    if family is None and not template.marked:
        family, twin, same = _find_twin(template, constants)
    else:
        same = True
    return Setup(
        template,
        TurnFinder(template, twin, encoder.controls),
        encoder,
        None if family is None else family.name,
        None if family is None or not same else family.extends,
        own,
        "developer" in source,
        Completeness(template, [name for name, found in FAMILIES.items() if not _missing_tokens(tokenizer, found)]),
    )


def _compiled(source: str, constants: dict[str, Any], field: str, name: str, *, ours: bool) -> ChatTemplate:
    try:
        return ChatTemplate(source, constants, name=name, ours=ours)
    except TemplateError as error:
        lineno = getattr(error, "lineno", None)
        where = f" (its line {lineno})" if lineno else ""
        raise SpecError(f"{name} is not a template: {error}{where}", field=field) from error


def _own_source(tokenizer: Any) -> str | None:
    """Some tokenizers have several templates by name; `default` is the one to chat with."""
    found = tokenizer.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    return str(found) if found else None


def _no_template(line: int) -> DataError:
    return DataError(
        "the rows are chats, but the model's tokenizer has no chat template; name a family as data.rendering, use an "
        "instruct model, or rows of format prompt_completion or text",
        field="data.rendering",
    )


# --- control tokens ----------------------------------------------------------------------------------------


def _special_tokens(tokenizer: Any) -> set[str]:
    added = tokenizer.added_tokens_decoder.values()
    return {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)


def _control_tokens(tokenizer: Any, template: ChatTemplate) -> set[str]:
    """Tokens flagged as special, and those that the template writes around turns though they are not flagged, as
    Command R's. What people write into answers themselves (`<think>`, `<tool_call>`) is neither, and stays a token."""
    tokens = _special_tokens(tokenizer)
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} - tokens
    written = ""
    for trial in ((_ONE, _TWO, _THREE), (_SYSTEM, _ONE, _TWO, _THREE)):
        written += _trial(template, trial) or ""
    return tokens | {token for token in added if token.strip() and token in written}


def _missing_tokens(tokenizer: Any, family: TemplateFamily) -> list[str]:
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    missing = [token for token in family.tokens if token not in known]
    if "bos_token" in family.source and not tokenizer.bos_token:
        missing.append("a BOS token")
    return missing


def _check_tokens(tokenizer: Any, family: TemplateFamily) -> None:
    if missing := _missing_tokens(tokenizer, family):
        raise SpecError(
            f"the model's tokenizer lacks {', '.join(missing)}, which the family {family.name} writes; they would "
            "become ordinary text. Take the family that the model was trained with",
            field="data.rendering.name",
        )


# --- the family of a model's own template --------------------------------------------------------------------


def _find_twin(
    template: ChatTemplate, constants: dict[str, Any]
) -> tuple[TemplateFamily | None, ChatTemplate | None, bool]:
    """The family whose template writes the same, and whether it does so in every trial; (None, None, False) when no
    trial is equal."""
    wanted = [_trial(template, trial) for trial in _TRIALS]
    possible = sum(one is not None for one in wanted)
    best: tuple[int, TemplateFamily, ChatTemplate] | None = None
    for family in FAMILIES.values():
        if not family.may_be(template.source):
            continue
        twin = ChatTemplate(family.source, constants, name=f"the template of family {family.name}", ours=True)
        equal = sum(one is not None and one == _trial(twin, trial) for one, trial in zip(wanted, _TRIALS, strict=True))
        if equal and (best is None or equal > best[0]):
            best = equal, family, twin
            if equal == possible:  # no other is better; each that is tried has to be compiled
                break
    if best is None:
        return None, None, False
    return best[1], best[2], best[0] == possible


def _trial(template: ChatTemplate, trial: tuple[Message, ...]) -> str | None:
    turns = [message.as_dict() for message in trial]
    try:
        return template.text(Asked(turns, (), 0), turns)
    except Endless as error:
        raise SpecError(f"tried on a small chat, {error.message}", field="data.rendering") from error
    except DataError:
        return None
