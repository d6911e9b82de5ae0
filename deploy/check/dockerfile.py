"""A Dockerfile read into stages and instructions: as much of its language as ours use, and everything else refused.

The format is https://docs.docker.com/reference/dockerfile/. Variables are put in where Docker does it itself; the words
of RUN are left to the shell, which has them in its environment.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = frozenset(
    ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "USER",
     "VOLUME", "WORKDIR")
)  # fmt: skip
VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


class Malformed(Exception):
    """Not a Dockerfile, or more of one than is understood here; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `text` is what follows its name, continuation lines joined."""

    name: str
    text: str
    line: int

    def words(self) -> list[str]:
        """The exec form's words; of the shell form, its parts as a shell takes them apart."""
        if self.text.startswith("["):
            return [str(word) for word in json.loads(self.text)]
        return shlex.split(self.text)

    def pairs(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Of ENV, LABEL and ARG: names and values, with variables put in."""
        found = {}
        for word in self.words():
            name, _, value = word.partition("=")
            found[name] = fill(value, variables)
        return found


@dataclass(slots=True)
class Stage:
    """From one FROM to the next."""

    base: str
    """As it is written, variables and all."""
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> Instruction | None:
        """What counts of an instruction that replaces those before it, in this stage alone."""
        return next((one for one in reversed(self.instructions) if one.name == name), None)


@dataclass(slots=True)
class Dockerfile:
    """A whole file."""

    arguments: dict[str, str]
    """ARG before the first FROM."""
    stages: list[Stage]

    def stage(self, name: str | None = None) -> Stage:
        """By its name; without one the last, which `docker build` makes."""
        if name is None:
            return self.stages[-1]
        return next(stage for stage in self.stages if stage.name == name)

    def chain(self, name: str | None = None) -> list[Stage]:
        """The stages whose instructions make `name`, the oldest first."""
        stage = self.stage(name)
        names = [other.name for other in self.stages]
        return [*(self.chain(stage.base) if stage.base in names else []), stage]

    def effective(self, instruction: str, name: str | None = None) -> Instruction | None:
        """The one that counts in the image `name`, inherited from earlier stages or its own."""
        for stage in reversed(self.chain(name)):
            if (found := stage.last(instruction)) is not None:
                return found
        return None


def fill(text: str, variables: Mapping[str, str]) -> str:
    """Put `variables` in; one that nobody has set is empty, as in Docker."""
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def _instructions(path: Path) -> list[Instruction]:
    found: list[Instruction] = []
    text, began = "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue  # also between continuation lines
        if not text and not line.strip():
            continue
        began = began if text else number
        text += line.strip() + " "
        if line.rstrip().endswith("\\"):
            text = text.rstrip().removesuffix("\\")
            continue
        name, _, rest = text.strip().partition(" ")
        if name not in KNOWN:
            raise Malformed(f"{path}:{began}: {name} is not understood here")
        if name in ("RUN", "COPY") and ("<<" in rest or rest.startswith("--mount")):
            raise Malformed(f"{path}:{began}: here-documents and mounts are not understood here")
        found.append(Instruction(name, " ".join(rest.split()) if name != "RUN" else rest.strip(), began))
        text = ""
    if text:
        raise Malformed(f"{path}: ends within an instruction")
    return found


def read(path: Path) -> Dockerfile:
    """Raises Malformed."""
    made = Dockerfile({}, [])
    for one in _instructions(path):
        if one.name == "FROM":
            words = one.text.split()
            if len(words) not in (1, 3) or (len(words) == 3 and words[1] != "AS"):
                raise Malformed(f"{path}:{one.line}: FROM base [AS name]")
            made.stages.append(Stage(words[0], words[2] if len(words) == 3 else ""))
        elif made.stages:
            made.stages[-1].instructions.append(one)
        elif one.name == "ARG":
            made.arguments |= one.pairs({})
        else:
            raise Malformed(f"{path}:{one.line}: {one.name} before FROM")
    if not made.stages:
        raise Malformed(f"{path}: no FROM")
    return made
