"""The settings are read, and each fault of the environment is put into words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from core.settings.checked import Settings


class SettingsError(Exception):
    """The environment cannot be used as it is: one line a fault, each with the variable's name."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_settings() -> Settings:
    """The settings as the environment has them now. Raises SettingsError."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError(tuple(_words(error))) from None


def _words(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        context = fault.get("ctx", {})
        match fault["type"]:
            case "value_error":
                words = str(context["error"])
            case "int_parsing" | "int_type" | "int_from_float":
                words = "is not a whole number"
            case "int_parsing_size":
                words = "is larger than any accepted number"
            case "float_parsing" | "float_type":
                words = "is not a number"
            case "finite_number":
                words = "is not a finite number"
            case "bool_parsing" | "bool_type":
                words = "is neither `true` nor `false`"
            case "greater_than_equal":
                words = f"must be at least {context['ge']:,}"
            case "greater_than":
                words = f"must be more than {context['gt']:,}"
            case "less_than_equal":
                words = f"must be at most {context['le']:,}"
            case "string_too_short":
                words = "must not be empty"
            case "string_unicode" | "path_type":
                words = "is not text in UTF-8"
            case _:
                words = fault["msg"][:1].lower() + fault["msg"][1:]
        if not fault["loc"]:  # of several settings, which the words name
            yield words
            continue
        variable = f"EFT_{str(fault['loc'][0]).upper()}"
        name = f"{variable}_FILE" if os.environ.get(f"{variable}_FILE") else variable
        yield f"{name}: {_shown(str(fault['loc'][0]), fault.get('input'), words)}{words}"


def _shown(field: str, value: object, words: str) -> str:
    """The value before the words that say what it is not; never a secret's."""
    if not words.startswith("is ") or not Settings.model_fields[field].repr:
        return ""
    text = repr(str(value))
    return (text if len(text) <= 60 else f"{text[:59]}…") + " "


def make_root(here: Settings) -> Path:
    """The data root, or the folder that this box works in, made where it is not there. Raises SettingsError."""
    variable, root = "EFT_WORK" if here.is_remote else "EFT_DATA", here.root
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        what = "is a file, not a folder" if root.is_file() else f"cannot be made: {error.strerror}"
        raise SettingsError((f"{variable}: {root} {what}",)) from None
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError((f"{variable}: {root} cannot be written to by user {os.geteuid()}",))
    return root


@cache
def settings() -> Settings:
    """The settings of this process, read once. Raises SettingsError."""
    return read_settings()
