"""The HTTP client of eft: `Client`, what it answers with, and what it raises."""

from eft.client import Client
from eft.errors import ApiError, DownloadError, EftClientError, Unreachable
from eft.types import Artifact, Event, File, Job
from eft.version import VERSION

__version__ = VERSION


__all__ = [
    "ApiError",
    "Artifact",
    "Client",
    "DownloadError",
    "EftClientError",
    "Event",
    "File",
    "Job",
    "Unreachable",
]
