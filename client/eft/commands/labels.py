"""`eft tag|note|archive|unarchive`: what people say of jobs. Training never sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from eft.manual.source import manual
from eft.session import JobArgument, JobArguments, JsonOption, UrlOption, session


@manual(
    examples=[
        ("eft tag last baseline paper", "Add two tags to your newest job."),
        ("eft tag last --remove paper", "Remove one."),
    ]
)
def tag(
    job_id: JobArgument,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="Remove this tag; may be repeated.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add tags to a job, or remove them, and print those that it has. `eft ls --tag` finds jobs by them."""
    with session(as_json, url) as (client, output):
        job = client.get(job_id)
        wanted = [one for one in dict.fromkeys([*job.tags, *(tags or ())]) if one not in (remove or ())]
        if wanted != job.tags:
            job = client.label(job.id, tags=wanted)
        output.json(job.raw) if as_json else output.text(f"{job.id} {' '.join(job.tags) or 'has no tags'}\n")


@manual(
    examples=[
        ("eft note last 'best so far; the data has doubles'", "Write a note."),
        ("eft note last", "Read it."),
        ("eft note last ''", "Remove it."),
    ]
)
def note(
    job_id: JobArgument,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The new note. Default: print the note.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a note on a job, or print it."""
    with session(as_json, url) as (client, output):
        job = client.get(job_id) if text is None else client.label(job_id, note=text)
        output.json(job.raw) if as_json else output.text(f"{job.note}\n" if job.note else "")


@manual(examples=[("eft archive last", "Hide your newest job from `eft ls`.")])
def archive(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Hide ended jobs from lists. Nothing is deleted; `eft ls --archived` shows them too."""
    _archive(job_ids, True, url, as_json)


@manual(examples=[("eft unarchive last", "Show it again.")])
def unarchive(job_ids: JobArguments, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show archived jobs in lists again."""
    _archive(job_ids, False, url, as_json)


def _archive(job_ids: list[str], archived: bool, url: str | None, as_json: bool) -> None:
    with session(as_json, url) as (client, output):
        for job_id in job_ids:
            job = client.label(job_id, archived=archived)
            words = "archived" if archived else "in lists again"
            output.json(job.raw) if as_json else output.text(f"{job.id} {words}\n")
