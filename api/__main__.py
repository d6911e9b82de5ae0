"""`python -m api`: serve on the address of the settings until SIGTERM or SIGINT (api/server.py)."""

from __future__ import annotations

from core.base.collector import importing

if __name__ == "__main__":
    with importing():
        from api.server import main
        from core import command, private
    private.umask()
    command.run("eft api", main)
