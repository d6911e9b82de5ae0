"""Errors a user may see: a stable code, a message that says what to do, the field's path.

The API renders every one of them in one shape (`api/http/errors.py`), the command line prints the same text.
Anything that is not an EftError is a defect of ours and is shown as `internal` with a request id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with one place of the input."""

    code: str
    message: str
    field: str | None = None
    """Dotted path, e.g. `method.r`; for a data file `line 12: messages[0].role`."""
    line: int | None = None
    """Line (or row) of a data file; the first one, where several have it."""
    times: int | None = None
    """How many lines of a data file have it, where several do."""

    def as_dict(self) -> dict[str, Any]:
        """Without `line` and `times` where there are none."""
        optional = ("line", "times")
        return {key: value for key, value in asdict(self).items() if key not in optional or value is not None}


def beyond(count: int, shown: Iterable[Fault]) -> int:
    """How many of `count` faults are not among those that are shown."""
    return count - sum(fault.times or 1 for fault in shown)


def plainly(message: str) -> str:
    """A message of pydantic's, without the name of the exception in front, to stand behind a field's name."""
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:]


class EftError(Exception):
    """Base of all errors meant for a user."""

    code = "error"
    status = 400

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        faults: tuple[Fault, ...] = (),
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.faults = faults
        if code is not None:
            self.code = code

    def as_dict(self) -> dict[str, Any]:
        """The one error shape, less the request id that only the API knows."""
        body: dict[str, Any] = {"code": self.code, "message": self.message, "field": self.field}
        if self.faults:
            body["faults"] = [fault.as_dict() for fault in self.faults]
        return body


class SpecError(EftError):
    """The job spec is wrong: unknown field, bad value, or a combination that cannot run."""

    code = "invalid_spec"
    status = 422


class DataError(EftError):
    """A data file is wrong; the faults name line, field and what was expected."""

    code = "invalid_data"
    status = 422


class ModelError(EftError):
    """The model cannot be found, may not be used, or cannot be read."""

    code = "model_unavailable"
    status = 422


class NotFound(EftError):
    """It does not exist, or belongs to another project: the answer is the same."""

    code = "not_found"
    status = 404


class Unauthorized(EftError):
    code = "invalid_api_key"
    status = 401


class Forbidden(EftError):
    """Known, but not allowed to; the message names what is missing and who can give it."""

    code = "forbidden"
    status = 403


class Conflict(EftError):
    """The object is not in a state that allows this."""

    code = "conflict"
    status = 409


class TooLarge(EftError):
    code = "too_large"
    status = 413


class NoSpace(EftError):
    """`needs_bytes` is what must be free for it, where that is known."""

    code = "no_space"
    status = 507

    def __init__(self, message: str, *, field: str | None = None, needs_bytes: int | None = None) -> None:
        super().__init__(message, field=field)
        self.needs_bytes = needs_bytes
