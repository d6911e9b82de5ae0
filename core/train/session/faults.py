"""What a caller did wrong: it is answered, and the session goes on as if the operation had not been asked."""

from __future__ import annotations

from core.errors import EftError


class BadOperation(EftError):
    """An operation that cannot be computed as it was asked."""

    code = "invalid_operation"
    status = 422


class NoSuchModel(BadOperation):
    """The session has no adapter of that name."""

    code = "session_model_not_found"
