"""docker-compose.yml as it is written, and as compose reads it with an empty .env."""

from __future__ import annotations

import re
from typing import Any

import yaml

from core import HOME

PATH = HOME / "docker-compose.yml"
TEXT = PATH.read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
INTERPOLATED = re.compile(r"(?<!\$)\$\{(\w+)(:?[-?+][^}]*)?\}")
"""A variable, and what stands for it where it is not set."""


def default(text: str) -> str:
    """`text` with the defaults of its variables put in."""
    return INTERPOLATED.sub(lambda match: (match[2] or ":-").lstrip(":")[1:], text)
