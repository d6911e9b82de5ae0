"""The synchronous client: `from eft import Client`. Its asynchronous twin is `eft.AsyncClient`."""

from eft.sync.client import Client
from eft.types import LogChunk, Snapshot

__all__ = ["Client", "LogChunk", "Snapshot"]
