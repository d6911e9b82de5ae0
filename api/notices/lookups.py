"""Looking up a webhook's host when it is made: a courtesy, since sending looks again and decides.

So it may hold up nobody. Name servers of strangers can be as slow as they like; look-ups have their own few threads,
a limit of time, and a project has one of them at most. Without room, or an answer in time, the webhook is taken
unchecked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from api.errors import BadRequest
from core.base.addresses import HttpTarget, Lookup, NotAllowed, parse, resolve

AT_ONCE = 2
SECONDS = 3.0


class Lookups:
    """Those of one API process."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        """Projects whose look-up has not come back, whether or not anybody still waits for it."""

    async def check(self, project_id: str, url: str, allow: Sequence[str]) -> None:
        """Tell at once what sending would refuse each time. Raises BadRequest. A name that cannot be looked up now may
        be there later."""
        try:
            target = parse(url)
            if _is_address(target.host):
                resolve(target, allow)
                return
        except NotAllowed as error:
            raise _refused(error) from error
        except (OSError, UnicodeError):
            return
        with self._lock:
            if project_id in self._busy or len(self._busy) >= AT_ONCE:
                return
            self._busy.add(project_id)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[NotAllowed | None] = loop.create_future()
        # getaddrinfo(3) cannot be interrupted; a daemon thread keeps no process from ending.
        work = threading.Thread(target=self._look, args=(project_id, target, allow, loop, found), daemon=True)
        work.start()
        try:
            refusal = await asyncio.wait_for(found, SECONDS)
        except TimeoutError:
            return
        if refusal is not None:
            raise _refused(refusal)

    def _look(
        self,
        project_id: str,
        target: HttpTarget,
        allow: Sequence[str],
        loop: asyncio.AbstractEventLoop,
        found: asyncio.Future[NotAllowed | None],
    ) -> None:
        refusal: NotAllowed | None = None
        try:
            resolve(target, allow, self._lookup)
        except NotAllowed as error:
            refusal = error
        except (OSError, UnicodeError):
            pass  # there is no such name now
        finally:
            with self._lock:
                self._busy.discard(project_id)

        def tell() -> None:
            if not found.done():
                found.set_result(refusal)

        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refused(error: NotAllowed) -> BadRequest:
    return BadRequest(f"url: {error}", field="url", code="address_not_allowed")
