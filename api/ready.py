"""Imported by processes that fork APIs: all that an application has before it knows its settings."""

from api import server
from api.app import make_ready

make_ready()
__all__ = ["server"]
