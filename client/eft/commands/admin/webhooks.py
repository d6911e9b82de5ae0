"""`eft webhooks …`: be told what becomes of jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, short_id
from eft.times import shown

app = App(no_args_is_help=True, help="Notifications about a project's jobs.")

HookArgument = Annotated[str, typer.Argument(metavar="HOOK", help=f"A webhook: {HANDLE}.")]
STATE_STYLE = {"delivered": "green", "pending": "cyan", "dead": "red"}


@app.command("list")
@manual(examples=[("eft webhooks list", "List webhooks and their failures.")])
def list_webhooks(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the project's webhooks and their failures."""
    with session(as_json, url) as (client, output):
        rows = client.webhooks.all()
        if as_json:
            output.json({"data": rows})
            return
        table = _table("ID", "NAME", "KIND", "TARGET", "EVENTS", "JOBS", "STATE")
        for row in rows:
            events = ",".join(event.removeprefix("job.") for event in row["events"])
            jobs = "all" if row["all_jobs"] else "named"
            hook = short_id(row["id"], output.data)
            table.add_row(*map(escape, (hook, row["name"], row["kind"], row["origin"], events, jobs)), _state(row))
        output.table(table, "webhooks")


@app.command("create")
@manual(
    examples=[
        ("eft webhooks create https://ci.lab/hooks/eft --event job.failed", "Send signed JSON for each failure."),
        ("eft webhooks create https://chat.lab/hooks/x --kind chat", "Post one line to a chat channel."),
    ]
)
def create_webhook(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Target URL: http(s)://…")],
    name: Annotated[str, typer.Option(help="To tell webhooks apart.")] = "webhook",
    kind: Annotated[str, typer.Option(help="standard: signed JSON; chat: Slack, Mattermost, Discord.")] = "standard",
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="job.started, job.paused, job.succeeded, job.failed, job.cancelled, or pipeline. and sweep. with "
            "succeeded, failed or cancelled; several times. Default: succeeded and failed of jobs."
        ),
    ] = None,
    named_only: Annotated[bool, typer.Option("--named-only", help="Only for jobs that name it in `notify`.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a webhook and print its secret once; for admins of the project."""
    with session(as_json, url) as (client, output):
        made = client.webhooks.create(target, name=name, kind=kind, events=event, all_jobs=not named_only)
        _tell_secret(output, made)


@app.command("rotate")
@manual(
    examples=[
        ("eft webhooks rotate hook-01kar3v8x5m2h6n9qst4wyz0bc --overlap-hours 2", "Keep the old secret for two hours.")
    ]
)
def rotate_webhook(
    hook: HookArgument,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=720, help="Hours for which the old secret stays valid.")
    ] = 24.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a new secret and print it once."""
    with session(as_json, url) as (client, output):
        _tell_secret(output, client.webhooks.rotate(hook, overlap_hours=overlap_hours))


@app.command("enable")
@manual(examples=[("eft webhooks enable hook-01kar3v8x5m2h6n9qst4wyz0bc", "Enable it after days of failure.")])
def enable_webhook(hook: HookArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Enable a disabled webhook."""
    with session(as_json, url) as (client, output):
        row = client.webhooks.enable(hook)
        output.json(row) if as_json else output.text(f"{row['id']} enabled\n")


@app.command("test")
@manual(examples=[("eft webhooks test hook-01kar3v8x5m2h6n9qst4wyz0bc", "Send a test.")])
def test_webhook(hook: HookArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Send a test; `eft webhooks deliveries` shows the result."""
    with session(as_json, url) as (client, output):
        row = client.webhooks.test(hook)
        output.json(row) if as_json else output.text(f"{row['id']}\n")


@app.command("deliveries")
@manual(examples=[("eft webhooks deliveries hook-01kar3v8x5m2h6n9qst4wyz0bc --state dead", "List dead letters.")])
def deliveries(
    hook: HookArgument,
    state: Annotated[str | None, typer.Option(help="Only these: pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List deliveries with the result of the last attempt; `--state dead` lists dead letters."""
    with session(as_json, url) as (client, output):
        rows = client.webhooks.deliveries(hook, state=state, limit=limit)
        if as_json:
            output.json({"data": rows})
            return
        table = _table("ID", "TYPE", "JOB", "STATE", "ATTEMPTS", "NEXT", "LAST")
        for row in rows:
            styled = f"[{STATE_STYLE[row['state']]}]{row['state']}[/]"
            last = row["last_error"] or (str(row["last_status"]) if row["last_status"] else "")
            after = shown(row["next_at"])
            job = short_id(row["job"] or "", output.data)
            table.add_row(row["id"], row["type"], job, styled, str(row["attempts"]), after, escape(last))
        output.table(table, "deliveries")


@app.command("resend")
@manual(
    examples=[("eft webhooks resend hook-01kar3v8x5m2h6n9qst4wyz0bc msg-01kar3v8x5m2h6n9qst4wyz0bc", "Send it again.")]
)
def resend(
    hook: HookArgument,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="A delivery's id.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a notification again, with the same id."""
    with session(as_json, url) as (client, output):
        row = client.webhooks.resend(hook, delivery)
        output.json(row) if as_json else output.text(f"{row['id']} {row['state']}\n")


@app.command("delete")
@manual(examples=[("eft webhooks delete hook-01kar3v8x5m2h6n9qst4wyz0bc", "Delete a webhook.")])
def delete_webhook(hook: HookArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Delete a webhook."""
    with session(as_json, url) as (client, output):
        gone = client.webhooks.delete(hook)
        output.json(gone) if as_json else output.text(f"{gone['id']} deleted\n")


def _tell_secret(output: Output, made: dict[str, Any]) -> None:
    """The secret alone on stdout, for pipes."""
    if output.as_json:
        output.json(made)
        return
    if made["secret"] is None:
        output.note(f"{made['id']}: a line to {made['origin']} for each event")
        return
    output.note(f"{made['id']}: to {made['origin']}. The secret that signs, shown this once:")
    output.text(f"{made['secret']}\n")


def _state(row: dict[str, Any]) -> str:
    if row["disabled_at"]:
        return f"[red]disabled[/]: {escape(row['disabled_reason'])}"
    return f"[yellow]fails[/] since {shown(row['failing_since'])}" if row["failing_since"] else "[green]works[/]"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name not in ("STATE", "LAST"), overflow="fold")
    return table
