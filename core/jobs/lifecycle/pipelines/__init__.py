"""Pipelines: rows of steps, each of which becomes an ordinary job when the one before it has succeeded."""
