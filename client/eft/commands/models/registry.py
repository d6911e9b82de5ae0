"""`eft models …`: the registry of what jobs have made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from eft.commands.artifacts import fetch, print_listing, selected
from eft.commands.models.pipelines import print_lineage
from eft.commands.waiting import ENDS, PatienceOption, going_on
from eft.errors import ExitCode
from eft.http import paths as urls
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session
from eft.terminal.app import App
from eft.terminal.output import Output, age, name_width, short_id, size
from eft.times import shown

if TYPE_CHECKING:
    from eft.client import Client

app = App(no_args_is_help=True, help="Models that jobs have made (docs/models.md).")

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=f"A model: {HANDLE}.")]
EXAMPLE = "model-01kar3v8x5m2h6n9qst4wyz0bc"


def _id_of(client: Client, handle: str) -> str:
    """The id that `handle` means now; what asks several times must keep to one model."""
    return handle if urls.is_id(handle) else str(client.models.get(handle)["id"])


@app.command("list")
@manual(
    examples=[
        ("eft models list", "List the project's models."),
        ('eft models list --name "voice intents"', "List the versions of one model."),
        ("eft models list --tag production", "List the models with a tag."),
    ]
)
def list_models(
    name: Annotated[str | None, typer.Option(help="Only models of this name.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only models with this tag.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number, newest first.")] = 20,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List models, newest first."""
    with session(as_json, url) as (client, output):
        found = client.models.all(name=name, tag=tag, limit=limit)
        if as_json:
            output.json({"data": found})
            return
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "NAME", "STAGE", "METHOD", "FORMATS", "SIZE", "AGE", "TAGS"):
            width = name_width(output.data) if column == "NAME" else None
            table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
        for one in found:
            table.add_row(
                short_id(one["id"], output.data),
                escape(one["name"] or ""),
                one["stage"],
                one["method"],
                escape(",".join(form["folder"] for form in one["formats"] if form["released"])),
                size(one["bytes"]),
                age(one["created_at"]),
                escape(",".join(one["tags"])),
            )
        output.table(table, "models")


@app.command("upload")
@manual(
    examples=[
        ('eft models upload out/my-model --name "voice intents"', "Upload a model from its folder."),
        (
            "eft models upload out/my-adapter --base HuggingFaceTB/SmolLM2-135M-Instruct",
            "Upload an adapter, with the model that it was trained over.",
        ),
    ],
    exits={ExitCode.USAGE: "the model is refused, or the usage is wrong"},
)
def upload_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a model, or of a LoRA adapter.")],
    name: Annotated[str | None, typer.Option(help="Display name.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="For an adapter: its base model, as `model` of a job. Default: what its configuration names."
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload a model or an adapter that was made elsewhere, and print its id. Weights must be safetensors. Train it
    further with `model: {type: registry, id: ...}`."""
    with (
        session(as_json, url) as (client, output),
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=output.notes,
            transient=True,
            disable=not output.live,
        ) as bar,
    ):
        task = bar.add_task(folder.name, total=None)
        made = client.models.upload(folder, name=name, base=base, advance=partial(bar.advance, task))
        output.json(made) if as_json else output.text(f"{made['id']}\n")


@app.command("show")
@manual(examples=[(f"eft models show {EXAMPLE}", "Show its base, formats, figures and tags.")])
def show_model(model: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show a model: base, formats with the share of the tuning that each has kept, evaluation, tags."""
    with session(as_json, url) as (client, output):
        found = client.models.get(model)
        output.json(found) if as_json else _show(output, found)


def _show(output: Output, found: dict[str, Any]) -> None:
    base = found["base"]
    told = [
        ("name", found["name"]),
        ("job", f"{found['job']} ({found['stage']}, {found['method']})"),
        ("base", base.get("id") or base.get("path") or base.get("file")),
        ("parent", found["parent"]),
        ("owner", f"{found['owner']} ({found['project']})"),
        ("tags", ", ".join(found["tags"])),
        ("size", size(found["bytes"])),
        ("created", shown(found["created_at"])),
    ]
    told += [
        (name, f"{value:.4g}") for name, value in (found["evaluation"] or {}).items() if isinstance(value, int | float)
    ]
    for form in found["formats"]:
        told += [(f"{form['folder']} {metric}", f"{score:.4g}") for metric, score in (form["scores"] or {}).items()]
    output.data.print(found["id"], highlight=False)
    for name, value in told:
        if value:
            output.data.print(f"    {escape(name)}: {escape(str(value))}", soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("FORMAT", "SIZE", "RETENTION", "RELEASED"):
        table.add_column(column, no_wrap=column != "RELEASED")
    for form in found["formats"]:
        kept = "" if form["retention"] is None else f"{form['retention']:.4f}"
        released = "yes" if form["released"] else f"no: {form['reason']}"
        table.add_row(escape(form["folder"]), size(form["bytes"]), kept, escape(released))
    output.data.print(table)


@app.command("tag")
@manual(
    examples=[
        (f"eft models tag {EXAMPLE} production", "Add a tag."),
        (f"eft models tag {EXAMPLE} production --remove candidate", "Add one and remove another."),
    ]
)
def tag_model(
    model: ModelArgument,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="TAG", help="A tag to remove.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add and remove tags of a model. Prints its tags."""
    with session(as_json, url) as (client, output):
        found = client.models.tag(model, tags or [], remove=remove or [])
        output.json(found) if as_json else output.text("".join(f"{tag}\n" for tag in found["tags"]))


@app.command("rm")
@manual(examples=[(f"eft models rm {EXAMPLE}", "Delete its weights and exports; its job stays.")])
def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"Models: {HANDLE}.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete models: weights, exports and cards. Their jobs stay. A model that another job needs is not deleted."""
    with session(as_json, url) as (client, output):
        for model in models:
            answer = client.models.delete(model)
            freed = size(answer["freed_bytes"])
            output.json(answer) if as_json else output.text(f"{answer['id']} deleted: {freed} freed\n")


@app.command("download")
@manual(
    examples=[
        (f"eft models download {EXAMPLE} adapter -o out", "Download one format."),
        (f"eft models download {EXAMPLE} --list", "List its files with checksums and sizes in bytes."),
    ]
)
def download_model(
    model: ModelArgument,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[FORMAT]...", help="Folders or files. Default: all.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--output", "-o", help="Target folder. Default: the id of the model.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the files.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download a model: verified, resumable, complete or absent."""
    with session(as_json, url) as (client, output):
        model_id = _id_of(client, model)
        chosen = selected(client.models.files(model_id), paths or [], "model")
        if listing:
            print_listing(output, chosen)
        else:
            fetch(output, "model", model_id, chosen, partial(client.models.download, model_id, chosen), into)


@app.command("export")
@manual(
    examples=[
        (f"eft models export {EXAMPLE} gguf-Q4_K_M --wait", "Make a GGUF file of 4 bits, and say how it came out."),
        (f"eft models export {EXAMPLE} merged gguf-Q8_0", "Make two formats; print the id of the export."),
        (f"eft models export {EXAMPLE} lm-eval-gsm8k --wait", "Score a task of lm-eval."),
    ],
    exits=ENDS,
)
def export_model(
    model: ModelArgument,
    formats: Annotated[
        list[str],
        typer.Argument(
            metavar="FORMAT...",
            help="`merged`, `vllm`, `fp8`, `gptq`, `awq`, `mxfp4`, `torchao_int8`, `gguf-Q8_0`, `lm-eval-gsm8k` …",
        ),
    ],
    seconds: Annotated[
        int | None, typer.Option("--max-runtime", min=1, metavar="SECONDS", help="Fail if it takes longer.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, and exit as it did.")] = False,
    patience: PatienceOption = 300.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make formats of a model after its training. A worker makes and checks them without a GPU."""
    with session(as_json, url) as (client, output):
        model_id = _id_of(client, model)
        asked = [_format(name) for name in formats]
        found = client.models.export(model_id, asked, max_runtime_seconds=seconds)
        if not wait:
            output.json(found) if as_json else output.text(f"{found['id']}\n")
            return
        with going_on(output, None):
            found = client.models.wait_for_export(model_id, found["id"], patience=patience)
        if as_json:
            output.json(found)
        elif found["result"] is None:
            output.note(f"{found['id']} {found['status']}: {found['reason']}")
        else:
            for one in found["result"]:
                kept = (one.get("retention") or {}).get("retention")
                figures = [f"{metric} {score:.4f}" for metric, score in (one.get("scores") or {}).items()]
                figures += [] if kept is None else [f"retention {kept:.4f}"]
                figure = f" ({', '.join(figures)})" if figures else ""
                verdict = "released" if one["released"] else f"not released: {one['reason']}"
                output.text(f"{one['folder']} {verdict}{figure}\n")
        if found["status"] != "succeeded":
            raise typer.Exit(ExitCode.CANCELLED if found["status"] == "cancelled" else ExitCode.FAILED)


SCORES = "lm-eval-"
"""How folders with the score of a task begin."""


def _format(name: str) -> dict[str, str]:
    """A format as the folders of exports are named."""
    if name.startswith(SCORES):
        return {"type": "lm_eval", "task": name.removeprefix(SCORES)}
    kind, _, quantization = name.partition("-")
    return {"type": kind} | ({"quantization": quantization} if quantization else {})


@app.command("lineage")
@manual(examples=[(f"eft models lineage {EXAMPLE}", "Show the jobs behind it, with hashes.")])
def model_lineage(model: ModelArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show what a model is made of: its job and those before it, with the hashes of their data, spec, chat template,
    code and weights."""
    with session(as_json, url) as (client, output):
        found = client.models.lineage(model)
        output.json({"data": found}) if as_json else print_lineage(output, found)
