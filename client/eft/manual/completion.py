"""Completion in the shell: what may stand where the cursor is, from the commands themselves and from the server.

The shells' scripts (`eft completion bash|zsh|fish`) know nothing of the commands: at every Tab they run
`eft __complete` with the words so far and get lines `value<TAB>words about it`, below a first line that is `files` when
the shell shall offer its own file names.
Where the server does not answer at once there is nothing to offer, and never an error in the middle of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eft.errors import EftClientError
from eft.manual.source import ManualPage, Parameter, find, page

if TYPE_CHECKING:
    from eft.client import Client

SECONDS = 1.5
"""So long a person waits for a Tab; then nothing is offered."""
MANY = 100
FILES = "files"
"""The shell is to offer file names."""
Offer = tuple[str, str]
"""A value, and words about it ("" for none)."""

_PATHS = frozenset({"FILE", "PATH", "JOB|FILE"})
_STATUSES = ("queued", "preparing", "starting", "running", "pausing", "paused", "stopping")
_OPEN = ("queued", "preparing", "starting", "running", "parking", "parked")
_OF_VERB: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("cancel",): _STATUSES,
    ("delete",): ("succeeded", "failed", "cancelled"),
    ("pause",): ("queued", "preparing", "starting", "running"),
    ("priority",): _STATUSES,
    ("resume",): ("paused",),
    ("retry",): ("failed", "cancelled"),
}
"""Jobs that a verb can do something for."""
_VALUES: Mapping[str, tuple[str, ...]] = {
    "--status": (*_STATUSES, "succeeded", "failed", "cancelled"),
    "--scope": ("read", "write", "admin", "box"),
    "--role": ("viewer", "member", "admin"),
    "--kind": ("standard", "chat"),
    "--event": ("job.started", "job.paused", "job.succeeded", "job.failed", "job.cancelled"),
    "--state": ("pending", "delivered", "dead"),
    "SHELL": ("bash", "zsh", "fish"),
    "SCOPE": ("project", "owner"),
}
"""By option or metavar."""


def offers(root: Any, words: Sequence[str]) -> tuple[bool, list[Offer]]:
    """(offer file names too, what else): for the last of `words`, those behind `eft`."""
    *before, current = list(words) or [""]
    path: list[str] = []
    command = root
    rest = list(before)
    while rest and not rest[0].startswith("-"):
        child = find(command, [rest[0]])
        if child is None:
            break
        path.append(rest.pop(0))
        command = child
    here = page(command, tuple(path))
    files, found = _here(root, here, rest, current)
    return files, [(value, words) for value, words in found if value.startswith(current)]


def _here(root: Any, here: ManualPage, rest: list[str], current: str) -> tuple[bool, list[Offer]]:
    if here.path in (("help",), ("man",)):
        named = find(root, rest)
        return False, [] if named is None else _commands(page(named, tuple(rest)))
    if here.commands and not rest and not current.startswith("-"):
        return False, _commands(here)
    if here.module is not None:
        return _of_module(here.module, rest, current)
    option = _waiting_option(here, rest)
    if option is not None:
        return _values(option, here)
    if current.startswith("-"):
        used = {word for word in rest if word.startswith("-")}
        left = [one for one in here.options if one.repeated or not used.intersection(one.flags)]
        return False, [
            *((flag, one.help) for one in left for flag in one.flags if flag.startswith("--") or current == "-"),
            ("--help", "The page of the manual."),
        ]
    argument = _argument(here, rest)
    return (False, []) if argument is None else _values(argument, here)


def _commands(here: ManualPage) -> list[Offer]:
    return [(name, words) for _, name, words in here.commands]


def _waiting_option(here: ManualPage, rest: list[str]) -> Parameter | None:
    """The option whose value comes next."""
    if not rest or not rest[-1].startswith("-"):
        return None
    return next((one for one in here.options if rest[-1] in one.flags and one.metavar), None)


def _argument(here: ManualPage, rest: list[str]) -> Parameter | None:
    """The argument that the word is for."""
    takes = {flag for one in here.options if one.metavar for flag in one.flags}
    count, skip = 0, False
    for word in rest:
        if skip:
            skip = False
        elif word in takes:
            skip = True
        elif not word.startswith("-"):
            count += 1
    arguments = here.arguments
    if count < len(arguments):
        return arguments[count]
    return arguments[-1] if arguments and arguments[-1].repeated else None


def _values(one: Parameter, here: ManualPage) -> tuple[bool, list[Offer]]:
    kind = one.metavar.strip("[].")
    for name in (*one.flags, kind):
        if name in _VALUES:
            return False, [(value, "") for value in _VALUES[name]]
    files = kind in _PATHS
    asked = _ASKED.get("JOB" if kind == "JOB|FILE" else kind)
    return files, [] if asked is None else _ask(asked, here)


def _of_module(module: str, rest: list[str], current: str) -> tuple[bool, list[Offer]]:
    """A program of the application: what its --help lists."""
    from eft.manual.delegated import sections

    if rest and not current.startswith("-"):
        return True, []
    found = []
    for heading, rows in sections(module):
        if not current.startswith("-"):
            # argparse tells of subcommands in a row `{install,run}`, and then one by one.
            verbs = {verb for label, _ in rows for verb in label.strip("{}").split(",") if label.startswith("{")}
            found += [(label, words) for label, words in rows if heading == "Arguments" and label in verbs]
            continue
        for label, words in rows:
            found += [(part.split()[0], words) for part in label.split(", ") if part.startswith("--")]
    return not found and not current.startswith("-"), found


# --- of the server


def _ask(asked: Callable[[Client, ManualPage], Iterator[Offer]], here: ManualPage) -> list[Offer]:
    from eft.client import Client

    try:
        with Client(timeout=SECONDS, patience=0) as client:
            return list(asked(client, here))
    except EftClientError:
        return []  # no server, no key: nothing to offer


def _jobs(client: Client, here: ManualPage) -> Iterator[Offer]:
    for job in client.jobs(status=_OF_VERB.get(here.path), limit=MANY).jobs:
        yield job.id, f"{job.status} {job.name or ''}".strip()


def _files(client: Client, here: ManualPage) -> Iterator[Offer]:
    for _, file in zip(range(MANY), client.files(), strict=False):
        yield file.id, file.filename


def _nodes(client: Client, here: ManualPage) -> Iterator[Offer]:
    for node in client.nodes():
        yield node.name, node.state


def _gpus(client: Client, here: ManualPage) -> Iterator[Offer]:
    for row in client.queue.gpus():
        yield str(row["gpu"]), str(row["state"])


def _keys(client: Client, here: ManualPage) -> Iterator[Offer]:
    rows = client.access.keys()
    for row in rows:
        yield str(row["id"]), f"{row['prefix']} {row['name']} {row['state']}"


def _users(client: Client, here: ManualPage) -> Iterator[Offer]:
    for row in client.access.users():
        yield str(row["name"]), ""


def _hooks(client: Client, here: ManualPage) -> Iterator[Offer]:
    for row in client.webhooks.all():
        yield str(row["id"]), str(row["name"])


def _sessions(client: Client, here: ManualPage) -> Iterator[Offer]:
    for row in client.sessions.all(status=_OPEN, limit=MANY):
        yield str(row["id"]), f"{row['status']} {row['name'] or ''}".strip()


_ASKED: Mapping[str, Callable[[Client, ManualPage], Iterator[Offer]]] = {
    "JOB": _jobs,
    "FILE_ID": _files,
    "NODE": _nodes,
    "SESSION": _sessions,
    "GPU": _gpus,
    "KEY": _keys,
    "USER": _users,
    "HOOK": _hooks,
}
"""By what stands for the value in the help."""


def answer(root: Any, words: Sequence[str]) -> str:
    """What `eft __complete` prints."""
    files, found = offers(root, words)
    lines = [FILES] if files else [""]
    lines += [f"{value}\t{' '.join(about.split())}" for value, about in found if value.isprintable()]
    return "\n".join(lines) + "\n"


# --- the shells

BASH = r"""# eft's completion for bash. Load it with: source <(eft completion bash)
_eft_complete() {
    local line files values=()
    {
        IFS= read -r files
        while IFS= read -r line; do values+=("${line%%$'\t'*}"); done
    } < <(command eft __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=()
    for line in "${values[@]}"; do COMPREPLY+=("$(printf '%q' "$line")"); done
    if [[ $files == files ]]; then
        compopt -o filenames 2>/dev/null
        while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
complete -o nosort -F _eft_complete eft
"""
ZSH = r"""#compdef eft
# eft's completion for zsh. Load it with: source <(eft completion zsh), after compinit
_eft_complete() {
    local -a lines values
    local line value
    lines=("${(@f)$(command eft __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${(@)lines[2,-1]}"; do
        [[ -n $line ]] || continue
        value=${line%%$'\t'*}
        values+=("${value//:/\\:}:${line#*$'\t'}")
    done
    (( $#values )) && _describe -V 'eft' values
    [[ $lines[1] == files ]] && _files
    return 0
}
if [[ $funcstack[1] == _eft ]]; then _eft_complete "$@"; else compdef _eft_complete eft; fi
"""
FISH = r"""# eft's completion for fish. Load it with: eft completion fish | source
function __eft_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l lines (command eft __complete $words[2..-1] 2>/dev/null)
    test (count $lines) -gt 0; or return
    for line in $lines[2..-1]
        printf '%s\n' $line
    end
    if test "$lines[1]" = files
        __fish_complete_path (commandline -ct)
    end
end
complete -c eft -f -a '(__eft_complete)'
"""
SCRIPTS: Mapping[str, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def shell_of_user() -> str | None:
    """By SHELL; None for one that we have no script for."""
    name = os.environ.get("SHELL", "").rpartition("/")[2]
    return name if name in SCRIPTS else None
