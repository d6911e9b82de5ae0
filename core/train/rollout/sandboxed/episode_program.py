"""The program that calls environments of users. It is run by its source, in the sandbox, without modules of ours."""

from __future__ import annotations

import inspect
import random
import traceback
from types import CodeType, ModuleType
from typing import Any

FILE = "<environment>"


def respond(source: str, function: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the function in the source answers to each call, {value}, or what went wrong, {error}. Each call finds a
    module and random numbers that no other call has touched."""
    code = compile(source, FILE, "exec")
    return [_respond(code, function, arguments) for arguments in calls]


def _respond(code: CodeType, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    random.seed(0)
    try:
        module = ModuleType("environment")
        exec(code, module.__dict__)  # noqa: S102 - what the sandbox is for
        called = getattr(module, function, None)
        if not callable(called):
            return {"error": f"the source defines no function `{function}`"}
        parameters = inspect.signature(called).parameters.values()
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            arguments = {one.name: arguments[one.name] for one in parameters if one.name in arguments}
        return {"value": called(**arguments)}
    except Exception as error:
        places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
        where = f" (line {places[-1]} of the source)" if places else ""
        return {"error": f"{type(error).__name__}: {str(error)[:1000]}{where}"}
