"""Official JSON schemas, as the wheel of check-jsonschema carries them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from jsonschema import validators
from jsonschema.protocols import Validator


def validator(schema: str) -> Validator:
    """Return the validator of `compose-spec`, `github-workflows`, `gitlab-ci`, …"""
    package = importlib.util.find_spec("check_jsonschema")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "builtin_schemas" / "vendor" / f"{schema}.json"
    read = json.loads(path.read_text())
    return validators.validator_for(read)(read)
