"""What a person may have meant who wrote a name, or a value, that a job does not have.

Looked for in this order: another trainer's name for it (core/spec/aliases.py), the same name at another place of the
job, a name with almost this spelling.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from core.spec.aliases import EXAMPLES, FIELDS, VALUES

SIBLING, ELSEWHERE = 0.6, 0.8
"""How like the spelling has to be (difflib's ratio) of a name in the same object, and of one at another place."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9_-]*")
"""Without a dot behind the slash: that is a file."""
SHOWN = 3
"""Places that are named at most."""


def of_field(name: str, place: str, known: list[str], root: type[BaseModel]) -> str:
    """For a message on the unknown field `name` of the object at `place` ("" for the job), whose fields are `known`:
    empty, or the words behind a semicolon."""
    word = _plain(name)
    if word in known:
        return _meant([word])
    if word in FIELDS:
        return _meant([_from(place, FIELDS[word])])
    paths = leaves(root).get(word, [])
    if place and any(path.rpartition(".")[0] == place for path in paths):  # a field of another arm
        return _all(known)
    if paths:
        return _meant([_from(place, path) for path in paths])
    near, likeness = _nearest(word, known)
    far, far_likeness = _nearest(word, leaves(root))
    if far_likeness >= ELSEWHERE and far_likeness > likeness:
        return _meant([_from(place, path) for path in leaves(root)[far]])
    if likeness >= SIBLING:
        return _meant([near])
    return _all(known)


def of_value(value: str, field: str, known: list[str]) -> str:
    """The same for the value of a field (its last name counts) that has to be one of `known`."""
    word = value.strip().lower()
    if meant := VALUES.get(field.removesuffix(".type").rpartition(".")[2], {}).get(word):
        return _meant([meant])
    near, likeness = _nearest(word, known)
    return _meant([near]) if likeness >= SIBLING else _all(known)


def of_object(field: str) -> str:
    """For a field that needs an object, or a word for one: how it is written."""
    name = field.rpartition(".")[2].partition("[")[0]
    return f"; for example `{name}: {EXAMPLES[name]}`" if name in EXAMPLES else ""


def of_source(path: str) -> str:
    """For a training or held-out file that is named by `path`, where that is no full path: what to write."""
    if "://" in path:
        return "addresses are not read: download the file, and upload it (`eft files upload`, `POST /files`)"
    words = (
        "give the full path, from `/` on, of a file on the server. Upload a file of your own first: `eft submit` does "
    )
    words += "that with a job file, `client.upload` in Python, `POST /files` over HTTP"
    if _HUB_ID.fullmatch(path):
        words += ". A data set of the Hugging Face hub is `{type: hub, id: OWNER/NAME}`"
    return words


@cache
def leaves(root: type[BaseModel]) -> dict[str, list[str]]:
    """Every field's name and where it stands, the nearest to the root first and no others than those so near."""
    found: dict[str, list[str]] = {}
    level: list[tuple[str, type[BaseModel]]] = [("", root)]
    seen: set[type[BaseModel]] = set()
    while level:
        here: dict[str, list[str]] = {}
        below: list[tuple[str, type[BaseModel]]] = []
        for path, model in level:
            for name, field in model.model_fields.items():
                if name == "type":
                    continue
                at = f"{path}.{name}" if path else name
                if at not in here.setdefault(name, []):
                    here[name].append(at)
                below += [(at, part) for part in models_in(field.rebuild_annotation())]
        found = here | found
        seen |= {model for _, model in level}
        level = [(path, model) for path, model in below if model not in seen]
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's annotation names, arm by arm."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if get_origin(annotation) is Annotated:
        return models_in(get_args(annotation)[0])
    return [found for arg in get_args(annotation) for found in models_in(arg)]


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _from(place: str, target: str) -> str:
    """A target of the table of aliases, or a path, as it is written inside the object at `place`."""
    path, _, value = target.partition(" = ")
    inside = path.removeprefix(f"{place}.") if place else path
    return f"{inside}: {value}" if value else inside


def _nearest(word: str, options: Iterable[str]) -> tuple[str, float]:
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.0)
    return (close[0], difflib.SequenceMatcher(None, close[0], word).ratio()) if close else ("", 0.0)


def _meant(paths: list[str]) -> str:
    shown = [f"`{path}`" for path in paths[:SHOWN]]
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
    return f"; did you mean {words}?"


def _all(known: list[str]) -> str:
    return f"; known here: {', '.join(f'`{option}`' for option in known)}" if known else ""
