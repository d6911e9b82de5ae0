"""From a row's object to the row, by its format."""

from __future__ import annotations

from typing import Any, assert_never

from core.data.faults import Faults
from core.data.formats.chat import read_messages
from core.data.formats.judged import read_kto, read_preference, read_prompt
from core.data.formats.plain import read_instruction, read_prompt_completion, read_text
from core.data.formats.sharegpt import read_sharegpt
from core.data.formats.stepwise import read_stepwise
from core.data.rows import Row
from core.spec.axes.data import RowFormat


def read(value: dict[str, Any], row_format: RowFormat, faults: Faults) -> Row | None:
    """The row; what is wrong with it is added to `faults`, and then the row is not to be used. All keys of the format
    are there (`settle.missing`)."""
    match row_format:
        case "messages":
            return read_messages(value, faults)
        case "sharegpt":
            return read_sharegpt(value, faults)
        case "instruction":
            return read_instruction(value, faults)
        case "prompt_completion":
            return read_prompt_completion(value, faults)
        case "text":
            return read_text(value, faults)
        case "preference":
            return read_preference(value, faults)
        case "kto":
            return read_kto(value, faults)
        case "stepwise":
            return read_stepwise(value, faults)
        case "prompt":
            return read_prompt(value, faults)
        case _ as never:
            assert_never(never)
