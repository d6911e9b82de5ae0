"""From a row to tokens and to the tokens that are learned.

- messages: a chat template (the model's, a family's, or one that is given), tokenised once without adding special
  tokens, since the template writes its own BOS. Learned: the assistant's turns, each up to and with its end-of-turn
  token (`turns.py`). What the row's text spells of control tokens stays text (`controls.py`).
- prompt_completion: a user and an assistant turn, or the prompt's tokens, the completion's tokens and EOS: what
  `data.rendering.pairs` says (`core/spec/axes/pairs.py`). Learned: what comes behind the prompt's own tokens.
- instruction: a user and an assistant turn if there is a chat template, else a pair with the Alpaca prompt.
- text: the string and EOS; every token is learned.
- preference, kto, prompt: the same two roads, with the prompt apart: `render_pair`, `render_labelled`, `render_prompt`.
- stepwise: the prompt as the model is asked it, then each step and a separator, tokenised one by one (`render_steps`).

EOS is learned wherever a completion ends, also when the padding token is the same: padding is masked by position,
never by its id.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from core.data.rows import (
    Chat,
    Instruction,
    Labelled,
    Message,
    Preference,
    Prompt,
    PromptCompletion,
    PromptOnly,
    Row,
    RowFormat,
    Stepwise,
    Text,
)
from core.errors import DataError, ModelError, SpecError
from core.spec.axes.method import LowRank
from core.spec.axes.pairs import EXAMPLE, Way, asked, bordered, done_with, how_to_ask
from core.spec.axes.stage import loss_on
from core.spec.job import JobSpec
from core.train.render.controls import texts_of
from core.train.render.encode import Encoded, Work
from core.train.render.jinja.template import Asked
from core.train.render.options import RenderOptions, loss_on_for
from core.train.render.pairs import ChatsInStrings, chosen_way
from core.train.render.setup import Setup, set_up
from core.train.render.strings import Rendered, StringEncoder, Strings
from core.train.render.turns import Turn
from core.train.vocabulary.new_tokens import add_tokens

ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""The prompts of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca), for tokenizers without a chat template."""
STEP_SEPARATOR = "\n"
"""What is written behind each step of a solution, as in TRL."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat as text, and which of its turns are learned."""

    work: Work
    learned: list[bool]
    pair: bool = False
    """It was a pair of strings: its answer is tokenised apart where tokens would merge across the border."""


class Renderer:
    """Renders rows with one Hugging Face tokenizer. ModelError when it has no end-of-sequence token, SpecError when it
    does not go together with `data.rendering`. For one thread; a copy in another process renders the same."""

    def __init__(self, tokenizer: Any, options: RenderOptions) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelError("the model's tokenizer has no end-of-sequence token, so it could never learn to stop")
        self.tokenizer, self.options = tokenizer, options
        if options.new_tokens:
            add_tokens(tokenizer, options.new_tokens)
        self._setup: Setup = set_up(tokenizer, options.rendering)
        self._encoder = self._setup.encoder
        self._plain = StringEncoder(tokenizer, self._encoder)
        self._system = options.rendering.system_prompt
        self._special = set(tokenizer.all_special_ids) | self._encoder.borders
        self.pairs: Way = chosen_way(options.rendering, self._setup)
        """How pairs of strings become tokens."""
        self._chats_in_strings = ChatsInStrings(self._setup) if options.rendering.pairs == "auto" else None
        self.has_template = self._setup.template is not None
        self.family = self._setup.family
        """Name of the template family that writes what this template writes, where one is known."""
        self.extends = self._setup.extends
        """The tokens of a chat's beginning are the beginning of the whole chat's tokens; None: not known."""

    def fingerprint(self) -> str:
        """SHA-256 of all that decides the tokens of a row: tokenizer, template, options, and this code."""
        return self._setup.fingerprint(self.tokenizer, self.options)

    def saved_template(self) -> str | None:
        """The chat template that a tuned model's tokenizer should carry, so that it is asked as it was trained; None:
        the one it has."""
        return self._setup.saved_template()

    def describe(self) -> dict[str, Any]:
        """For the run record."""
        template = self._setup.template
        return {
            "loss_on": self.options.loss_on,
            "type": self.options.rendering.type,
            "template_sha256": None if template is None else hashlib.sha256(template.source.encode()).hexdigest(),
            "family": self.family,
            "extends": self.extends,
        } | self.about_pairs()

    def about_pairs(self) -> dict[str, Any]:
        """For rows that are pairs of strings: how they become tokens, and an example of what the model is sent."""
        if self.options.row_format != "prompt_completion":
            return {}
        about = {"pairs": self.pairs, "done": done_with(self.pairs), "ask": how_to_ask(self.pairs)}
        try:
            return about | {"example": {"prompt": EXAMPLE, "sent": self.asked_text(EXAMPLE)}}
        except DataError:  # the template takes no question alone, as the rows do
            return about

    # --- rows ----------------------------------------------------------------------------------------

    def render(self, row: Row, line: int) -> Rendered:
        """Tokens of a row; `line` is for the error. DataError when the chat template refuses the row."""
        return self.render_many([(row, line)])[0]

    def render_many(self, rows: Sequence[tuple[Row, int]]) -> list[Rendered]:
        """Several rows; one call into the tokenizer, which has threads for that."""
        prepared = [self._prepared(row, line) for row, line in rows]
        chats = [item for item in prepared if isinstance(item, _Chat)]
        strings = [item for item in prepared if isinstance(item, Strings)]
        encoded = iter(self._encoder.encode_many([chat.work for chat in chats]) if chats else ())
        plain = iter(self._plain.render(strings) if strings else ())
        return [
            self._finish(self._learned(item, next(encoded)) if isinstance(item, _Chat) else next(plain))
            for item in prepared
        ]

    def _prepared(self, row: Row, line: int) -> _Chat | Strings:
        match row:
            case Chat(messages, tools):
                return self._chat(messages, tools, line)
            case PromptCompletion(prompt, completion):
                return self._pair(prompt, completion, line)
            case Instruction(instruction, given, output):
                if not self.has_template:
                    prompt = (ALPACA_WITH_INPUT if given else ALPACA).format(instruction=instruction, input=given)
                    apart = self.pairs != "joined"
                    return self._strings(prompt, output, line, apart=apart, inert=self._inert_prompt)
                asked = f"{instruction}\n\n{given}" if given else instruction
                return self._chat((Message("user", asked), Message("assistant", output)), (), line)
            case Text(text):
                return self._strings("", text, line, apart=False)
            case Preference() | Labelled() | Stepwise() | PromptOnly():
                raise DataError(
                    "rows of preferences, labels, steps or prompts alone are nothing for stage `sft`",
                    field="data.train.format",
                )
            case _ as never:
                assert_never(never)

    def render_pair(self, row: Preference, line: int) -> tuple[Rendered, Rendered]:
        """(chosen, rejected), each with its prompt; learned: the answers alone, whatever `loss_on` is."""
        return (
            self._answered(row.prompt, row.chosen, row.tools, line),
            self._answered(row.prompt, row.rejected, row.tools, line),
        )

    def render_labelled(self, row: Labelled, line: int) -> Rendered:
        """Prompt and answer; learned: the answer."""
        return self._answered(row.prompt, row.completion, row.tools, line)

    def render_prompt(self, row: PromptOnly, line: int) -> Rendered:
        """The prompt, up to where the model is to write; nothing is learned."""
        if isinstance(row.prompt, str) and self.pairs != "chat":
            ids = self._plain.prompt(asked(self.pairs, row.prompt), line, inert=self._inert_strings)
        else:
            messages = (Message("user", row.prompt),) if isinstance(row.prompt, str) else row.prompt
            asked_for, inside = self._asked(self._with_system(messages), row.tools, line)
            template = self._setup.template_for(line)
            shift = len(asked_for.messages) - len(messages)
            complete = self._setup.complete_for(line)
            with complete.way_out(asked_for):
                text = template.text(asked_for, asked_for.messages, prompt=True)
            complete.check(asked_for, text, frozenset(), prompt=True, shift=shift)
            ids = self._encoder.encode(Work(text, (), inside, line)).ids
        return Rendered(ids, [False] * len(ids))

    def render_steps(self, row: Stepwise, line: int, separator: str = STEP_SEPARATOR) -> Rendered:
        """Prompt, then each step with the separator behind it; the last token of each separator, where the step is
        judged, is marked as learned. Steps and separators are tokenised apart, so no token spans a border."""
        ids = self.render_prompt(PromptOnly(row.prompt, tools=row.tools), line).ids
        steps = self._plain.pieces(row.steps, line, inert=self._inert_strings)
        (border,) = self._plain.pieces([separator], line, inert=False)
        if not border:
            words = (
                f"the tokenizer has no token for the separator {separator!r}, so no step could be judged; train "
                "another model"
            )
            raise SpecError(words, field="model")
        judged: list[int] = []
        for at, step in enumerate(steps):
            if not step:
                raise DataError("the step has no tokens", field=f"line {line}: completions[{at}]")
            ids = [*ids, *step, *border]
            judged.append(len(ids) - 1)
        learned = [False] * len(ids)
        for place in judged:
            learned[place] = True
        return Rendered(ids, learned)

    def render_asked(self, text: str, line: int) -> Rendered:
        """What somebody asks the tuned model, rendered as the prompts of the rows are."""
        match self.options.row_format:
            case "text":
                ids = self._plain.prompt(text, line, inert=self._inert_strings)
                return Rendered(ids, [False] * len(ids))
            case "prompt_completion" | "preference" | "kto" | "stepwise" | "prompt":
                return self.render_prompt(PromptOnly(text), line)
            case "instruction" if not self.has_template:
                ids = self._plain.prompt(ALPACA.format(instruction=text), line, inert=self._inert_prompt)
                return Rendered(ids, [False] * len(ids))
            case _:
                asked_for = (Message("user", text),) if self.has_template else text
                return self.render_prompt(PromptOnly(asked_for), line)

    def render_text(self, text: str) -> list[int]:
        """Tokens of a text by itself; control tokens in it are plain text."""
        (ids,) = self._plain.pieces([text], 0, inert=True)
        return ids

    def asked_text(self, text: str) -> str:
        """The whole text that the tuned model is given for this prompt, control tokens included."""
        return str(self.tokenizer.decode(self.render_asked(text, 0).ids, clean_up_tokenization_spaces=False))

    def _answered(self, prompt: Prompt, answer: Prompt, tools: Sequence[Mapping[str, Any]], line: int) -> Rendered:
        if isinstance(prompt, str) or isinstance(answer, str):
            if not (isinstance(prompt, str) and isinstance(answer, str)):
                raise DataError("prompt and answers are all messages, or all plain text", field=f"line {line}")
            pair = self._pair(prompt, answer, line, answered=True)
            if isinstance(pair, _Chat):
                rendered = self._learned(pair, self._encoder.encode(pair.work))
            else:
                (rendered,) = self._plain.render([pair])
        else:
            chat = self._chat((*prompt, *answer), tools, line, begin=len(prompt))
            rendered = self._learned(chat, self._encoder.encode(chat.work))
        return self._first_unlearned(rendered)

    def _finish(self, rendered: Rendered) -> Rendered:
        if self.options.loss_on == "all":
            rendered = Rendered(rendered.ids, [True] * len(rendered.ids), rendered.cut_prompt)
        return self._first_unlearned(rendered)

    def _first_unlearned(self, rendered: Rendered) -> Rendered:
        if rendered.learned:
            rendered.learned[0] = False  # nothing comes before the first token to predict it from
        return rendered

    # --- plain strings -------------------------------------------------------------------------------

    @property
    def _inert_strings(self) -> bool:
        return self.options.rendering.special_tokens == "inert"

    @property
    def _inert_prompt(self) -> bool:
        """Whether control tokens in the text of a prompt that we write ourselves are plain text."""
        return self.options.rendering.special_tokens != "real"

    def _pair(self, prompt: str, completion: str, line: int, *, answered: bool = False) -> _Chat | Strings:
        """`answered`: the completion is learned whatever `loss_on` says."""
        if self.pairs == "chat":
            if self._chats_in_strings is not None:
                self._chats_in_strings.refuse(prompt, completion, line)
            turns = (Message("user", prompt), Message("assistant", completion))
            return dataclasses.replace(self._chat(turns, (), line, begin=1 if answered else 0), pair=True)
        prompt, completion = bordered(self.pairs, prompt, completion)
        return self._strings(prompt, completion, line, apart=self.pairs != "joined")

    def _strings(self, prompt: str, completion: str, line: int, *, apart: bool, inert: bool | None = None) -> Strings:
        inert = self._inert_strings if inert is None else inert
        return Strings(prompt, self._plain.ended(completion), inert, line, apart)

    # --- chats ---------------------------------------------------------------------------------------

    def _chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], line: int, *, begin: int = 0
    ) -> _Chat:
        """`begin`: of the messages from there on the assistant's are learned, in place of what `loss_on` says."""
        whole = self._with_system(messages)
        shift = len(whole) - len(messages)
        asked, inside = self._asked(whole, tools, line)
        begin = begin + shift if begin else 0
        finder, complete = self._setup.finder_for(line), self._setup.complete_for(line)
        with complete.way_out(asked):
            found = finder.find(asked)
        wanted = self._wanted(whole, found.turns, begin, line)
        complete.check(asked, found.text, self._learned_messages(whole, begin), shift=shift)
        return _Chat(Work(found.text, [(turn.start, turn.end) for turn in found.turns], inside, line), wanted)

    def _asked(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], line: int
    ) -> tuple[Asked, str | None]:
        """The chat as the template takes it, and the mark inside spelled control tokens, if there are any."""
        turns = [message.as_dict() for message in messages]
        if not self._setup.knows_developer:
            turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
        controls = self._encoder.controls
        if self.options.rendering.special_tokens == "real" or not controls.suspect(_texts(messages, tools)):
            return Asked(turns, tools, line), None
        marks = controls.free_marks([*texts_of(turns), *texts_of(list(tools))], line)
        broken = [{**controls.broken(turn, marks.inside), "role": turn["role"]} for turn in turns]
        return Asked(broken, controls.broken(list(tools), marks.inside), line, marks), marks.inside

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._system is None or (messages and messages[0].role in ("system", "developer")):
            return messages
        return (Message("system", self._system), *messages)

    def _learned_messages(self, messages: Sequence[Message], begin: int) -> frozenset[int]:
        """Places of the assistant's turns that are learned."""
        answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
        if begin:
            return frozenset(at for at in answers if at >= begin)
        match self.options.loss_on:
            case "all":
                return frozenset(answers)
            case "completions":
                return frozenset(at for at in answers if messages[at].weight != 0)
            case "turns":
                return frozenset(at for at in answers if messages[at].weight)
            case "last":
                return frozenset(answers[-1:])
            case _ as never:
                assert_never(never)

    def _wanted(self, messages: Sequence[Message], turns: Sequence[Turn], begin: int, line: int) -> list[bool]:
        """Which of the turns found are learned."""
        if begin:
            if all(turn.message is not None for turn in turns):
                return [turn.message is not None and turn.message >= begin for turn in turns]
        else:
            weights = {at: message.weight for at, message in enumerate(messages) if message.role == "assistant"}
            match self.options.loss_on:
                case "all":
                    return [True] * len(turns)
                case "completions" if all(weight is None or weight > 0 for weight in weights.values()):
                    return [True] * len(turns)
                case "turns" if all(weight is None for weight in weights.values()):
                    raise DataError(
                        "stage.loss_on is `turns`, but no assistant turn of this chat has a weight",
                        field=f"line {line}: messages",
                    )
            if all(turn.message is not None for turn in turns):
                match self.options.loss_on:
                    case "completions":
                        return [weights.get(turn.message or 0) != 0 for turn in turns]
                    case "turns":
                        return [bool(weights.get(turn.message or 0)) for turn in turns]
                    case "last":
                        return [turn.message == max(weights) for turn in turns]
        raise DataError(
            "the chat template marks other turns than the chat has, so single ones cannot be chosen for the loss",
            field=f"line {line}",
        )

    def _learned(self, chat: _Chat, encoded: Encoded) -> Rendered:
        if chat.pair and encoded.merged:
            before, answer, behind = self._encoder.cut(chat.work)
            encoded = Encoded([*before, *answer, *behind], [(len(before), len(before) + len(answer))], False)
        ids, learned = encoded.ids, [False] * len(encoded.ids)
        for (start, end), wanted in zip(encoded.spans, chat.learned, strict=True):
            if wanted:
                learned[start:end] = [True] * (end - start)
        start, end = encoded.spans[-1]
        if end == len(ids) and not any(token in self._special for token in ids[start:]):
            # The template ends no turn: without this nothing is learned to stop.
            ids, learned = [*ids, self.tokenizer.eos_token_id], [*learned, chat.learned[-1]]
        return Rendered(ids, learned, encoded.merged)


def renderer_of(spec: JobSpec, row_format: RowFormat, tokenizer: Any) -> Renderer:
    """The renderer of a job for a file of this format."""
    wanted = loss_on_for(loss_on(spec.stage), row_format)
    new = tuple(spec.method.new_tokens) if isinstance(spec.method, LowRank) else ()
    return Renderer(tokenizer, RenderOptions(wanted, spec.data.rendering, row_format, new))


def _texts(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that a template may write of a chat."""
    texts: list[str] = []
    for message in messages:
        texts.append(message.content)
        if message.reasoning is not None:
            texts.append(message.reasoning)
        if message.name is not None:
            texts.append(message.name)
        if message.tool_call_id is not None:
            texts.append(message.tool_call_id)
        for call in message.tool_calls:
            texts.extend(texts_of(call.as_dict()))
    if tools:
        texts.extend(texts_of(list(tools)))
    return texts
