"""Commands and options that people type and eft does not have: which one they want."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COMMANDS = {
    "apply": "eft submit",
    "attach": "eft watch",
    "cat": "eft logs",
    "config": "eft login",
    "configure": "eft login",
    "create": "eft submit",
    "del": "eft delete",
    "describe": "eft show",
    "events": "eft watch",
    "export": "eft download",
    "finetune": "eft submit",
    "fine-tune": "eft submit",
    "get": "eft show",
    "health": "eft doctor",
    "info": "eft show",
    "inspect": "eft show",
    "hide": "eft archive",
    "job": "eft show",
    "kill": "eft cancel",
    "label": "eft tag",
    "log": "eft logs",
    "logout": "eft login",
    "monitor": "eft watch",
    "node": "eft nodes",
    "preview": "eft data preview",
    "ps": "eft queue",
    "result": "eft show",
    "results": "eft show",
    "run": "eft submit",
    "sbatch": "eft submit",
    "scancel": "eft cancel",
    "server": "eft up",
    "sinfo": "eft nodes",
    "squeue": "eft queue",
    "start": "eft submit",
    "stats": "eft metrics",
    "stop": "eft pause",
    "tail": "eft logs",
    "top": "eft watch",
    "upload": "eft files upload",
    "validate": "eft data check",
    "wait": "eft watch",
}
"""Below `eft` itself."""

VERBS = (
    {"ls", "list", "show", "get", "all"},
    {"rm", "delete", "remove", "cancel", "revoke", "disable", "del"},
    {"create", "add", "new", "make", "upload", "plan", "hold"},
    {"set", "change", "update", "edit"},
)
"""In groups: words of one meaning, of which a group of commands has one or two."""

SAME = ({"ls", "list"}, {"rm", "delete"})
"""In groups: words of which one does what the other would, so that it is done and not only suggested."""

OPTIONS = {
    "--api-key": "the key is EFT_API_KEY, or what `eft login` keeps",
    "--base-model": "`--set model=…`",
    "--batch-size": "`--set training.per_device_train_batch_size=…`",
    "--epochs": "`--set training.num_train_epochs=…`",
    "--eval-data": "`--eval FILE`",
    "--follow": "`eft logs --follow` and `eft watch` follow",
    "--gpus": "`--set resources.gpus=…`",
    "--key": "the key is EFT_API_KEY, or what `eft login` keeps",
    "--learning-rate": "`--set optimizer.learning_rate=…`",
    "--lr": "`--set optimizer.learning_rate=…`",
    "--model": "`--set model=…`",
    "--name": "`--set name=…`",
    "--output": "`--json` prints JSON",
    "--priority": "`--set priority=…`",
    "--server": "`--url` names the server",
    "--timeout": "`submit --wait` and `check --wait` have it; `resources.max_runtime_seconds` bounds the training",
    "--train": "`--data FILE`",
    "--verbose": "`--json` prints everything",
}
"""Wherever a command does not have them."""


def meant(word: str, known: Mapping[str, Any]) -> str:
    """The command of `known` that `word` is another spelling of: `list` for `ls`, `model` for the group `models`.
    Otherwise `word`."""
    for same in SAME:
        if word in same:
            return next((other for other in same if other in known), word)
    for other in (f"{word}s", word.removesuffix("s")):
        if hasattr(known.get(other), "commands"):
            return other
    return word


def command(word: str, path: tuple[str, ...], known: Iterable[str]) -> str:
    """Behind a message that there is no command `word` below `path`: empty, or a sentence."""
    if not path and word in COMMANDS:
        return f" Did you mean '{COMMANDS[word]}'?"
    there = list(known)
    for verbs in VERBS:
        if path and word in verbs and (found := [verb for verb in there if verb in verbs]):
            return f" Did you mean '{' '.join(('eft', *path, found[0]))}'?"
    return ""


def option(name: str, path: tuple[str, ...], elsewhere: dict[str, str]) -> str:
    """The same for an option; `elsewhere`: options that other commands have, each with one that has it."""
    if name in elsewhere and not path:
        return f" Options follow the command: eft {elsewhere[name]} {name} …"
    return f" Instead: {OPTIONS[name]}." if name in OPTIONS else ""


def options(command: Any, path: tuple[str, ...] = ()) -> dict[str, str]:
    """Every option of every command below `command`, with the first command that has it."""
    found: dict[str, str] = {}
    for name, below in getattr(command, "commands", {}).items():
        for parameter in below.params:
            for spelling in parameter.opts:
                if spelling.startswith("-"):
                    found.setdefault(spelling, " ".join((*path, name)))
        for spelling, where in options(below, (*path, name)).items():
            found.setdefault(spelling, where)
    return found
