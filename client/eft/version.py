"""The version of client and wire format; `client/pyproject.toml` reads it from here."""

VERSION = "0.1.0"
