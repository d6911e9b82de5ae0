"""The client's parts that need no server: job files, event streams, paths, settings, exit codes."""

from __future__ import annotations

import importlib
import io
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eft import Client
from eft.commands.admin.box import application_home, command
from eft.config import load_config, write_config
from eft.errors import (
    EXIT_MEANINGS,
    ApiError,
    ConfigError,
    DownloadError,
    EftClientError,
    ExitCode,
    LocalError,
    UsageFault,
)
from eft.http.download import local_path
from eft.http.sse import Message, messages
from eft.jobfile import apply_settings, read_job, upload_data
from eft.terminal.output import Output, age, duration, jobs_table, print_error, size
from eft.types import File, Job
from hypothesis import given
from hypothesis import strategies as st

from tests.support.eft_forks import program

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = {"id": f"file-{'0' * 26}", "filename": "a", "bytes": 1, "sha256": "", "created_at": ""}


# --- job files ---------------------------------------------------------------------------------------


def job_file(folder: Path, text: str, name: str = "job.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_yaml_reads_as_on_the_server(tmp_path: Path) -> None:
    text = "name: 2026-01-01\noptimizer: {type: adamw, learning_rate: 1e-4}\nmodel: a/b\n"
    job, folder = read_job(job_file(tmp_path, text))
    assert job == {"name": "2026-01-01", "optimizer": {"type": "adamw", "learning_rate": 1e-4}, "model": "a/b"}
    assert folder == tmp_path


def test_json_with_tabs_and_flow_yaml(tmp_path: Path) -> None:
    assert read_job(job_file(tmp_path, '{\n\t"model": "a/b"\n}', "job.json"))[0] == {"model": "a/b"}
    assert read_job(job_file(tmp_path, "{model: a/b}"))[0] == {"model": "a/b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\nmodel: b\n", "twice"),
        ('{"model": 1, "model": 2}', "twice"),
        ("a: &x 1\nb: *x\n", "aliases"),
        ("- model\n", "an object"),
        ("model: [", "not valid YAML"),
        ("1: x\n", "not a string"),
        ("[" * 100_000, "not valid"),
    ],
)
def test_bad_job_files_are_told(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageFault, match=words):
        read_job(job_file(tmp_path, text))


def test_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file"):
        read_job(str(tmp_path / "none.yaml"))


def test_settings() -> None:
    job = {"method": "lora", "training": None, "model": "a/b"}
    changed = apply_settings(
        job, ["method.r=8", "training.max_steps=10", "optimizer.learning_rate=1e-3", "schedule=cosine", "name=x=y"]
    )
    assert changed == {
        "method": {"type": "lora", "r": 8},
        "training": {"max_steps": 10},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": "cosine",
        "model": "a/b",
        "name": "x=y",
    }
    assert job == {"method": "lora", "training": None, "model": "a/b"}


@pytest.mark.parametrize("setting", ["method", "=1", "a..b=1", "model.revision=main", "method.r.x=1", "x=["])
def test_bad_settings_are_told(setting: str) -> None:
    with pytest.raises(UsageFault, match="--set"):
        apply_settings({"method": {"type": "lora", "r": 8}, "model": "a/b"}, [setting])


def test_only_relative_paths_go_up(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("{}\n")
    sent: list[Path] = []

    def upload(path: Path, read_as: dict[str, Any]) -> File:
        sent.append(path)
        return File.parse(FILE)

    up = {"type": "file", "id": FILE["id"]}
    for data in (
        "rows.jsonl",
        {"train": "./rows.jsonl"},
        {"path": "rows.jsonl"},
        {"type": "path", "path": "rows.jsonl"},
    ):
        assert upload_data({"data": data}, tmp_path, {}, upload) == {"data": {"train": up}}
    with_format = {"train": {"path": "rows.jsonl", "format": "text"}}
    assert upload_data({"data": with_format}, tmp_path, {}, upload) == {"data": {"train": up | {"format": "text"}}}
    columns = {"columns": {"prompt": "question", "completion": "answer"}}
    mixed = {"type": "mixture", "sources": [{"source": {"path": "rows.jsonl", **columns}, "weight": 2}, "/srv/x"]}
    assert upload_data({"data": {"train": mixed}}, tmp_path, {}, upload)["data"]["train"]["sources"] == [
        {"source": up | columns, "weight": 2},
        "/srv/x",
    ]
    assert upload_data({"data": ["rows.jsonl", "/srv/x"]}, tmp_path, {}, upload) == {"data": {"train": [up, "/srv/x"]}}
    assert {path.resolve() for path in sent} == {tmp_path / "rows.jsonl"}

    sent.clear()
    for data in ("/srv/rows.jsonl", FILE["id"], {"train": up}, {"train": "/srv/a", "eval": FILE["id"]}):
        kept = upload_data({"data": data}, tmp_path, {}, upload)["data"]
        assert kept == (data if isinstance(data, dict) else {"train": data})
    assert upload_data({"data": 7}, tmp_path, {}, upload) == {"data": 7}  # the server's to refuse
    assert sent == []

    given = {"train": tmp_path / "other.jsonl"}
    assert upload_data({}, tmp_path, given, upload) == {"data": {"train": up}}
    assert upload_data({"data": "/srv/x"}, tmp_path, given, upload) == {"data": {"train": up}}
    with pytest.raises(UsageFault) as refused:
        upload_data({"data": "none.jsonl"}, tmp_path, {}, upload)
    assert refused.value.field == "data.train"


# --- event streams -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 999), st.sampled_from(["status", "notice"]), st.text()), max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_a_stream_cut_anywhere_gives_the_same_messages(
    events: list[tuple[int, str, str]], end: bytes, cuts: list[int]
) -> None:
    wire = b": keep-alive" + end + end
    for number, kind, text in events:
        data = json.dumps(text, ensure_ascii=True).replace("\\u2028", "\u2028")  # no line end in a stream
        lines = [f"id: {number}", f"event: {kind}", f"data: {data}", ""]
        wire += b"".join(line.encode() + end for line in lines)
    # A bare CR at the very end may yet become a CRLF, and an unfinished message is none.
    wire += b"data: unfinished" if end != b"\r" else b":" + end
    chunks, at = [], 0
    while at < len(wire):
        cut = cuts[len(chunks) % len(cuts)]
        chunks.append(wire[at : at + cut])
        at += cut
    got = list(messages(chunks))
    assert [(m.id, m.event, json.loads(m.data)) for m in got] == [(str(n), kind, text) for n, kind, text in events]


def test_data_over_several_lines() -> None:
    assert list(messages([b"data:a\ndata: b\nretry: 5\n\n\n"])) == [Message(None, "message", "a\nb")]


# --- paths of artifacts ------------------------------------------------------------------------------


def test_artifacts_stay_below_their_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    (folder / "link").symlink_to(elsewhere)
    assert local_path(folder, "adapter/a b-ü.json") == folder / "adapter" / "a b-ü.json"
    bad = ["../x", "/etc/passwd", "a/../../x", "a//b", "./a", "", "a/", "a\\b", "a\x00b", "a\nb", "c:x", "link/x"]
    for path in bad:
        with pytest.raises(DownloadError):
            local_path(folder, path)


# --- settings ----------------------------------------------------------------------------------------


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("EFT_URL", raising=False)
    monkeypatch.delenv("EFT_API_KEY", raising=False)
    return tmp_path / "eft" / "config.toml"


def test_a_stored_key_goes_to_its_own_server_only(own_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config().url == "http://127.0.0.1:8321" and load_config().api_key is None
    write_config("https://box.lab/eft/", 'eft_"k\\')
    assert own_config.stat().st_mode & 0o777 == 0o600
    assert load_config().url == "https://box.lab/eft" and load_config().api_key == 'eft_"k\\'
    assert "eft_" not in repr(load_config())
    monkeypatch.setenv("EFT_URL", "http://other.lab")
    assert load_config().url == "http://other.lab" and load_config().api_key is None
    monkeypatch.setenv("EFT_API_KEY", "eft_env")
    assert load_config().api_key == "eft_env" and load_config("http://x").url == "http://x"


def test_config_that_cannot_be_used(own_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config("http://box.lab", "eft_k")
    own_config.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_config()
    own_config.chmod(0o600)
    for text in ("url = 1", "uri = 'x'", "url = ["):
        own_config.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(str(own_config))):
            load_config()
    own_config.unlink()
    for url in ("box.lab", "ftp://box.lab", "http://", "http://user:pw@box", "http://box?x=1"):
        monkeypatch.setenv("EFT_URL", url)
        with pytest.raises(ConfigError, match="EFT_URL"):
            load_config()
    monkeypatch.setenv("EFT_URL", "http://box")
    monkeypatch.setenv("EFT_API_KEY", "eft_k\nX-Evil: 1")
    with pytest.raises(ConfigError, match="EFT_API_KEY"):
        load_config()


# --- exit codes --------------------------------------------------------------------------------------


def test_exit_codes_are_told_alike_everywhere() -> None:
    assert set(EXIT_MEANINGS) == set(ExitCode)
    page = (ROOT / "docs" / "cli.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    assert rows == {str(int(code)): meaning for code, meaning in EXIT_MEANINGS.items()}
    shown = subprocess.run(
        [program(), "--help"], capture_output=True, text=True, check=True, env={"COLUMNS": "200"}
    ).stdout
    for code, meaning in EXIT_MEANINGS.items():
        assert re.search(rf"\b{int(code)}\s+{re.escape(meaning)}", shown)


@pytest.mark.parametrize(
    ("status", "code"), [(400, 2), (401, 5), (403, 5), (404, 6), (409, 2), (413, 2), (422, 2), (500, 4), (507, 4)]
)
def test_exit_code_of_an_answer(status: int, code: int) -> None:
    assert ApiError("m", status=status, code="c").exit_code == code


def test_exit_code_of_a_job() -> None:
    base = {"id": "job-x", "created_at": ""}
    codes = {s: Job.parse(base | {"status": s}).exit_code for s in ("succeeded", "failed", "cancelled")}
    assert codes == {"succeeded": 0, "failed": 1, "cancelled": 3}


# --- words -------------------------------------------------------------------------------------------


def test_words_of_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 98_362_432, 5e12)] == ["0 B", "999 B", "1.0 kB", "98.4 MB", "5.0 TB"]
    assert [duration(s) for s in (-1, 59.9, 61, 3600)] == ["0s", "59s", "1m 01s", "1h 00m"]
    assert age("not a time") == "not a time"


# --- the application beside the client ---------------------------------------------------------------


def test_no_certificates_are_read_for_the_box_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than a request. A client that has none trusts nobody over TLS."""
    read: list[str] = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **options: read.append(str(options)))
    with Client("http://127.0.0.1:1", "key"):
        assert not read
    create = importlib.import_module("httpx._config").create_ssl_context
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", create)  # not the one of tests/conftest.py
    for url in ("https://127.0.0.1:1", "http://box.lab"):
        read.clear()
        with Client(url, "key"):
            assert read


def test_box_verbs_find_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFT_HOME", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/opt/more")
    assert application_home() == ROOT
    arguments, environment = command(ROOT, "box.up", ["--port", "0"])
    assert arguments == [sys.executable, "-m", "box.up", "--port", "0"]
    assert environment["PYTHONPATH"] == f"{ROOT}:/opt/more" and environment["PYTHONSAFEPATH"] == "1"
    monkeypatch.setenv("EFT_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="EFT_HOME"):
        application_home()


def test_a_folder_called_core_beside_the_user_does_not_stand_in_for_ours(tmp_path: Path) -> None:
    for name in ("core", "api", "box"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    done = subprocess.run(
        [Path(sys.executable).parent / "eft", "up", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--key-file" in done.stdout


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_strangers_text_commands_no_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1m \u202egnp.exe \U0001f469\u200d\U0001f4bb\ttab"
    stream = (Terminal if terminal else io.TextIOWrapper)(io.BytesIO(), encoding="utf-8")
    notes = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", notes)
    output = Output.make(as_json=False)
    output.text(f"{evil}\r50%\r100%\r\n")
    output.note(evil)
    print_error(EftClientError(evil), output)
    named = Job.parse({"id": "job-1", "status": "queued", "created_at": "", "name": evil})
    output.data.print(jobs_table([named], output.data))
    told = stream.buffer.getvalue().decode() + notes.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if not terminal:  # a log in a file is the log
        assert told.startswith(f"{evil}\r50%\r100%\r\n")
        told = told.removeprefix(f"{evil}\r50%\r100%\r\n")
    else:
        assert "\n50%\n100%\n" in told
    told = re.sub(r"\x1b\[[0-9;]*m", "", told)  # the table's own
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", told), repr(told)
    assert told.count("\U0001f469\u200d\U0001f4bb") >= 3


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_of_strangers_text_is_json_and_harmless(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x9b2J \u202e \x7f é 日本 \U0001f469\u200d\U0001f4bb \U000e0041 half: \ud800"
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    output = Output.make(as_json=True)
    output.json({"name": evil})
    line = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert json.loads(line) == {"name": evil}
    assert line.removesuffix("\n").isprintable()
    output.text("é 日本 \ud800\n")  # no UnicodeEncodeError whatever the encoding
