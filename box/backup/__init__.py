"""Backups of an installation: database and data root, consistent, incremental, checked (docs/operations.md)."""
