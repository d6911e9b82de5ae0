"""What `/v1` says."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

_USAGE = {"prompt_tokens": 38, "completion_tokens": 9, "total_tokens": 47}
_HEAD: dict[str, Any] = {"created": 1_795_000_000, "model": "voice-intents", "system_fingerprint": None}
CHAT: dict[str, Any] = {
    "id": "chatcmpl-01kar3v8x5m2h6n9qst4wyz0bc",
    "object": "chat.completion",
    **_HEAD,
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "light_on kitchen", "refusal": None},
            "logprobs": None,
        }
    ],
    "usage": _USAGE,
}
TEXT: dict[str, Any] = {
    "id": "cmpl-01kar3v8x5m2h6n9qst4wyz0bc",
    "object": "text_completion",
    **_HEAD,
    "choices": [{"index": 0, "finish_reason": "length", "text": " on", "logprobs": None}],
    "usage": _USAGE,
}
MODEL: dict[str, Any] = {"id": "voice-intents", "object": "model", "created": 1_795_000_000, "owned_by": "ada"}


class _Completion(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[dict[str, Any]]
    usage: dict[str, int] | None


class ChatCompletion(_Completion):
    """An answer to a conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [CHAT]})


class TextCompletion(_Completion):
    """A text that was continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [TEXT]})


class ServedView(BaseModel):
    """A model that can be asked."""

    model_config = ConfigDict(json_schema_extra={"examples": [MODEL]})
    id: str
    object: str
    created: int
    owned_by: str


class ServedList(BaseModel):
    """The newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"object": "list", "data": [MODEL]}]})
    object: str
    data: list[ServedView]
