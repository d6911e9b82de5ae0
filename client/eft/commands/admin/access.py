"""`eft whoami`, `eft keys|users|projects …`, `eft audit`: who may do what, and who did what."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from eft.commands.admin.box import KEYS, pass_on
from eft.config import write_config
from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output
from eft.times import shown

if TYPE_CHECKING:
    from eft.client import Client


keys = App(no_args_is_help=True, help="API keys: yours, or everybody's for admins.")
users = App(no_args_is_help=True, help="Users of this box; for its admins.")
projects = App(no_args_is_help=True, help="Projects and their members.")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="A key's id or prefix; `eft keys list` shows them.")]
UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Name or id of a user.")]
ProjectOption = Annotated[str | None, typer.Option(help="Name or id of a project. Default: that of your key.")]
SCOPES = "read, write, admin, box, or metrics (of an admin of the box, for `GET /metrics` alone)"
RIGHTS = (
    "self_rotate (a successor for itself) or make_keys (make keys, rotate others); several times for both. Default: "
    "those of your key without --scope, none with it"
)
WIDE = {"KEY": 150, "PROJECT": 130, "WHAT": 130}
"""Columns that a narrower terminal leaves out, so that the others are whole: commands take a key's PREFIX as well."""
STATE_STYLE = {"works": "green", "expired": "yellow", "revoked": "red"}


@manual(examples=[("eft whoami", "Show the current key.")])
def whoami(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the user, project and permissions of your key."""
    with session(as_json, url) as (client, output):
        me = client.access.me()
        if as_json:
            output.json(me)
            return
        until = f", until {shown(me['key_expires_at'])}" if me["key_expires_at"] else ""
        output.text(
            f"{me['user']['name']}{' (admin of the box)' if me['box_admin'] else ''}, "
            f"{me['role'] or 'no longer a member'} in project {me['project']['name']}; "
            f"key {me['key']} of scope {me['scope']}{until}, at {client.config.url}\n"
        )


# --- keys


@keys.command("list")
@manual(examples=[("eft keys list", "List your keys; --all lists the project's for its admins.")])
def list_keys(
    everybody: Annotated[bool, typer.Option("--all", help="Everybody's in the project; for its admins.")] = False,
    project: ProjectOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List keys with their state and last use, newest first."""
    with session(as_json, url) as (client, output):
        rows = client.access.keys(everybody=everybody, project=project)
        _table(
            output,
            rows,
            ("KEY", "PREFIX", "NAME", "USER", "SCOPE", "STATE", "EXPIRES", "LAST USED"),
            lambda row: (
                row["id"],
                row["prefix"],
                row["name"],
                row["user"]["name"],
                row["scope"],
                row["state"],
                shown(row["expires_at"]) or "never",
                shown(row["last_used_at"]),
            ),
        )


@keys.command("create")
@manual(examples=[("eft keys create ci --scope write --days 90", "A key for a pipeline, valid for three months.")])
def create_key(
    name: Annotated[str, typer.Argument(help="To tell keys apart.")] = "key",
    scope: Annotated[str | None, typer.Option(help=f"{SCOPES}. Default: all that its user may.")] = None,
    right: Annotated[list[str] | None, typer.Option(help=RIGHTS)] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires. Default: the expiry of your key.")] = None,
    user: Annotated[str | None, typer.Option(help="Member who gets the key; for admins.")] = None,
    project: ProjectOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it once."""
    with session(as_json, url) as (client, output):
        made = client.access.create_key(
            name, scope=scope, rights=right, expires_in_days=days, user=user, project=project
        )
        _tell_key(output, made)


@keys.command("rotate")
@manual(examples=[("eft keys rotate --save", "Replace your saved key.")])
def rotate_key(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="Its id or prefix. Default: your own.")] = None,
    overlap_hours: Annotated[
        float, typer.Option(min=0, max=720, help="Hours for which the old key stays valid.")
    ] = 24.0,
    days: Annotated[
        float | None, typer.Option(help="The new key's end. Default: the old key's; a later one is for admins.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Save your new key as `eft login` does, without printing it.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key's successor and print it once; the old key stays valid for a while."""
    with session(as_json, url) as (client, output):
        mine = client.access.me()["key"]
        chosen = mine if key is None else _key_id(client, key)
        if save and chosen != mine:
            raise UsageFault("--save is for the key that you use yourself")
        if save and os.environ.get("EFT_API_KEY"):
            raise UsageFault("--save keeps the key in the file of `eft login`, and EFT_API_KEY goes before it")
        made = client.access.rotate_key(chosen, overlap_hours=overlap_hours, expires_in_days=days)
        if save:
            path = write_config(client.config.url, made.pop("key"))
            output.json(made) if as_json else output.note(f"{made['id']} kept in {path}")
        else:
            _tell_key(output, made)


@keys.command("revoke")
@manual(examples=[("eft keys revoke key-01kar3v8x5m2h6n9qst4wyz0bc", "Revoke it immediately and permanently.")])
def revoke_key(
    key: KeyArgument,
    alone: Annotated[bool, typer.Option("--alone", help="Keep the keys that it created, and its successors.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key immediately and permanently, with every key that it created and its successors."""
    with session(as_json, url) as (client, output):
        gone = client.access.revoke_key(_key_id(client, key), alone=alone)
        if as_json:
            output.json(gone)
            return
        for other in gone["also_revoked"]:
            output.text(f"{other} revoked with it\n")
        output.text(f"{gone['id']} revoked\n")


pass_on(keys, "local", *KEYS)


def _key_id(client: Client, id_or_prefix: str) -> str:
    """The id; a prefix is looked for among one's own keys, then among the project's where one may see them."""
    if id_or_prefix.startswith("key-"):
        return id_or_prefix
    wanted = id_or_prefix.removeprefix("eft_")[:8]
    role = client.access.me()
    for everybody in (False, True) if role["role"] == "admin" and role["scope"] in ("admin", "box") else (False,):
        for row in client.access.keys(everybody=everybody):
            if row["prefix"] == wanted:
                return str(row["id"])
    raise UsageFault(f"no key of yours has the prefix `{wanted}`; `eft keys list` shows them")


def _tell_key(output: Output, made: dict[str, Any]) -> None:
    """The key alone on stdout, for pipes."""
    if output.as_json:
        output.json(made)
        return
    until = f", until {shown(made['expires_at'])}" if made["expires_at"] else ""
    output.note(
        f"{made['id']}: {made['user']['name']} in {made['project']['name']}, scope {made['scope']}{until}. "
        "Shown this once:"
    )
    output.text(f"{made['key']}\n")


# --- users


@users.command("list")
@manual(examples=[("eft users list", "List all users.")])
def list_users(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List all users by name."""
    with session(as_json, url) as (client, output):
        _table(
            output,
            client.access.users(),
            ("NAME", "ID", "BOX ADMIN", "DISABLED"),
            lambda row: (row["name"], row["id"], "yes" if row["box_admin"] else "", shown(row["disabled_at"])),
        )


@users.command("create")
@manual(examples=[("eft users create bob", "Add a user.")])
def create_user(
    name: Annotated[str, typer.Argument(help="Unique on this box.")],
    box_admin: Annotated[bool, typer.Option("--box-admin", help="Looks after the box.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a user; continue with `eft projects add` and `eft keys create --user`."""
    with session(as_json, url) as (client, output):
        made = client.access.create_user(name, box_admin=box_admin)
        output.json(made) if as_json else output.text(f"{made['id']}\n")


@users.command("change")
@manual(examples=[("eft users change bob --disable", "Disable a user and all their keys.")])
def change_user(
    user: UserArgument,
    box_admin: Annotated[bool | None, typer.Option("--box-admin/--no-box-admin", help="Looks after the box.")] = None,
    disabled: Annotated[bool | None, typer.Option("--disable/--enable", help="Stop all their keys.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a user an admin of the box, disable a user, or undo either."""
    with session(as_json, url) as (client, output):
        if box_admin is None and disabled is None:
            raise UsageFault("say what: --box-admin, --no-box-admin, --disable or --enable")
        row = client.access.change_user(user, box_admin=box_admin, disabled=disabled)
        state = "disabled" if row["disabled_at"] else "enabled"
        words = f"{row['name']} {state}{', admin of the box' if row['box_admin'] else ''}\n"
        output.json(row) if as_json else output.text(words)


# --- projects


@projects.command("list")
@manual(examples=[("eft projects list", "Your project; all for an admin of the box.")])
def list_projects(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the project of your key, or all for admins of the box."""
    with session(as_json, url) as (client, output):
        _table(output, client.access.projects(), ("NAME", "ID"), lambda row: (row["name"], row["id"]))


@projects.command("create")
@manual(examples=[("eft projects create voice --admin ada", "Create a project with its first admin.")])
def create_project(
    name: Annotated[str, typer.Argument(help="Unique on this box.")],
    admin: Annotated[str | None, typer.Option(help="User who becomes its first admin. Default: you.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a project; for admins of the box."""
    with session(as_json, url) as (client, output):
        made = client.access.create_project(name, admin=admin)
        output.json(made) if as_json else output.text(f"{made['id']}\n")


@projects.command("set")
@manual(examples=[("eft projects set --preemptible", "Let its running jobs be preempted.")])
def set_project(
    preemptible: Annotated[
        bool,
        typer.Option(
            "--preemptible/--not-preemptible",
            help="Let running jobs be preempted, with a checkpoint, for waiting jobs of a higher priority, of any "
            "project.",
        ),
    ],
    project: ProjectOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set options of a project; for its admins."""
    with session(as_json, url) as (client, output):
        row = client.access.set_project(_project(client, project), preemptible=preemptible)
        words = "its running jobs make room for higher priorities" if row["preemptible"] else "its running jobs stay"
        output.json(row) if as_json else output.text(f"{row['name']}: {words}\n")


@projects.command("members")
@manual(examples=[("eft projects members", "List the members of your project.")])
def members(project: ProjectOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the members of a project with their roles."""
    with session(as_json, url) as (client, output):
        _table(
            output,
            client.access.members(_project(client, project)),
            ("NAME", "ROLE", "SINCE"),
            lambda row: (row["user"]["name"], row["role"], shown(row["since"])),
        )


@projects.command("add")
@manual(examples=[("eft projects add bob --role viewer", "Give read access.")])
def add_member(
    user: UserArgument,
    role: Annotated[str, typer.Option(help="viewer, member or admin.")] = "member",
    project: ProjectOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a user to a project, or change their role."""
    with session(as_json, url) as (client, output):
        row = client.access.set_member(_project(client, project), user, role)
        output.json(row) if as_json else output.text(f"{row['user']['name']} {row['role']}\n")


@projects.command("remove")
@manual(examples=[("eft projects remove bob", "Remove a member and revoke their keys.")])
def remove_member(
    user: UserArgument, project: ProjectOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Remove a user from a project and revoke their keys for it."""
    with session(as_json, url) as (client, output):
        gone = client.access.remove_member(_project(client, project), user)
        output.json(gone) if as_json else output.text(f"{user} removed\n")


def _project(client: Client, given: str | None) -> str:
    return given if given is not None else str(client.access.me()["project"]["id"])


# --- audit


@manual(examples=[("eft audit --action key. --since 2026-11-01", "Actions on keys this month.")])
def audit(
    actor: Annotated[str | None, typer.Option(help="Only actions of this user.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, or a kind with its dot: `key.`.")] = None,
    target: Annotated[str | None, typer.Option(help="Only actions on this id or name.")] = None,
    key: Annotated[str | None, typer.Option(help="Only actions with this key (id).")] = None,
    request_id: Annotated[str | None, typer.Option(help="Only of this request.")] = None,
    since: Annotated[str | None, typer.Option(help="ISO 8601 time.")] = None,
    until: Annotated[str | None, typer.Option(help="ISO 8601 time.")] = None,
    project: ProjectOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number, newest first.")] = 50,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List changes and their authors, newest first; for admins."""
    with session(as_json, url) as (client, output):
        rows = client.access.audit(
            limit=limit,
            actor=actor,
            action=action,
            target=target,
            key=key,
            request_id=request_id,
            since=since,
            until=until,
            project=project,
        )
        _table(
            output,
            rows,
            ("TIME", "WHO", "ACTION", "TARGET", "PROJECT", "WHAT"),
            lambda row: (
                shown(row["time"]),
                row["actor"]["name"] if row["actor"] else "(on the box)",
                row["action"],
                row["target"],
                row["project"]["name"] if row["project"] else "",
                json.dumps(row["data"], ensure_ascii=False),
            ),
        )


def _table(output: Output, rows: list[dict[str, Any]], columns: tuple[str, ...], cells: Any) -> None:
    """People's form, without the columns WIDE on a narrow terminal; with --json the rows as they came."""
    if output.as_json:
        output.json({"data": rows})
        return
    table = Table(box=None, pad_edge=False)
    kept = [output.data.width >= WIDE.get(name, 0) for name in columns]
    for name in compress(columns, kept):
        table.add_column(name, no_wrap=name != "WHAT", overflow="fold")
    for row in rows:
        table.add_row(*_marked(compress(cells(row), kept)))
    output.table(table, "entries")


def _marked(cells: Iterable[str]) -> list[str]:
    return [f"[{STATE_STYLE[cell]}]{cell}[/]" if cell in STATE_STYLE else escape(cell) for cell in cells]
