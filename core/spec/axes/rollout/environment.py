"""What answers the model in an episode of several turns: the user's code, the verifier of a task, or a game."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.axes.rollout.reward import PythonName, PythonSource
from core.spec.base import SpecModel, by_type, short_form


class EnvironmentTerms(SpecModel):
    """Common fields of environments; not an arm. The model and the environment take turns. Tokens of the environment
    carry no loss. All tokens behind the prompt share `stage.max_completion_length`."""

    type: str
    max_turns: Annotated[int, Field(ge=1, le=100)] = 4
    """Turns of the model at most. An episode that has not ended by then is cut off."""
    max_turn_length: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Tokens of a turn of the model at most. Default: what is left of `stage.max_completion_length`."""
    max_reply_length: Annotated[int, Field(ge=1, le=131_072)] = 512
    """Tokens of a reply at most; a longer one is cut, and a notice says so."""
    role: Literal["user", "tool"] = "user"
    """Role of the replies in the chat template. Prompts that are not rendered as chats are continued by the text."""


class PythonEnvironment(EnvironmentTerms):
    """A Python function of yours, which is given the prompt and all answers of the model so far. It runs in a sandbox:
    without network, files or keys (docs/security.md)."""

    type: Literal["python"] = "python"
    source: PythonSource
    """Source of a module. It is executed anew for each call, with the packages of the trainer's environment, so what it
    answers depends on its arguments alone."""
    function: PythonName = "respond"
    """Function in it that takes, by name and as far as it has parameters for them, `prompt`, `answers` (the texts of
    the model's turns so far) and the columns of the row. It returns the text of a reply; or a number, which ends the
    episode and is the reward `environment`; or `{"reply": text or None, "reward": number}`."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Time of the calls for one turn of all episodes at most."""


class TaskEnvironment(EnvironmentTerms):
    """The verifier of a task of reasoning-gym as a user, for rows that `data` has from a task: an answer that it does
    not give 1 is replied to with `feedback`, and the model may try again. The job needs the reward `task`."""

    type: Literal["task"] = "task"
    feedback: Annotated[str, Field(min_length=1, max_length=10_000)] = "That is not right. Try again."
    """Text of the reply."""


class GameEnvironment(EnvironmentTerms):
    """A game of textarena, whose openings are the prompts (`data` of type `game`): an answer is a move, and the game
    replies. The reward `environment` is what the game gives at its end; where the episode is cut off before, what the
    game would give for being so far."""

    type: Literal["game"] = "game"


EnvironmentArm = Annotated[
    PythonEnvironment | TaskEnvironment | GameEnvironment, Field(discriminator="type"), short_form(by_type)
]
