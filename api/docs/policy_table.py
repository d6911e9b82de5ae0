"""The table of routes in docs/security.md: `python -m api.docs.policy_table` writes it again from what the routes
state."""

from __future__ import annotations

import argparse
import sys
import tempfile

from api.app import create_app
from core import HOME
from core.settings import Settings

PAGE = HOME / "docs" / "security.md"
BEGIN, END = "<!-- routes: written by `python -m api.docs.policy_table` -->", "<!-- end of routes -->"


def table() -> str:
    """One row for each set of routes that ask for the same."""
    with tempfile.TemporaryDirectory() as folder:
        policies = create_app(Settings(data=folder)).state.policies
    rows: dict[str, dict[str, list[str]]] = {}
    for (method, path), policy in sorted(policies.items(), key=lambda item: item[0][1]):
        if method != "HEAD":
            rows.setdefault(policy.words(), {}).setdefault(path, []).append(method)
    lines = ["| needs | routes |", "|---|---|"]
    for words in sorted(rows):
        routes = ", ".join(f"`{'/'.join(sorted(methods))} {path}`" for path, methods in rows[words].items())
        lines.append(f"| {words} | {routes} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m api.docs.policy_table", description=f"Write the table of {PAGE.name}."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when it is stale")
    given = parser.parse_args()
    old = PAGE.read_text()
    new = page(old)
    if given.check:
        sys.exit(0 if old == new else f"{PAGE} is stale: run `python -m api.docs.policy_table`")
    PAGE.write_text(new)
