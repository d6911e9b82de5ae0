"""The HTTP client of eft: `Client` and `AsyncClient`, what they answer with, and what they raise."""

from typing import TYPE_CHECKING, Any

from eft.errors import ApiError, DownloadError, EftClientError, NotEft, Unreachable
from eft.types import Artifact, Event, File, Job, LogChunk, Node, Pipeline, PipelineStep, Snapshot, Sweep
from eft.version import VERSION

if TYPE_CHECKING:
    from eft.aio.client import AsyncClient
    from eft.sync.client import Client

__version__ = VERSION

__all__ = [
    "ApiError",
    "Artifact",
    "AsyncClient",
    "Client",
    "DownloadError",
    "EftClientError",
    "Event",
    "File",
    "Job",
    "LogChunk",
    "Node",
    "NotEft",
    "Pipeline",
    "PipelineStep",
    "Snapshot",
    "Sweep",
    "Unreachable",
]


def __getattr__(name: str) -> Any:
    # Either brings an HTTP library, which takes longer to import than a shell's completion may take.
    match name:
        case "Client":
            from eft.sync.client import Client

            return Client
        case "AsyncClient":
            from eft.aio.client import AsyncClient

            return AsyncClient
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
