"""What bench/api.py compares with: a bare FastAPI application, one route that inserts a row and one that reads it.

Same server settings, same kind of database with the same durability (core.db.engine), same way of running handlers
(threads); no keys, no spec, no checks. `EFT_DATABASE_URL=… EFT_PORT=… python -m bench.peer`
"""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import JSON, Column, MetaData, String, Table, insert, select

from core.db.engine import Database
from core.ids import new_id
from core.settings import settings

database = Database(settings().sqlalchemy_url)
metadata = MetaData()
rows = Table("bench_rows", metadata, Column("id", String(40), primary_key=True), Column("body", JSON))
app = FastAPI()


class Row(BaseModel):
    model: str
    data: str
    training: dict[str, Any]


@app.post("/jobs", status_code=201)
def create(row: Row) -> dict[str, Any]:
    made = {"id": new_id("row"), "body": row.model_dump()}
    with database.write() as session:
        session.execute(insert(rows).values(**made))
    return made


@app.get("/jobs/{row_id}")
def read(row_id: str) -> dict[str, Any]:
    with database.read() as session:
        found = session.execute(select(rows).where(rows.c.id == row_id)).one_or_none()
    if found is None:
        raise HTTPException(404)
    return {"id": found.id, "body": found.body}


@app.get("/healthz")
def healthz() -> dict[str, str]:
    return {"status": "ok"}


if __name__ == "__main__":
    with database.write() as session:
        metadata.create_all(session.connection())
    uvicorn.run(app, host="127.0.0.1", port=settings().port, log_config=None, access_log=False, server_header=False)
