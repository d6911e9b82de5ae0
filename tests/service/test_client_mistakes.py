"""Whatever is typed wrong, and whatever answers in eft's place: words on stderr and an exit code, never a traceback."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eft import Client, NotEft
from eft.cli import tree
from eft.commands.admin.box import VERBS
from eft.errors import ApiError, Fault
from eft.terminal.astray import COMMANDS, OPTIONS
from eft.terminal.output import Output, print_error
from eft.times import point

from tests.support.client import environment, run
from tests.support.eft_forks import program

JOB = f"job-{'0' * 26}"
BAD = ("", "1e999", "\udcff \u2603=")
"""Values that hardly any option can use: nothing, out of bounds, bytes of another encoding."""
CODES = {1, 2, 3, 4, 5, 6, 7, 8}
EXECUTED = {*VERBS, "worker run", "keys local"}
"""Run by the application, in the place of this process: tests/service/test_entry_points.py asks those."""
ASKS = {"__complete", "help", "man", "completion", "version", "data check", "data preview"}
"""Needs no server, or starts a process each time; asked apart."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))
        if not getattr(below, "commands", {}):
            yield (*path, name), below


TREE = tree()
"""Built once, which takes longer than most commands."""
ALL = {" ".join(path): command for path, command in commands(TREE)}
ASKED = {name: command for name, command in ALL.items() if name not in EXECUTED | ASKS}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another web server: a folder with one page."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "index.html").write_text("<p>hello")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def eft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command in this process, in a folder with a job file."""
    for name in [name for name in os.environ if name.startswith("EFT_") or name == "COLUMNS"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("EFT_API_KEY", "eft_x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("model: a/b\ndata: /data/rows.jsonl\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')

    def ended(*arguments: str) -> tuple[int, str, str]:
        done = run(*arguments)
        assert "error internal" not in done.stderr, (arguments, done.stderr)
        return done.returncode, done.stdout, done.stderr

    return ended


def arguments_of(command: Any) -> list[str]:
    """Something for each argument and option that has to be given."""
    given = []
    for parameter in command.params:
        if parameter.required:
            option = next((one for one in parameter.opts if one.startswith("--")), None)
            if getattr(parameter, "is_flag", False):
                given.append(str(option))
                continue
            value = {
                "source": "job.yaml",
                "paths": "rows.jsonl",
                "one": JOB,
                "--to": "5",
                "gpus": "0",
                "--print": "vllm",
            }
            known = value.get(option or parameter.name, "2h" if option in ("--from", "--until") else JOB)
            given += [option, known] if option else [known]
    return given


def options_of(command: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each option, and bad values for it, if it has one."""
    for parameter in command.params:
        option = next((one for one in parameter.opts if one.startswith("--")), None)
        if option is not None and option not in ("--help", "--url"):
            yield option, () if getattr(parameter, "is_flag", False) else BAD


# --- fuzz --------------------------------------------------------------------------------------------------


ENOUGH = {
    "compare": (JOB, JOB),
    "files preview": (JOB, "--model", "a/b"),
    "quota set": ("project", "default", "--max-running", "2"),
    "users change": (JOB, "--disable"),
    "login": ("--key-stdin",),
    "sessions close": (JOB,),
}
"""Where more has to be given than the command line's grammar knows."""
LOCAL = {"open", "login", "push", "models upload"}
"""Asks no server for what is given here, or gives up before."""


@pytest.mark.parametrize("name", ASKED)
def test_every_option_with_bad_values_and_another_web_server(name: str, eft: Any, elsewhere: str) -> None:
    """Wrong usage is 2, another service 4; a file that is not there 7."""
    command, words = ASKED[name], name.split(" ")
    needed = list(ENOUGH.get(name) or arguments_of(command))
    at = ["--url", elsewhere]
    if name not in LOCAL:
        code, out, err = eft(*words, *needed, *at)
        assert (code, out) == (4, "") and err.strip(), (name, code, out, err)
    for option, bad in options_of(command):
        for value in bad:
            code, out, err = eft(*words, *needed, f"{option}={value}", *at)
            assert code in CODES and err.strip(), (name, option, value, code, out)
        if bad:
            code, _, err = eft(*words, *needed, *at, option)
            assert code == 2 and "requires an argument" in err, (name, option)
        else:
            assert eft(*words, *needed, f"{option}=1", *at)[0] == 2
    code, _, err = eft(*words, "--no-such-option")
    assert code == 2 and "No such option: --no-such-option" in err
    code, _, err = eft(*words, *needed, "--url", "http://[")
    assert code == 2 and "is not an address" in err, (name, err)


def command_options(command: Any) -> set[str]:
    return {spelling for parameter in command.params for spelling in parameter.opts}


@pytest.mark.parametrize(
    "url",
    [
        *("http://", "http://[", "http://h:x", "http://h:99999", "http://h:0", "ftp://h", "h:1", "http://u:p@h"),
        *("http://h?q", "http://\u2603.\udcff", "http://h\n", "http://" + "h" * 3000, "http://\u0130..x"),
    ],
)
def test_an_address_that_cannot_be_one(url: str, eft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFT_URL", url)
    code, _, err = eft("ls")
    assert code == 2 and "EFT_URL" in err, err


@pytest.mark.parametrize("name", ASKED)
def test_strange_names_against_the_service(name: str, eft: Any, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFT_API_KEY", api.key)
    command = ASKED[name]
    places = [one for one in command.params if one.required and not any(o.startswith("-") for o in one.opts)]
    if not places:
        return
    options = [word for word in arguments_of(command) if word.startswith("--") or word in ("5", "2h")]
    for value in ("nix", "../x", "\udcff", "a?b#c", "x" * 3000):
        code, _, err = eft(*name.split(" "), *options, *[value] * len(places), "--url", api.url)
        assert code in {0, 2, 5, 6, 7} and (code == 0 or err.strip()), (name, value, code, err)


# --- commands and options that are not there ---------------------------------------------------------------


def test_every_command_that_is_proposed_exists() -> None:
    for typed, meant in COMMANDS.items():
        assert meant.removeprefix("eft ") in {*ALL, *VERBS}, meant
        assert typed not in TREE.commands
    fields = " ".join(OPTIONS.values())
    for option in re.findall(r"(?<![\w-])--[a-z-]+", fields):
        assert any(option in command_options(command) for command in ALL.values()), option


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("sumbit", "Did you mean 'submit'?"),
        ("keys remove x", "Did you mean 'eft keys revoke'?"),
        ("jobs show", "jobs"),
        ("plan job.yaml --timeout 5", "`submit --wait`"),
        ("submit job.yaml --epochs 5", "`--set training.num_train_epochs=…`"),
        ("submit job.yaml --wiat", "--wait"),
        ("quota set project default --max-running many", "--max-running: 'many' is not a number"),
        ("quota set project default --disk-gb 1TB", "--disk-gb: '1TB' is not a number"),
        ("quota set project default --disk-gb inf", "--disk-gb: 'inf' is not a number"),
        ("quota set project default", "say what to set"),
        ("usage --csv --json", "--csv or --json, not both"),
        ("gpu hold vm/cpu --until yesterday", "--until: 'yesterday' is not a time"),
        (f"files preview file-{'0' * 26}", "--model"),
        ("login", "--key-stdin"),
    ],
)  # fmt: skip
def test_what_was_meant_is_said(typed: str, words: str, eft: Any) -> None:
    code, out, err = eft(*typed.split(" "))
    assert (code, out) == (2, "") and words in err, err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("list", "ls"),
        ("rm JOB", "delete JOB"),
        ("files list", "files ls"),
        ("file delete x", "files rm x"),
        ("model ls", "models list"),
        ("sweeps list", "sweep ls"),
        ("project list", "projects list"),
        ("gpus list", "gpu list"),
    ],
)
def test_another_spelling_of_a_command_is_that_command(typed: str, meant: str) -> None:
    place, words = TREE, typed.split()
    wanted, here = TREE, meant.split()
    while hasattr(wanted, "commands"):
        place, wanted = place.resolve_command(place.context_class(place), words)[1], wanted.commands[here[0]]
        words, here = words[1:], here[1:]
    assert (place.name, place.callback) == (wanted.name, wanted.callback)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no job in it"),
        ("- a\n", "a job is an object"),
        ("model: a\n\tdata: b\n", "job.yaml, line 2, column 1: not valid YAML or JSON: a tab begins the line"),
        ("model: a/b\ndata: openai/gsm8k\n", "write {type: hub, id: openai/gsm8k}"),
        ("model: a/b\ndata: https://x.org/a.jsonl\n", "https://x.org/a.jsonl: addresses are not read; download"),
        ("model: a/b\ndata: .\n", "is a folder"),
        ("model: \x00\n", "job.yaml"),
    ],
)
def test_a_job_file_is_named_with_what_is_wrong(text: str, words: str, eft: Any) -> None:
    Path("job.yaml").write_text(text)
    code, _, err = eft("submit", "job.yaml", "--url", "http://127.0.0.1:1")
    assert code == 2 and words in err and "byte string" not in err, err


@pytest.mark.parametrize(
    "text", ["0x", "٣h", "99999999999d", "1" * 400 + "h", "0001-01-01T00:00", "9999-12-31T23:59", "25:00", ""]
)
def test_a_time_that_no_calendar_has(text: str) -> None:
    try:
        assert re.match(r"\d{4}-", point(text))
    except Exception as error:
        assert "is not a time" in str(error)


# --- who answers, and with which key -----------------------------------------------------------------------


def test_another_web_server_is_no_eft(elsewhere: str, eft: Any) -> None:
    with Client(elsewhere, "eft_x") as lost, pytest.raises(NotEft, match="Is EFT_URL right"):
        lost.jobs()
    code, _, err = eft("show", JOB, "--url", elsewhere)
    assert code == 4 and "not_eft" in err


def test_without_a_key_the_login_is_named(api: Any, eft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFT_API_KEY")
    code, _, err = eft("ls", "--url", api.url)
    assert code == 5 and f"`eft login --url {api.url}`" in err and "kept" not in err
    (tmp_path / "eft").mkdir()
    path = tmp_path / "eft" / "config.toml"
    path.write_text('url = "http://other.lab:8321"\napi_key = "eft_other"\n')
    path.chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, _, err = eft("ls", "--url", api.url)
    assert code == 5 and "The key that is kept is for http://other.lab:8321" in err and "eft_other" not in err


# --- what is printed ---------------------------------------------------------------------------------------


def refusal(*faults: Fault, message: str) -> ApiError:
    return ApiError(message, status=422, code="invalid_spec", field=faults[0].field, faults=faults, request_id="req-1")


def test_one_fault_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = Fault("unknown_field", "unknown field `modle`; did you mean `model`?", "modle")
    print_error(refusal(one, message=f"modle: {one.message}"), Output.make(False))
    err = capsys.readouterr().err
    assert err.count(one.message) == 1 and err.count("modle") == 2 and "(unknown_field)" in err and "req-1" in err
    other = Fault("missing_field", "this field is required", "data")
    print_error(refusal(one, other, message=f"modle: {one.message} (and 1 more)"), Output.make(False))
    err = capsys.readouterr().err
    assert err.count(one.message) == 1 and "2 faults" in err and "data: this field is required" in err
    print_error(refusal(other, message="the file has a fault"), Output.make(False))
    err = capsys.readouterr().err
    assert "the file has a fault" in err and "data: this field is required" in err


def test_a_result_is_told_in_words(api: Any, eft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.jobs.lifecycle.finish import Succeeded

    monkeypatch.setenv("EFT_API_KEY", api.key)
    monkeypatch.setenv("EFT_URL", api.url)
    job_id, token = api.start_job(name="words")
    api.tell(token, {"type": "metrics", "step": 1, "values": {"loss": 3.0}})
    result = {
        "train_loss": 0.7,
        "eval_after": None,
        "stopped_early": False,
        "best": {"step": 3, "restored": True},
        "export": [{"type": "merged", "checked": {"max_difference": 0.001}}, {"type": "gguf"}],
    }
    api.end(token, Succeeded(result))
    shown = eft("show", job_id)[1]
    assert not re.search(r"True|False|None|[\[{'\"]", shown), shown
    assert "merged" in shown and "restored yes" in shown
    code, _, err = eft("metrics", job_id, "--names", "los")
    assert code == 2 and "no curve `los`; it has loss" in err
    assert eft("metrics", job_id, "--names", "los", "--csv")[0] == 2
    assert eft("metrics", job_id, "--names", "loss")[0] == 0
    assert json.loads(eft("metrics", job_id, "--names", "loss", "--json")[1])


def test_ctrl_c_says_what_goes_on(api: Any) -> None:
    job_id = api.submit()["id"]
    come_back = f"the job continues; come back with: eft watch {job_id}"
    for words, said in (((job_id,), come_back), ((job_id, "--json"), come_back), (("--json",), "the jobs continue")):
        child = subprocess.Popen(
            [program(), "watch", *words],
            env=environment(api),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stderr is not None
        first = (child.stdout if "--json" in words else child.stderr).readline()  # it watches
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130 and said in err and "Traceback" not in err, (first, err)
