"""What a program in the sandbox is: a function of a user's source over given arguments, or a script.

It runs behind all walls, in a process that ends with it.
"""

from __future__ import annotations

import inspect
import io
import json
import linecache
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

FILE = "<function>"
"""Name of the user's source in tracebacks."""
MOST_FRAMES = 20


def answer(request: Mapping[str, Any]) -> bytes:
    """Run it, and describe how it went as JSON: `value`, or `error`."""
    random.seed(0)
    try:
        match request["kind"]:
            case "function":
                found: dict[str, Any] = {"value": _function(request)}
            case _:
                found = {"value": _script(request)}
        return json.dumps(found | {"seal": request["seal"]}, default=_plain).encode()
    except BaseException as error:
        return json.dumps({"error": _described(error), "seal": request["seal"]}).encode()


def _function(request: Mapping[str, Any]) -> Any:
    module = _module("reward", request["source"])
    exec(compile(request["source"], FILE, "exec"), module.__dict__)  # noqa: S102 - what the sandbox is for
    name = request["function"]
    called = getattr(module, name, None)
    if not callable(called):
        raise LookupError(f"the source defines no function `{name}`")
    return called(**_taken(called, request["arguments"]))


def _script(request: Mapping[str, Any]) -> bool:
    """Run a source from top to bottom; False where it ended itself by SystemExit."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(request.get("stdin", "").encode()), encoding="utf-8")
    module = _module("__main__", request["source"])
    try:
        exec(compile(request["source"], FILE, "exec"), module.__dict__)  # noqa: S102
    except SystemExit:
        return False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return True


def _module(name: str, source: str) -> ModuleType:
    """A fresh module; nothing of ours is left to import."""
    for ours in [one for one in sys.modules if one == "core" or one.startswith("core.")]:
        del sys.modules[ours]
    module = ModuleType(name)
    sys.modules[name] = module
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    return module


def _taken(called: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for."""
    parameters = inspect.signature(called).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(arguments)
    return {one.name: arguments[one.name] for one in parameters if one.name in arguments}


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's."""
    for name in ("tolist", "item"):
        if callable(found := getattr(value, name, None)):
            return found()
    raise TypeError(f"a result of type {type(value).__name__} cannot be sent as JSON")


def _described(error: BaseException) -> dict[str, str]:
    try:
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == FILE]
        where = "".join(traceback.format_list(frames[-MOST_FRAMES:]))
        return {"type": type(error).__name__, "message": str(error)[:2000], "traceback": where[:8000]}
    except Exception:  # an exception of the user's that cannot even be shown
        return {"type": "Exception", "message": "an error that cannot be shown", "traceback": ""}


def write(result: bytes, to: int) -> None:
    view = memoryview(result)
    while view:
        view = view[os.write(to, view) :]
