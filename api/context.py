"""What every line of a request's work may want to know: its id."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Follows the request into threads, since anyio copies the context."""
