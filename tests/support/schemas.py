"""What the code of the version before would trip on, found by comparing two schemas as the databases have them.

By effect and not by the operations of a migration: whatever way it took, through raw SQL or a table made anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.engine import Inspector

from core.db.engine import Database


@dataclass(frozen=True, slots=True)
class Table:
    columns: dict[str, dict[str, Any]]
    key: frozenset[str]
    unique: frozenset[tuple[frozenset[str], str]]
    """Columns and condition of what must not be there twice."""
    refers: frozenset[tuple[frozenset[str], str]]
    checks: frozenset[str]


Schema = dict[str, Table]


def read(database: Database) -> Schema:
    with database.read() as session:
        found = inspect(session.connection())
        return {name: _table(found, name) for name in found.get_table_names() if name != "alembic_version"}


def _table(found: Inspector, name: str) -> Table:
    unique = {(frozenset(filter(None, one["column_names"])), "") for one in found.get_unique_constraints(name)}
    for index in found.get_indexes(name):
        if index["unique"]:
            options = index.get("dialect_options", {})
            where = options.get("sqlite_where", options.get("postgresql_where", ""))
            unique.add((frozenset(filter(None, index["column_names"])), str(where)))
    return Table(
        {column["name"]: dict(column) for column in found.get_columns(name)},
        frozenset(found.get_pk_constraint(name)["constrained_columns"]),
        frozenset(unique),
        frozenset(
            (frozenset(key["constrained_columns"]), key["referred_table"]) for key in found.get_foreign_keys(name)
        ),
        frozenset(str(check["sqltext"]) for check in found.get_check_constraints(name)),
    )


def contractions(before: Schema, after: Schema) -> list[str]:
    """What stopped working for code that was written for `before`: its reads, its inserts, its updates."""
    faults: list[str] = []
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            faults.append(f"table {name} is gone")
            continue
        for column, was in old.columns.items():
            faults += _column(f"{name}.{column}", was, new.columns.get(column))
        for column in new.columns.keys() - old.columns.keys():
            facts = new.columns[column]
            if not facts["nullable"] and facts["default"] is None:
                faults.append(f"{name}.{column} is new, NOT NULL and has no default: inserts of older code fail")
        if not old.key <= new.key:
            faults.append(f"the primary key of {name} has lost {', '.join(sorted(old.key - new.key))}")
        for columns, where in new.unique - old.unique:
            if not any(known <= columns and its in ("", where) for known, its in old.unique | {(old.key, "")}):
                faults.append(f"{name} must be unique in {', '.join(sorted(columns))} now: older code does not know")
        for columns, other in new.refers - old.refers:
            if columns <= old.columns.keys():
                faults.append(f"{name}.{', '.join(sorted(columns))} must be in {other} now: older code does not know")
        for check in new.checks - old.checks:
            faults.append(f"{name} has a new CHECK ({check}): rows of older code may break it")
    return faults


def _column(name: str, was: dict[str, Any], now: dict[str, Any] | None) -> list[str]:
    if now is None:
        return [f"column {name} is gone, or has another name"]
    faults = []
    if str(was["type"]) != str(now["type"]):
        faults.append(f"{name} was {was['type']} and is {now['type']}")
    if was["nullable"] and not now["nullable"]:
        faults.append(f"{name} may be null no more")
    if was["default"] is not None and now["default"] is None:
        faults.append(f"{name} has lost its default, which older code may count on")
    return faults
