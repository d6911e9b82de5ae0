"""What can go wrong, and the exit code each of it becomes: the one table that `eft --help` and the README show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the `eft` command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CANCELLED = 3
    UNAVAILABLE = 4
    DENIED = 5
    NOT_FOUND = 6
    LOCAL = 7
    CONDITION = 8
    TIMEOUT = 124
    """As timeout(1) ends."""
    INTERRUPTED = 130


EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "success; a job that was waited for has succeeded",
    ExitCode.FAILED: "the job that was waited for has failed",
    ExitCode.USAGE: "invalid usage or input: options, job file, data, or a request that the server rejects (4xx)",
    ExitCode.CANCELLED: "the job that was waited for was cancelled",
    ExitCode.UNAVAILABLE: "the server cannot be reached or has failed (5xx)",
    ExitCode.DENIED: "the API key is missing, wrong, or not allowed to do this (401, 403)",
    ExitCode.NOT_FOUND: "no such job, file or artifact in this project (404)",
    ExitCode.LOCAL: "a local problem: a file cannot be read or written, a download is damaged",
    ExitCode.CONDITION: "the job has succeeded and a condition of --fail-if holds",
    ExitCode.TIMEOUT: "the wait took longer than --timeout; the job continues",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); a submitted job continues",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with one place of the input, as the server names it."""

    code: str
    message: str
    field: str | None = None


class EftClientError(Exception):
    """Base of what this package raises; `exit_code` is what the command ends with."""

    exit_code = ExitCode.LOCAL
    code = "client_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "field": self.field}


class UsageFault(EftClientError):
    """The job file or an option is wrong; nothing was sent."""

    exit_code = ExitCode.USAGE
    code = "usage"


class ConfigError(EftClientError):
    """The client's own settings cannot be used."""

    exit_code = ExitCode.USAGE
    code = "config"


class Unreachable(EftClientError):
    """The server did not answer, after all retries."""

    exit_code = ExitCode.UNAVAILABLE
    code = "unreachable"


class NotEft(EftClientError):
    """Something answered, and it is not an eft server."""

    exit_code = ExitCode.UNAVAILABLE
    code = "not_eft"


class OperationFailed(EftClientError):
    """An operation of a session could not be computed; nothing has changed on the server."""

    def __init__(self, message: str, code: str, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.code = code


class DownloadError(EftClientError):
    """A download is damaged, or its path is not one that may be written."""

    code = "download"


class LocalError(EftClientError):
    """A local file cannot be read or written."""

    code = "local"


class ApiError(EftClientError):
    """The server's answer was an error: its code, message, field, faults and request id."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        field: str | None = None,
        faults: tuple[Fault, ...] = (),
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.code = code
        self.faults = faults
        self.request_id = request_id
        self.retry_after = retry_after
        self.exit_code = _exit_code(status)

    def as_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {"code": self.code, "message": self.message, "field": self.field}
        if self.faults:
            body["faults"] = [{"code": f.code, "message": f.message, "field": f.field} for f in self.faults]
        return body | {"status": self.status, "request_id": self.request_id}


def _exit_code(status: int) -> ExitCode:
    match status:
        case 401 | 403:
            return ExitCode.DENIED
        case 404:
            return ExitCode.NOT_FOUND
        case _ if 400 <= status < 500:
            return ExitCode.USAGE
        case _:
            return ExitCode.UNAVAILABLE
