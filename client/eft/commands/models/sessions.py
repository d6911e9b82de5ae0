"""`eft sessions …`: training loops that run elsewhere, and the slots that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft import times
from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, age, short_id, size, status_markup

if TYPE_CHECKING:
    from eft.client import Client

app = App(no_args_is_help=True, help="Training loops of your own programs (docs/sessions.md).")

EXAMPLE = "session-01kar3v8x5m2h6n9qst4wyz0bc"
OPEN = ("queued", "preparing", "starting", "running", "parking", "parked", "closing")
SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help=f"A session: {HANDLE}.")]


@app.command("list")
@manual(
    examples=[
        ("eft sessions list", "List the project's open sessions."),
        ("eft sessions list --status parked --mine", "List your parked ones."),
    ]
)
def list_sessions(
    status: Annotated[list[str] | None, typer.Option(help="Only in this state, such as parked; repeatable.")] = None,
    mine: Annotated[bool, typer.Option("--mine", help="Only those that you have opened.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Closed and failed ones too.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the project's sessions, newest first: open ones, or those that the options name."""
    with session(as_json, url) as (client, output):
        asked = status or (() if everything else OPEN)
        found = client.sessions.all(status=asked, mine=mine, limit=limit)
        if as_json:
            output.json({"data": found})
            return
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "STATUS", "OPERATIONS", "USED", "MODEL", "NAME"):
            table.add_column(column, no_wrap=True)
        for one in found:
            numbers = (str(one["operations"]), f"{age(one['used_at'])} ago")
            words = (escape(_model(one)), escape(one["name"] or ""))
            table.add_row(short_id(one["id"], output.data), status_markup(one["status"]), *numbers, *words)
        output.table(table, "sessions")


@app.command("show")
@manual(examples=[("eft sessions show last", "Show your newest session, and what it waits for.")])
def show_session(session_id: SessionArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show a session: its state and why it is in it, its model, what it has computed and kept."""
    with session(as_json, url) as (client, output):
        found = client.sessions.get(session_id)
        if as_json:
            output.json(found)
            return
        named = f" ({escape(found['name'])})" if found["name"] else ""
        words = f": {escape(found['reason'])}" if found["reason"] else ""
        output.data.print(f"{found['id']}{named} {status_markup(found['status'])}{words}", soft_wrap=True)
        if found["failure"]:
            output.data.print(escape(str(found["failure"]["message"])), soft_wrap=True)
        rows = {
            "model": _model(found),
            "operations": f"{found['operations']}, the newest snapshot has {found['snapshot']}",
            "sent and answered": size(found["log_bytes"]),
            "opened": times.shown(found["created_at"]),
            "last used": times.shown(found["used_at"]),
            "ended": times.shown(found["finished_at"]),
        }
        for name, value in rows.items():
            if value:
                output.data.print(f"  {name:18}{escape(value)}", soft_wrap=True)


@app.command("park")
@manual(examples=[("eft sessions park last", "Free the slot of your newest session.")])
def park_session(session_id: SessionArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Park a session: it takes a snapshot and frees its slot now. Its next operation brings it back."""
    with session(as_json, url) as (client, output):
        _told(output, [client.sessions.park(session_id)])


@app.command("close")
@manual(
    examples=[
        (f"eft sessions close {EXAMPLE}", "End one. What it has saved stays."),
        ("eft sessions close --unused 2h", "End your parked ones that no program has used for two hours."),
    ]
)
def close_sessions(
    session_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[SESSION...]", help=f"Sessions: {HANDLE}.")
    ] = None,
    unused: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Your parked sessions without an operation for so long: 30m, 2h, 1d."),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End sessions and free what they hold. Weights that were not saved are lost; what was saved stays."""
    if bool(session_ids) == (unused is not None):
        raise UsageFault("name sessions to close, or give --unused DURATION")
    seconds = None if unused is None else times.seconds(unused, option="--unused")
    with session(as_json, url) as (client, output):
        chosen = session_ids if seconds is None else _unused(client, seconds)
        _told(output, [client.sessions.close(one) for one in chosen or []])


def _unused(client: Client, seconds: float) -> list[str]:
    now = datetime.now(UTC)
    return [
        one["id"]
        for one in client.sessions.all(status=["parked"], mine=True, limit=1000)
        if (now - datetime.fromisoformat(one["used_at"])).total_seconds() >= seconds
    ]


def _model(found: Mapping[str, Any]) -> str:
    model: Any = found["spec"]["model"]
    return str(model if isinstance(model, str) else model.get("id") or model.get("path") or model)


def _told(output: Output, sessions: list[dict[str, Any]]) -> None:
    if output.as_json:
        output.json({"data": sessions})
    else:
        output.text("".join(f"{one['id']} {one['status']}\n" for one in sessions))
