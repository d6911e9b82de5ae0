"""What pages know: the answers of the API's own routes, each asked for and refused as that route would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from api.auth.permit import forbidden, lacks
from api.auth.policy import Policy, Principal, policy_of
from api.deps import AppState
from core.errors import Forbidden


class Views:
    """The routes of the API, for one principal. A page is no way around a policy: each call is held to its route's."""

    def __init__(self, request: Request, principal: Principal) -> None:
        self.app: AppState = request.app.state.eft
        self.principal = principal
        self._policies: dict[Any, Policy] = request.app.state.__dict__.setdefault(
            "policies_of_endpoints",
            {route.endpoint: policy_of(route) for route in request.app.state.routes if isinstance(route, APIRoute)},
        )

    def ask(self, route: Callable[..., Response], /, **parameters: Any) -> Any:
        """The JSON that the GET route with this function answers, or its text. Raises what the route raises, and
        Forbidden."""
        policy = self._policies[route]
        if (missing := lacks(self.principal, policy)) is not None:
            with self.app.database.read() as session:
                raise forbidden(session, self.principal, missing)
        reply = route(principal=self.principal, app=self.app, **parameters)
        text = bytes(reply.body).decode()
        return json.loads(text) if reply.headers["content-type"].startswith("application/json") else text

    def can(self, route: Callable[..., Any], /) -> bool:
        """Whether the policy of this route, of any method, lets the principal pass: whether to show what calls it."""
        return lacks(self.principal, self._policies[route]) is None

    def may(self, route: Callable[..., Response], /, **parameters: Any) -> Any:
        """As `ask`; None where the route is not for this principal."""
        try:
            return self.ask(route, **parameters)
        except Forbidden:
            return None
