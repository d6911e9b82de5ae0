"""`/me` and `/keys`: whom a key acts for, and looking after keys."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth import keyring, schemas
from api.auth.keyring import Shown
from api.auth.policy import Knowing, MakingKeys, ReadingOrOperating
from api.deps import After, App, Limit
from api.errors import printable
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, answer
from core.errors import NotFound

router = APIRouter(tags=["access"])
NO_STORE = {"cache-control": "no-store"}

_KEY_ID = re.compile(r"key-[0-9a-z]{26}")


async def _key_id(
    key_id: Annotated[str, Path(description="Id of a key.", examples=["key-01kar3v8x5m2h6n9qst4wyz0bc"])],
) -> str:
    if not _KEY_ID.fullmatch(key_id):
        raise NotFound(f"there is no key `{printable(key_id)}`; `GET /keys` lists yours", field="key_id")
    return key_id


KeyId = Annotated[str, Depends(_key_id)]


@router.get(
    "/me", summary="Show the current key", response_model=schemas.Me, response_class=JSONResponse, responses=responses()
)
async def me(principal: Knowing) -> Response:
    """User, project and permissions of this key."""
    return JSONResponse(schemas.me_view(principal))


@router.get(
    "/keys",
    summary="List keys",
    response_model=schemas.KeyPage,
    response_class=JSONResponse,
    responses=responses(400, 404, 422),
)
def list_keys(
    principal: ReadingOrOperating,
    app: App,
    all: Annotated[bool, Query(description="Everybody's in the project; for its admins.")] = False,
    project: Annotated[
        str | None,
        Query(max_length=100, pattern=r"^[^\x00]+$", description="Of another project; for admins of the box."),
    ] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """Your keys in this project with state and last use, including revoked ones."""
    with app.database.read() as session:
        page = keyring.page(session, principal, everybody=all, project=project, after=after, limit=limit)
    following = page.items[-1].key.id if page.has_more else None
    return JSONResponse({"data": [_view(shown) for shown in page.items], "has_more": page.has_more, "next": following})


@router.post(
    "/keys",
    status_code=201,
    summary="Create a key",
    response_model=schemas.NewKeyView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.KeyWish, {"name": "ci", "scope": "write", "expires_in_days": 90}),
)
async def create_key(request: Request, principal: MakingKeys, app: App, once: Asked) -> Response:
    """The response shows the key once. It has no more permissions than the key that creates it, lives no longer, and
    is revoked with it.

    Admins of a project make keys for its members, admins of the box for any project.
    """
    wish = await read_json(request, schemas.KeyWish, app.settings.max_body_bytes)

    def make(session: Session) -> dict[str, Any]:
        key, shown = keyring.create(session, principal, wish, app.settings)
        return {**_view(shown), "key": key}

    document = wish.model_dump(mode="json")
    return await run_in_threadpool(
        answer,
        app,
        principal,
        once,
        document,
        make,
        status=201,
        headers=NO_STORE,
        secret="key",  # noqa: S106
    )


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    summary="Rotate a key",
    response_model=schemas.NewKeyView,
    response_class=JSONResponse,
    responses=responses(404, 409, 422),
)
def rotate_key(
    key_id: KeyId,
    principal: ReadingOrOperating,
    app: App,
    once: Asked,
    overlap_hours: Annotated[float, Query(ge=0, le=720, description="Hours for which the old key stays valid.")] = 24.0,
    expires_in_days: Annotated[
        float | None,
        Query(gt=0, le=36500, description="Another end than the old key's; a later one is for admins of the project."),
    ] = None,
) -> Response:
    """Create a successor with the same name, scope, rights and expiry; the response shows it once. The old key is
    valid until the end of the overlap; if it is used afterwards, the whole family of keys is revoked."""

    def make(session: Session) -> dict[str, Any]:
        key, shown = keyring.rotate(
            session, principal, key_id, overlap_hours * 3600, app.settings, expires_in_days=expires_in_days
        )
        return {**_view(shown), "key": key}

    return answer(app, principal, once, None, make, status=201, headers=NO_STORE, secret="key")  # noqa: S106


@router.delete(
    "/keys/{key_id}",
    summary="Revoke a key",
    response_model=schemas.RevokedKeyView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def revoke_key(
    key_id: KeyId,
    principal: ReadingOrOperating,
    app: App,
    alone: Annotated[bool, Query(description="Keep the keys that it created, and its successors.")] = False,
) -> Response:
    """Revoke a key immediately and permanently, with every key that it created and its successors; open event streams
    end within half a minute. Idempotent."""
    with app.database.write() as session:
        shown, others = keyring.revoke(session, principal, key_id, alone=alone)
        return JSONResponse({**_view(shown), "also_revoked": others})


def _view(shown: Shown) -> dict[str, object]:
    return schemas.key_view(shown.key, shown.user, shown.project)
