"""`eft push`: a format of a model to the Hugging Face hub."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eft.commands.artifacts import download_with_bar, selected
from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, job_id_of, session
from eft.terminal.output import Output

TRAINED = ("adapter", "model")
"""Formats that a job makes by itself: the default."""


@manual(
    examples=[
        ("eft push voice-intents lab/voice-intents", "Push the adapter (or the model) to a private repository."),
        ("eft push voice-intents lab/voice-intents merged --public", "Push the merged model, for everybody."),
    ]
)
def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"A model: {HANDLE}. Also a job, by its id.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub.")],
    form: Annotated[
        str | None,
        typer.Argument(metavar="[FORMAT]", help="Format to push. Default: what was trained, `adapter` or `model`."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="Branch, created if missing. Default: main.")
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Message of the commit.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Push a format of a model to the Hugging Face hub, as one commit. The files pass through this machine. The token
    is yours (HF_TOKEN, or `hf auth login`); the eft server never sees it."""
    from eft.http.hub import HubRepository  # huggingface_hub takes half a second

    with session(as_json, url) as (client, output):
        target = HubRepository(repo)
        if model.startswith("job-"):
            model = job_id_of(client, model).replace("job-", "model-", 1)
        found = client.models.get(model)
        folder = _folder(found, form)
        files = selected(client.models.files(found["id"]), [folder], "model")
        target.create(public=public)
        with tempfile.TemporaryDirectory(prefix="eft-push-") as place:
            download_with_bar(output, files, partial(client.models.download, found["id"], files, into=Path(place)))
            _note_local_base(output, Path(place) / folder)
            words = message or f"{found['name'] or found['id']}: {folder} ({found['id']})"
            done = target.push(Path(place) / folder, revision=revision, message=words, progress=output.live)
        if as_json:
            output.json({"model": found["id"], "format": folder, "repo": repo, "url": done.url, "commit": done.commit})
        else:
            output.text(f"{done.url}\n")


def _folder(model: dict[str, Any], form: str | None) -> str:
    """The format to push. Raises UsageFault for one that is not there or was not released."""
    known = {one["folder"]: one for one in model["formats"]}
    if form is None:
        return next(name for name in TRAINED if name in known)
    one = known.get(form.rstrip("/"))
    if one is None:
        raise UsageFault(
            f"{model['id']} has no format {form!r}; it has {', '.join(known)}. "
            f"`eft models export {model['id']} {form} --wait` makes one"
        )
    if not one["released"]:
        raise UsageFault(f"{form} of {model['id']} was not released: {one['reason']}")
    return str(one["folder"])


def _note_local_base(output: Output, folder: Path) -> None:
    """Say when an adapter names a base that only the lab's box has."""
    config = folder / "adapter_config.json"
    if config.is_file():
        base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
        if base.startswith(("/", ".")):
            output.note(f"the adapter names the local folder {base} as its base: others cannot load it by its name")
