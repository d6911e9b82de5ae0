"""Answers and errors in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response

from api.context import request_id
from api.http.errors import ErrorResponse

NEXT_TOKEN = 64
"""Most bytes of a token's text that are told."""


def error_body(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    match status:
        case 401:
            kind = "authentication_error"
        case 403:
            kind = "permission_error"
        case 404:
            kind = "not_found_error"
        case 429:
            kind = "rate_limit_error"
        case _:
            kind = "server_error" if status >= 500 else "invalid_request_error"
    told = {"message": error["message"], "type": kind, "param": error.get("field"), "code": error["code"]}
    return {"error": told | {"field": error.get("field"), "request_id": request_id.get()}}


def render(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    """The errors of `/v1`. A wrong body is a 400 there."""
    status = HTTPStatus.BAD_REQUEST if status == HTTPStatus.UNPROCESSABLE_ENTITY else status
    return ErrorResponse(error_body(status, error), status, headers=dict(headers or {}))


@dataclass
class Answer:
    """An answer as it grows. `chat`: of a conversation; else a continued text."""

    id: str
    model: str
    created: int
    chat: bool
    logprobs: bool
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, int] | None = None

    def add(self, news: Mapping[str, Any]) -> None:
        """Take what has come."""
        for piece in news.get("pieces", ()):
            choice = self.choices.setdefault(piece["index"], {"text": "", "logprobs": [], "finish_reason": None})
            choice["text"] += piece["text"]
            choice["logprobs"] += [piece["logprobs"]] if "logprobs" in piece else []
            choice["finish_reason"] = piece.get("finish_reason", choice["finish_reason"])
        if (done := news.get("done")) is not None:
            self.usage = {**done, "total_tokens": done["prompt_tokens"] + done["completion_tokens"]}

    def whole(self) -> dict[str, Any]:
        """The reply to a request without a stream."""
        choices = []
        for index, choice in sorted(self.choices.items()):
            told = {"index": index, "finish_reason": choice["finish_reason"]}
            logprobs = self._logprobs(choice["logprobs"]) if self.logprobs else None
            if self.chat:
                message = {"role": "assistant", "content": choice["text"], "refusal": None}
                choices.append(told | {"message": message, "logprobs": logprobs})
            else:
                choices.append(told | {"text": choice["text"], "logprobs": logprobs})
        return self._head("chat.completion" if self.chat else "text_completion") | {
            "choices": choices,
            "usage": self.usage,
        }

    def chunks(self, news: Mapping[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Parts of a stream that what has come makes; `add` takes it too."""
        for piece in news.get("pieces", ()):
            index = piece["index"]
            first = index not in self.choices
            logprobs = self._logprobs([piece["logprobs"]]) if self.logprobs and "logprobs" in piece else None
            told = {"index": index, "logprobs": logprobs, "finish_reason": piece.get("finish_reason")}
            self.add({"pieces": [piece]})
            if self.chat:
                delta = {"content": piece["text"]} if piece["text"] or first else {}
                told["delta"] = {"role": "assistant", **delta} if first else delta
            else:
                told["text"] = piece["text"]
            yield self._chunk([told], with_usage=with_usage)
        if "done" in news:
            self.add({"done": news["done"]})
            if with_usage:
                yield self._chunk([], with_usage=True) | {"usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]], *, with_usage: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": choices} | ({"usage": None} if with_usage else {})

    def _head(self, kind: str) -> dict[str, Any]:
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return named | {"system_fingerprint": None}

    def _logprobs(self, told: list[dict[str, Any]]) -> dict[str, Any]:
        if self.chat:
            content = [_token(one) | {"top_logprobs": [_token(top) for top in one["top"]]} for one in told]
            return {"content": content, "refusal": None}
        offsets, at = [], 0
        for one in told:
            offsets.append(at)
            at += len(one["token"])
        return {
            "tokens": [one["token"] for one in told],
            "token_logprobs": [one["logprob"] for one in told],
            "top_logprobs": [
                None if one["top"] is None else {top["token"]: top["logprob"] for top in one["top"]} for one in told
            ],
            "text_offset": offsets,
        }


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": one["token"], "logprob": one["logprob"], "bytes": list(one["token"].encode()[:NEXT_TOKEN])}
