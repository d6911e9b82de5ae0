"""The client: one method a verb of the HTTP API."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from eft.aio.access import AsyncAccess
from eft.aio.checkpoints import AsyncCheckpoints
from eft.aio.events import AsyncEvents
from eft.aio.files import AsyncFiles
from eft.aio.models import AsyncModels
from eft.aio.nodes import AsyncNodes
from eft.aio.pipelines import AsyncPipelines
from eft.aio.queue import AsyncQueue
from eft.aio.sessions import AsyncSessions, AsyncTrainingSession
from eft.aio.sweeps import AsyncSweeps
from eft.aio.transport import AsyncTransport
from eft.aio.webhooks import AsyncWebhooks
from eft.config import load_config
from eft.version import VERSION


class AsyncClient(AsyncEvents, AsyncFiles, AsyncNodes):
    """Talks to one eft server: `async with AsyncClient() as client: await client.submit({...})`.

    Address and key come from the arguments, EFT_URL and EFT_API_KEY, or ~/.config/eft/config.toml. Every method raises
    ApiError when the server refuses, Unreachable when it does not answer for `patience` seconds; calls that may be sent
    twice (reading ones, submits, which carry an idempotency key, and others of which the second changes nothing) are
    sent again meanwhile. `timeout`: seconds of silence after which one try counts as lost.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, timeout: float = 30.0, patience: float = 5.0
    ) -> None:
        self.config = load_config(url, api_key)
        agent = f"eft-client/{VERSION}"
        self._transport = AsyncTransport(self.config, timeout=timeout, patience=patience, user_agent=agent)
        self.access = AsyncAccess(self._transport)
        """Users, projects, keys, the audit."""
        self.webhooks = AsyncWebhooks(self._transport)
        self.pipelines = AsyncPipelines(self._transport)
        """Jobs one after another."""
        self.sessions = AsyncSessions(self._transport)
        """Training loops that run elsewhere; `session` opens one."""
        self.sweeps = AsyncSweeps(self._transport)
        """One job with other values, run by run."""
        self.models = AsyncModels(self._transport)
        """What jobs have made."""
        self.checkpoints = AsyncCheckpoints(self._transport)
        """States of a job's training."""
        self.queue = AsyncQueue(self._transport)
        """The order, GPUs and holds, usage and quotas."""

    def session(
        self, *, model: Any, method: dict[str, Any] | str | None = "lora", patience: float = 300.0, **spec: Any
    ) -> AsyncTrainingSession:
        """A session over `model` with one adapter (None: none yet; `full`: the model itself is trained), to be entered:
        `async with client.session(…) as s`. `spec`: further fields, such as `quantization` and `resources`. It survives
        a server that is away for at most `patience` seconds."""
        written = {"type": method} if isinstance(method, str) else method
        if written is not None and written.get("type") == "full":
            spec["method"] = written
        return AsyncTrainingSession(self._transport, {"model": model, **spec}, written, patience)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()
