"""What all tables stand on."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Id = String(40)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON(none_as_null=True), list[Any]: JSON(none_as_null=True)}  # noqa: RUF012


class Owned:
    """Columns that name a row's owner and project. Only the project sees the row."""

    owner_id: Mapped[str] = mapped_column(Id, ForeignKey("users.id"))
    project_id: Mapped[str] = mapped_column(Id, ForeignKey("projects.id"))
