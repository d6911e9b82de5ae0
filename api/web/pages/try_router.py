"""The page that asks models beside each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import StringConstraints

from api.auth.policy import Reading
from api.deps import authorise
from api.serving.router import list_served
from api.web import render
from api.web.views import Views

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
MOST = 4
ModelName = Annotated[str, StringConstraints(max_length=400, pattern=r"^[^\x00]*$")]


@router.get("/ui/try")
def try_page(
    request: Request, principal: Reading, model: Annotated[list[ModelName] | None, Query(max_length=MOST)] = None
) -> Response:
    """Up to four models, checkpoints or bases, which answer one prompt with one seed."""
    listed = [one["id"] for one in Views(request, principal).ask(list_served)["data"]]
    chosen = list(dict.fromkeys(model or listed[:1]))
    empty = [""] * (MOST - len(chosen))
    writes = render.may_write(principal)
    return render.page(request, "try.html", listed=listed, chosen=chosen + empty, writes=writes)
