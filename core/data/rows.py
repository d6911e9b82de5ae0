"""What a row of training data is: plain, frozen values that readers make and renderers take. No torch, no files.

messages, sharegpt      Chat
prompt_completion       PromptCompletion
instruction             Instruction
text                    Text
preference              Preference      a prompt, the answer that is preferred and the one that is not
kto                     Labelled        a prompt, an answer, and whether it is a good one
stepwise                Stepwise        a prompt, the steps of its solution, and whether each of them is right
prompt                  PromptOnly      a prompt, and what a reward may be computed from
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from core.spec.axes.data import RowFormat as RowFormat

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant asks for a function to be called."""

    id: str | None
    name: str
    arguments: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it: arguments as an object, not as JSON in a string."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id} | call


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    """A `Role`."""
    content: str
    """Empty for an assistant turn that has tool calls alone."""
    name: str | None = None
    weight: float | None = None
    """0 or 1: whether an assistant turn is learned; None: as `stage.loss_on` says."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Id of the call that a tool turn answers."""
    reasoning: str | None = None
    """What was thought before the answer; templates know it as `reasoning_content`."""

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it: only keys that are set, and never the weight, which is not text."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function definitions as JSON schema, the way chat templates take `tools`."""


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Instruction:
    instruction: str
    input: str
    """Empty when the row has none."""
    output: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


Prompt = tuple[Message, ...] | str
"""A chat that waits for its answer, or plain text."""


@dataclass(frozen=True, slots=True)
class Preference:
    """TRL's explicit-prompt form; OpenAI's `preferred_output` rows become it too. All three are of one kind: messages
    (`chosen` and `rejected` are the answer's turns, usually one), or plain text."""

    prompt: Prompt
    chosen: Prompt
    rejected: Prompt
    tools: tuple[dict[str, Any], ...] = ()
    margin: float | None = None
    """By how much the chosen answer is better, on the scale of the rewards; None: not given."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A KTO row: one answer and whether it is a good one."""

    prompt: Prompt
    completion: Prompt
    label: bool
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Stepwise:
    """TRL's stepwise supervision: a solution in steps, each judged."""

    prompt: Prompt
    steps: tuple[str, ...]
    """At least one."""
    labels: tuple[bool, ...]
    """Whether each step is right; as many as there are steps."""
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptOnly:
    """A prompt to sample answers for, and what a reward is computed from."""

    prompt: Prompt
    reference: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """All other keys of the row, as a reward may read them."""
    tools: tuple[dict[str, Any], ...] = ()


SFTRow = Chat | PromptCompletion | Instruction | Text
"""What `stage: sft` trains on."""
Row = SFTRow | Preference | Labelled | Stepwise | PromptOnly


@dataclass(frozen=True, slots=True)
class Numbered:
    """A row and where it stands: a line of a JSONL or CSV file, the number of the row in JSON and Parquet (from 1)."""

    line: int
    row: Row
