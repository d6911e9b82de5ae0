# Written by client/unasync.py from ../aio/client.py: change that one.
"""The client: one method a verb of the HTTP API."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from eft.config import load_config
from eft.sync.access import Access
from eft.sync.checkpoints import Checkpoints
from eft.sync.events import Events
from eft.sync.files import Files
from eft.sync.models import Models
from eft.sync.nodes import Nodes
from eft.sync.pipelines import Pipelines
from eft.sync.queue import Queue
from eft.sync.sessions import Sessions, TrainingSession
from eft.sync.sweeps import Sweeps
from eft.sync.transport import Transport
from eft.sync.webhooks import Webhooks
from eft.version import VERSION


class Client(Events, Files, Nodes):
    """Talks to one eft server: `with Client() as client: client.submit({...})`.

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
        self._transport = Transport(self.config, timeout=timeout, patience=patience, user_agent=agent)
        self.access = Access(self._transport)
        """Users, projects, keys, the audit."""
        self.webhooks = Webhooks(self._transport)
        self.pipelines = Pipelines(self._transport)
        """Jobs one after another."""
        self.sessions = Sessions(self._transport)
        """Training loops that run elsewhere; `session` opens one."""
        self.sweeps = Sweeps(self._transport)
        """One job with other values, run by run."""
        self.models = Models(self._transport)
        """What jobs have made."""
        self.checkpoints = Checkpoints(self._transport)
        """States of a job's training."""
        self.queue = Queue(self._transport)
        """The order, GPUs and holds, usage and quotas."""

    def session(
        self, *, model: Any, method: dict[str, Any] | str | None = "lora", patience: float = 300.0, **spec: Any
    ) -> TrainingSession:
        """A session over `model` with one adapter (None: none yet; `full`: the model itself is trained), to be entered:
        `with client.session(…) as s`. `spec`: further fields, such as `quantization` and `resources`. It survives
        a server that is away for at most `patience` seconds."""
        written = {"type": method} if isinstance(method, str) else method
        if written is not None and written.get("type") == "full":
            spec["method"] = written
        return TrainingSession(self._transport, {"model": model, **spec}, written, patience)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()
