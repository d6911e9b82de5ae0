"""Job files: YAML or JSON, with `--set` and with local data files that are uploaded on the way."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from eft.errors import LocalError, UsageFault
from eft.http.download import digest
from eft.types import File

if TYPE_CHECKING:
    from eft.client import Client


ROLES = ("train", "eval")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9_-]*")
"""Without a dot behind the slash: that is a file."""
UNSENT = "file-0000000000000000000000"
"""What ids of files that are still to be uploaded begin with, in a dry run (`POST /jobs?dry_run=true`)."""
Uploader = Callable[[Path, dict[str, Any]], File]
"""From a file and how its rows are to be read (`format`, `columns`, both optional) to the file on the server."""


def read_job(source: str) -> tuple[dict[str, Any], Path]:
    """A job from a file or from `-` (stdin), and the folder that relative paths in it start from."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise LocalError(f"{source}: {error.strerror or error}") from error
    job = _parse(text, source)
    if job is None:
        raise UsageFault(f"{source}: there is no job in it; it needs at least `model` and `data`")
    if not isinstance(job, dict):
        raise UsageFault(f"{source}: a job is an object with fields such as `model` and `data`")
    return job, Path() if source == "-" else Path(source).parent


def apply_settings(job: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """`training.max_steps=10` sets that field; the value is YAML (numbers, true, null, [lists], {objects}).

    A short form on the way is written out: with `method: lora`, `method.r=8` gives `{type: lora, r: 8}`.
    """
    job = copy.deepcopy(job)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UsageFault(f"--set {setting!r}: write it as field.of.the.job=value")
        place = job
        for depth, key in enumerate(keys[:-1], start=1):
            value = place.setdefault(key, {})
            if isinstance(value, str) and keys[0] not in ("model", "data"):
                value = place[key] = {"type": value}
            if value is None:
                value = place[key] = {}
            if not isinstance(value, dict):
                raise UsageFault(
                    f"--set {setting!r}: `{'.'.join(keys[:depth])}` is {value!r} here; write it in full first"
                )
            place = value
        place[keys[-1]] = _parse(text.encode(), f"--set {path}")
    return job


def upload_data(job: dict[str, Any], folder: Path, given: dict[str, Path], upload: Uploader) -> dict[str, Any]:
    """Put file ids in the place of local data files.

    `given` (from --data and --eval) wins over the job. Of the paths that the job names, the relative ones are files
    beside it and go up; absolute ones lie on the server.
    """
    job = copy.deepcopy(job)
    data = job.get("data", {})
    if isinstance(data, str | list) or (isinstance(data, dict) and {"id", "path"} & set(data)):
        data = {"train": data}  # the short form
    if not isinstance(data, dict):
        return job  # the server says what is wrong with it
    for role in ROLES:
        if role in given:
            said = data.get(role)
            data[role] = _sent(given[role], said if isinstance(said, dict) else {}, f"data.{role}", upload)
        elif role in data:
            data[role] = _with_files(data[role], folder, f"data.{role}", upload)
    if data:
        job["data"] = data
    return job


def _with_files(source: Any, folder: Path, field: str, upload: Uploader) -> Any:
    """A source, a list of them or a mixture, with ids where local files stood."""
    if isinstance(source, list):
        return [_with_files(one, folder, f"{field}[{at}]", upload) for at, one in enumerate(source)]
    if isinstance(source, dict) and isinstance(source.get("sources"), list):
        sources = _with_files(source["sources"], folder, f"{field}.sources", upload)
        return source | {"sources": sources}
    if isinstance(source, dict) and "source" in source:
        return source | {"source": _with_files(source["source"], folder, f"{field}.source", upload)}
    path = _local(source, folder)
    return source if path is None else _sent(path, source, field, upload)


def _sent(path: Path, source: Any, field: str, upload: Uploader) -> dict[str, Any]:
    if not path.is_file():
        raise UsageFault(_absent(path, source), field=field)
    said = source if isinstance(source, dict) else {}
    read_as: dict[str, Any] = {key: said[key] for key in ("format", "columns") if key in said}
    return {"type": "file", "id": upload(path, read_as).id} | read_as


def _absent(path: Path, source: Any) -> str:
    """For a file that the job, or an option, names: what may have been meant."""
    written = source.get("path") if isinstance(source, dict) else source
    if not isinstance(written, str):
        return f"{path}: no such file"
    if "://" in written:
        return f"{written}: addresses are not read; download the file and name it here"
    kind = "is a folder; name the files in it" if path.is_dir() else "no such file; it is named by the job"
    if _HUB_ID.fullmatch(written) and not path.exists():
        kind += f". For the data set of the Hugging Face hub write {{type: hub, id: {written}}}"
    return f"{path}: {kind}"


def uploader(client: Client, on_upload: Callable[[Path, File], None] = lambda path, file: None) -> Uploader:
    """Upload, unless the project has the very same file: then `eft submit` twice is one upload, and one job's spec."""

    def upload(path: Path, read_as: dict[str, Any]) -> File:
        columns = read_as.get("columns")
        known = client.find_file(digest(path), name=path.name, columns=columns)
        file = known or client.upload(path, format=read_as.get("format"), columns=columns)
        on_upload(path, file)
        return file

    return upload


class StandIns:
    """In the place of an uploader: local files that the project does not have get an id that a dry run takes for a file
    still to come. Nothing is sent."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.missing: list[Path] = []
        """Files that would be uploaded."""
        self._ids: dict[str, str] = {}

    def __call__(self, path: Path, read_as: dict[str, Any]) -> File:
        sha256 = digest(path)
        known = self._client.find_file(sha256, name=path.name, columns=read_as.get("columns"))
        if known is not None:
            return known
        self.missing.append(path)
        file_id = self._ids.setdefault(sha256, f"{UNSENT}{len(self._ids):04d}")
        return File(file_id, path.name, path.stat().st_size, sha256, None, read_as.get("format"), "", raw={})

    def tell(self, note: Callable[[str], None]) -> None:
        """Name the files that a dry run has not seen."""
        for path in self.missing:
            note(f"{path} would be uploaded; its rows are not checked here: eft data check {path}")


def checked_first(
    client: Client, job: dict[str, Any], folder: Path, given: dict[str, Path], upload: Uploader
) -> dict[str, Any]:
    """`upload_data`, after the server has checked the job: what is wrong with it is told before any file goes up."""
    stand_ins = StandIns(client)
    placed = upload_data(job, folder, given, stand_ins)
    if not stand_ins.missing:
        return upload_data(job, folder, given, upload)
    client.resolve(placed)
    return upload_data(job, folder, given, upload)


def _local(source: Any, folder: Path) -> Path | None:
    """The local file that a data source of the job names, if it names one."""
    if isinstance(source, dict):
        source = source.get("path") if source.get("type", "path") == "path" else None
    if not isinstance(source, str) or re.match(r"^file-[0-9a-z]{26}$", source):
        return None
    path = Path(source).expanduser()
    return None if path.is_absolute() else folder / path


def _parse(text: bytes, source: str) -> Any:
    if text.lstrip().startswith(b"{"):
        # JSON first: YAML stumbles over its tabs. What is not JSON may still be YAML's {flow style}.
        try:
            return json.loads(text, object_pairs_hook=_no_doubles)
        except json.JSONDecodeError as error:
            if source.endswith(".json"):
                raise UsageFault(f"{source}: not valid JSON: {error}") from error
        except (ValueError, RecursionError) as error:
            raise UsageFault(f"{source}: not valid JSON: {error}") from error
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 -- _Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        raise UsageFault(f"{source}{_where(error)}: not valid YAML or JSON: {_problem(error)}") from error
    except yaml.reader.ReaderError as error:
        raise UsageFault(f"{source}: this is not text in UTF-8 (byte {error.position})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageFault(f"{source}: not valid YAML or JSON: {error}") from error


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's words without its name for the text, which is not the file's."""
    if "'\\t'" in (error.problem or ""):
        return "a tab begins the line; YAML is indented with spaces"
    return error.problem or error.context or "it cannot be read"


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice in one object")
        result[key] = value
    return result


class _Loader(yaml.SafeLoader):
    """YAML as the server reads it: no aliases, no doubled keys, `1e-4` is a number and a date is a string."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*name) are not supported in a job")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not a string; put it into quotes")
            if key in keys[:position]:
                raise ValueError(f"the key {key!r} stands twice in one object")
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
