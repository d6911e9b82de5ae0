"""From a row to tokens and to the tokens that are learned.

- messages: the tokenizer's chat template, tokenised once without adding special tokens (the template writes its own
  BOS). Learned: every assistant turn up to and with its end-of-turn token. The turns are found with the template's
  `{% generation %}` marks if it has them; else by rendering the chat up to each turn, whose tokens must be a prefix of
  the whole chat's (that is also what the model will see when it answers). A template that breaks this is refused.
- prompt_completion: the two strings one after the other, no template, and EOS (as TRL does for plain strings).
  Learned: all tokens after the common prefix with the prompt's own tokens.
- instruction: a user and an assistant turn if the tokenizer has a chat template, else the Alpaca prompt.
- text: the string and EOS; every token is learned.

EOS is learned wherever a completion ends, also when the padding token is the same: padding is masked by position,
never by its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

from jinja2 import TemplateError

from core.data.rows import Chat, Instruction, Message, PromptCompletion, Row, Text
from core.errors import DataError, ModelError

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


@dataclass(frozen=True, slots=True)
class Rendered:
    ids: list[int]
    learned: list[bool]
    """True where the token carries loss."""
    cut_prompt: bool = False
    """Tokens merge across the end of the prompt: the completion starts a little earlier than asked."""


class Renderer:
    """Renders rows with one Hugging Face tokenizer. ModelError when it has no end-of-sequence token."""

    def __init__(self, tokenizer: Any, *, all_tokens: bool) -> None:
        """`all_tokens`: the prompt's tokens carry loss too (`stage.loss_on: all`)."""
        if tokenizer.eos_token_id is None:
            raise ModelError("the model's tokenizer has no end-of-sequence token, so it could never learn to stop")
        self.tokenizer = tokenizer
        self.all_tokens = all_tokens
        self.has_template = bool(tokenizer.chat_template)
        self._marked = self.has_template and "{% generation" in str(tokenizer.chat_template).replace("{%-", "{%")
        self._special = set(tokenizer.all_special_ids)

    def render(self, row: Row, line: int) -> Rendered:
        """Tokens of a row; `line` is for the error. DataError when the chat template refuses the row."""
        match row:
            case Chat(messages):
                return self._finish(self._chat([message.as_dict() for message in messages], line))
            case PromptCompletion(prompt, completion):
                return self._finish(self._plain(prompt, completion))
            case Instruction(instruction, given, output):
                if not self.has_template:
                    prompt = (ALPACA_WITH_INPUT if given else ALPACA).format(instruction=instruction, input=given)
                    return self._finish(self._plain(prompt, output))
                asked = f"{instruction}\n\n{given}" if given else instruction
                turns = [Message("user", asked).as_dict(), Message("assistant", output).as_dict()]
                return self._finish(self._chat(turns, line))
            case Text(text):
                ids = self._encode(self._with_eos(text))
                return self._finish(Rendered(ids, [True] * len(ids)))
            case _ as never:
                assert_never(never)

    def _finish(self, rendered: Rendered) -> Rendered:
        learned = [True] * len(rendered.ids) if self.all_tokens else list(rendered.learned)
        if learned:
            learned[0] = False  # nothing comes before the first token to predict it from
        return Rendered(rendered.ids, learned, rendered.cut_prompt)

    # --- plain strings -------------------------------------------------------------------------------

    def _plain(self, prompt: str, completion: str) -> Rendered:
        before = self._encode(prompt) if prompt else []
        ids = self._encode(prompt + self._with_eos(completion))
        start = 0
        while start < min(len(before), len(ids)) and before[start] == ids[start]:
            start += 1
        # A tokenizer that ends every text with EOS does so after the prompt too; that is no merge.
        cut = start < len(before) and before[start:] != [self.tokenizer.eos_token_id]
        return Rendered(ids, [False] * start + [True] * (len(ids) - start), cut)

    def _with_eos(self, text: str) -> str:
        eos: str = self.tokenizer.eos_token
        return text if text.endswith(eos) else text + eos

    def _encode(self, text: str) -> list[int]:
        """Tokens with the tokenizer's own BOS, once, and EOS at most once."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=True)["input_ids"]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if ids[-2:] == [eos, eos]:
            ids = ids[:-1]
        return ids

    # --- chats ---------------------------------------------------------------------------------------

    def _chat(self, messages: list[dict[str, str]], line: int) -> Rendered:
        if not self.has_template:
            raise DataError(
                "the rows are chats, but the model's tokenizer has no chat template; use an instruct model, or rows of "
                "format prompt_completion or text",
                field="data.train.format",
            )
        if self._marked:
            ids, spans = self._marked_spans(messages, line)
        else:
            ids, spans = self._prefix_spans(messages, line)
        learned = [False] * len(ids)
        for start, end in spans:
            for at in range(start, self._end_of_turn(ids, start, end)):
                learned[at] = True
        if spans[-1][1] == len(ids) and not any(token in self._special for token in ids[spans[-1][0] :]):
            ids = [
                *ids,
                self.tokenizer.eos_token_id,
            ]  # the template ends no turn: without this nothing is learned to stop
            learned.append(True)
        return Rendered(ids, learned)

    def _marked_spans(self, messages: list[dict[str, str]], line: int) -> tuple[list[int], list[tuple[int, int]]]:
        output = self._template(messages, line, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(output["input_ids"]), [*output["assistant_masks"], 0]
        spans: list[tuple[int, int]] = []
        start: int | None = None
        for at, marked in enumerate(mask):
            if marked and start is None:
                start = at
            elif not marked and start is not None:
                spans.append((start, at))
                start = None
        if not spans:
            raise DataError("the chat template marks no token of this chat as the assistant's", field=f"line {line}")
        return ids, spans

    def _prefix_spans(self, messages: list[dict[str, str]], line: int) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._chat_ids(messages, line)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._chat_ids(messages[:index], line, add_generation_prompt=True) if index else []
            last = index + 1 == len(messages)
            through = ids if last else self._chat_ids(messages[: index + 1], line)
            if ids[: len(before)] != before or ids[: len(through)] != through or len(through) <= len(before):
                raise DataError(
                    f"the model's chat template writes the turns before messages[{index}] differently once there is an "
                    "answer, so what is to be learned cannot be told from the prompt; use a template with "
                    "{% generation %} marks, or rows of format prompt_completion",
                    field=f"line {line}: messages[{index}]",
                )
            spans.append((len(before), len(through)))
        return ids, spans

    def _chat_ids(self, messages: list[dict[str, str]], line: int, **options: Any) -> list[int]:
        text = self._template(messages, line, tokenize=False, **options)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _template(self, messages: list[dict[str, str]], line: int, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the model's chat template refuses this chat: {error}", field=f"line {line}") from error

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        """End of what is learned: white space that a template writes after the end-of-turn token is never generated,
        since generation has stopped there."""
        for at in range(end - 1, start - 1, -1):
            if ids[at] in self._special:
                return at + 1
            if self.tokenizer.decode([ids[at]]).strip():
                break
        return end
