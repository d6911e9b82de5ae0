"""Tinker's protocol over sessions: its SDK runs against this service unmodified (docs/tinker.md)."""
