"""What a session trains: adapters on a base that stays, or the model itself."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from core.spec.axes.method import Full, LoRA
from core.spec.base import by_type, short_form


def _adapter(value: Any) -> Any:
    """Sessions had adapters alone once, and requests without a type."""
    return {"type": "lora", **value} if isinstance(value, dict) else value


SessionMethod = Annotated[LoRA | Full, Field(discriminator="type"), short_form(by_type), BeforeValidator(_adapter)]
