"""`eft worker run|list|drain|undrain`: this box's worker, and the boxes of an installation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.commands.admin.box import WORKER, pass_on
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.app import App, Group
from eft.terminal.output import Output, duration
from eft.times import shown
from eft.types import Node

if TYPE_CHECKING:
    from eft.client import Client


POLL_SECONDS = 1.0
STATE_STYLE = {"serving": "green", "draining": "yellow", "drained": "magenta", "silent": "red"}
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Its name; `eft worker list` shows it.")]


class _RunByDefault(Group):
    """`eft worker [OPTIONS]`, as a service manager calls it, is `eft worker run [OPTIONS]`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: click's own or typer's copy of it
        asks_for_help = args[:1] in (["--help"], ["-h"])
        if not asks_for_help and (not args or args[0] not in self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = App(cls=_RunByDefault, help="Run this box's worker; list, drain and undrain the boxes.")


pass_on(app, "run", WORKER[0], f"{WORKER[1]} Also `eft worker` alone.")


@app.command("list")
@manual(examples=[("eft nodes", "List the boxes."), ("eft worker list", "The same.")])
def list_nodes(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the boxes with their slots, jobs and drains."""
    with session(as_json, url) as (client, output):
        nodes = client.nodes()
        if as_json:
            output.json({"data": [node.raw for node in nodes]})
        else:
            output.table(_table(nodes), "nodes")


@app.command()
@manual(
    examples=[
        ("eft worker drain box-1 --reason 'new disk' --wait", "Take a box out of service, and wait until it is empty.")
    ]
)
def drain(
    node: NodeArgument,
    reason: Annotated[str, typer.Option(help="Reason, shown with the node and its jobs.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing runs there.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a box out of service: nothing new starts there, and running jobs write a checkpoint and continue
    elsewhere. The drain lasts until `undrain`, also across restarts."""
    with session(as_json, url) as (client, output):
        found = client.drain(node, reason=reason)
        while wait and found.state == "draining":
            time.sleep(POLL_SECONDS)
            found = _look(client, node)
        _tell(output, found)


@app.command()
@manual(examples=[("eft worker undrain box-1", "Put it back into service.")])
def undrain(node: NodeArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Put a box back into service."""
    with session(as_json, url) as (client, output):
        _tell(output, client.undrain(node))


def _look(client: Client, name: str) -> Node:
    return client.persist(lambda: client.node(name), 300.0)


def _tell(output: Output, node: Node) -> None:
    if output.as_json:
        output.json(node.raw)
        return
    busy = sum(slot.busy for slot in node.slots)
    output.text(f"{node.name} {node.state}{f', {busy} still there' if busy and node.state == 'draining' else ''}\n")


def _table(nodes: list[Node]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("NODE", "STATE", "SLOTS", "HEARD", "DRAINED"):
        table.add_column(name, no_wrap=True)
    for node in nodes:
        style = STATE_STYLE.get(node.state, "white")
        places: list[Any] = [slot for slot in node.slots if slot.kind in ("gpu", "cpu")]
        drained = ""
        if node.drained is not None:
            drained = f"{shown(node.drained.since)} by {node.drained.by or '?'}"
            drained += f": {node.drained.reason}" if node.drained.reason else ""
        table.add_row(
            escape(node.name),
            f"[{style}]{escape(node.state)}[/]",
            f"{sum(slot.busy for slot in places)}/{len(places)}",
            f"{duration(node.heartbeat_seconds)} ago",
            escape(drained),
        )
    return table
