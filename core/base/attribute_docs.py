"""The docstrings of a model's fields: the string that stands below a field in the source.

pydantic reads them itself with `use_attribute_docstrings`, for every class when it is made: 0.3 s of CPU for each
process that imports the spec, where almost none shows them. Here they are read when somebody asks for them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class AttributeDocsModel(BaseModel):
    """A model whose JSON schema has the docstrings of its fields as their descriptions."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> dict[str, Any]:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, docs in attribute_docs(cls).items():
            alias = cls.model_fields[name].alias or name
            if alias in properties:
                properties[alias].setdefault("description", docs)
        return found


def attribute_docs(model: type[BaseModel]) -> dict[str, str]:
    """Docstrings by field, those of base classes among them. Fields without one are left out."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base.__module__ in sys.modules:
            found.update(_of_module(base.__module__).get(base.__qualname__, {}))
    return {name: docs for name, docs in found.items() if name in model.model_fields}


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Docstrings by class and attribute."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):  # a class without a source file, made at run time
        return {}
    found: dict[str, dict[str, str]] = {}
    _collect(tree.body, "", found)
    return found


def _collect(body: list[ast.stmt], prefix: str, found: dict[str, dict[str, str]]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[prefix + node.name] = _below_fields(node)
            _collect(node.body, f"{prefix}{node.name}.", found)


def _below_fields(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs
