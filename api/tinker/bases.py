"""Names of base models: a folder below EFT_MODEL_ROOTS by its path from there, and whatever else a session takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN = "tinker:base_model"
"""Key of a session's metadata: the name by which the SDK asked for its model, and finds the tokenizer."""
GPUS = "eft:gpus"
"""Key of a model's metadata: the number of GPUs that its session takes."""
MOST = 1000
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_PART}(/{_PART}){{0,2}}")


@dataclass(frozen=True, slots=True)
class NamedBase:
    model: Any
    """As a session takes it."""
    shown: str


def named(roots: Iterable[Path], name: str) -> NamedBase:
    """The model of a name. `org/model:peft:262144` is `org/model`: a length of context changes nothing here."""
    plain = name.partition(":")[0]
    if _NAME.fullmatch(plain):
        for root in roots:
            if (root / plain / "config.json").is_file():
                return NamedBase(str(root / plain), name)
    return NamedBase(plain, name)


def of_session(spec: Mapping[str, Any]) -> NamedBase:
    """The model of a session that is there."""
    model = spec["model"]
    return NamedBase(model, str(spec.get("metadata", {}).get(SHOWN) or model.get("path") or model.get("id")))


def known(roots: Iterable[Path]) -> list[str]:
    """Names of the models below the roots."""
    found = dict[str, None]()
    for root in roots:
        for pattern in ("*/config.json", "*/*/config.json"):
            for path in sorted(root.glob(pattern)):
                name = path.parent.relative_to(root).as_posix()
                if _NAME.fullmatch(name):
                    found[name] = None
    return [*found][:MOST]
