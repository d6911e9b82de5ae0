"""The command's verbs about several jobs, its manual, and completion in real shells; against a real API."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from eft.cli import app, tree
from eft.conditions import Condition, figures
from eft.errors import UsageFault
from eft.manual.completion import offers
from eft.manual.delegated import parse
from eft.manual.formats import roff
from eft.manual.source import find, pages
from eft.terminal.comparison import Comparison, differences, flat, written
from eft.types import Job
from typer.testing import CliRunner

from core.jobs.lifecycle.finish import Failed, Succeeded
from tests.support.client import environment
from tests.support.eft_forks import program

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE_JOB = "job-01kar3v8x5m2h6n9qst4wyz0bc"


@pytest.fixture
def eft(api: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command in this process, which takes milliseconds; its environment as `tests.support.client` has it."""
    for name in [name for name in os.environ if name.startswith("EFT_") or name == "COLUMNS"]:
        monkeypatch.delenv(name)
    told = environment(api)
    for name in ("EFT_URL", "EFT_API_KEY", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, told[name])
    return lambda *arguments: CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def jobs(api: Any) -> tuple[str, str, str]:
    """Two that succeeded, with other results, and one that failed."""
    made = []
    outcomes = [
        Succeeded({"train_loss": 0.7, "eval_before": {"eval_loss": 2.0}, "eval_after": {"eval_loss": 0.83}}),
        Succeeded({"train_loss": 0.4, "eval_before": {"eval_loss": 2.0}, "eval_after": {"eval_loss": 0.79, "f1": 0.5}}),
        Failed("user", "bad_rows", "row 3 is bad", "data.train"),
    ]
    for number, outcome in enumerate(outcomes):
        job_id, token = api.start_job(name=f"run {number}", method={"type": "lora", "r": 8 * (number + 1)})
        loss = [{"type": "metrics", "step": n, "values": {"loss": 3.0 - n - number, "lr": 0.1}} for n in (1, 2)]
        api.tell(token, *loss)
        api.end(token, outcome)
        made.append(job_id)
    return made[0], made[1], made[2]


# --- compare and diff --------------------------------------------------------------------------------


def test_compare(eft: Any, jobs: tuple[str, str, str]) -> None:
    first, second, _ = jobs
    told = json.loads(eft("compare", first, second, "--json").stdout)
    assert told["spec"]["method.r"] == [8, 16] and "name" not in told["spec"]
    assert told["figures"]["eval_after.eval_loss"] == [0.83, 0.79] and told["figures"]["loss"] == [1.0, 0.0]
    assert told["figures"]["eval_after.f1"] == [None, 0.5]
    rows = list(csv.reader(io.StringIO(eft("compare", first, second, "--csv", "--names", "eval_loss").stdout)))
    assert rows[0] == ["kind", "field", first, second] and ["spec", "method.r", "8", "16"] in rows
    assert [row[1:] for row in rows if row[0] == "figure"] == [
        ["eval_before.eval_loss", "2.0", "2.0"],
        ["eval_after.eval_loss", "0.83", "0.79"],
    ]
    assert "| eval_after.eval_loss | 0.83 | 0.79 |" in eft("compare", first, second, "--markdown").stdout
    shown = eft("compare", *jobs).stdout
    assert re.search(r"^method\.r +8 +16 +24 *$", shown, re.MULTILINE), shown
    assert re.search(r"^status +succeeded +succeeded +failed *$", shown, re.MULTILINE)
    two = eft("compare", first, second).stdout
    assert "DIFFERENCE" in two and re.search(
        r"^eval_after\.eval_loss +0\.83 +0\.79 +-0\.04 \(-4\.8%\) *$", two, re.MULTILINE
    ), two
    assert "data.train.id" not in two or "rows.jsonl (…" in two, "files by their names"
    assert eft("compare", first).exit_code == 2 and eft("compare", first, second, "--csv", "--json").exit_code == 2


def test_what_people_read_of_a_job(eft: Any, jobs: tuple[str, str, str]) -> None:
    """Times to the second with their zone; and that its model was prepared first is no second try."""
    job = json.loads(eft("show", jobs[0], "--json").stdout)
    assert (job["attempt"], job["training_attempts"]) == (2, 1)
    shown = eft("show", jobs[0]).stdout
    assert "attempt" not in shown, shown
    assert (
        len(re.findall(r"^(created|started|finished) +\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ *$", shown, re.MULTILINE)) == 3
    ), shown


def test_compare_says_what_method_auto_came_to() -> None:
    about = {"status": "succeeded", "created_at": "2026-01-01T00:00:00Z", "spec": {"method": {"type": "auto"}}}
    full, packed = (Job.parse({"id": rung, "settled": {"rung": rung}, **about}) for rung in ("full", "qlora"))
    assert Comparison.of([full, packed], [{}, {}]).as_dict()["spec"] == {"settled": ["full", "qlora"]}
    assert Comparison.of([full, full], [{}, {}]).spec == {}


def told_spec(eft: Any, job_id: str) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(eft("show", job_id, "--json").stdout)["spec"]
    return spec


def test_diff(eft: Any, jobs: tuple[str, str, str], tmp_path: Path) -> None:
    first, second, _ = jobs
    lines = eft("diff", first, second).stdout.splitlines()
    assert {"- method.r: 8", "+ method.r: 16", "- name: run 0", "+ name: run 1"} <= set(lines)
    assert not any("learning_rate" in line for line in lines)
    (tmp_path / "job.yaml").write_text(
        "model: HuggingFaceTB/SmolLM2-135M-Instruct\ndata: {train: here.jsonl}\nmethod: {type: lora, r: 4}\n"
    )
    told = json.loads(eft("diff", first, tmp_path / "job.yaml", "--json").stdout)
    assert told["method.r"] == [8, 4] and not any(name.startswith("data") for name in told)
    plain = {"model": told_spec(eft, first)["model"], "data": "here.jsonl", "method": {"type": "lora", "r": 8}}
    (tmp_path / "same.yaml").write_text(json.dumps(plain))  # YAML has JSON in it
    assert json.loads(eft("diff", first, tmp_path / "same.yaml", "--json").stdout) == {"name": ["run 0", None]}
    (tmp_path / "other.yaml").write_text((tmp_path / "job.yaml").read_text().replace("{type: lora, r: 4}", "full"))
    told = json.loads(eft("diff", tmp_path / "job.yaml", tmp_path / "other.yaml", "--json").stdout)
    assert told == {"method.type": ["lora", "full"], "method.r": [4, None]}


def test_flat_specs() -> None:
    spec = {"a": {"b": [1, 2], "c": [{"d": 1}, {"d": 2}]}, "e": {}, "f": None}
    assert flat(spec) == {"a.b": [1, 2], "a.c[0].d": 1, "a.c[1].d": 2, "e": {}, "f": None}
    assert list(differences([spec, spec | {"f": 0}])) == ["f"]
    assert written({"method": "lora", "model": "x", "data": "y"}) == {
        "method": {"type": "lora"},
        "model": "x",
        "data": "y",
    }


# --- conditions --------------------------------------------------------------------------------------


def test_check(eft: Any, jobs: tuple[str, str, str], api: Any) -> None:
    good, better, failed = jobs
    assert eft("check", good).exit_code == 0 and eft("check", failed, "--fail-if", "eval_loss > 1").exit_code == 1
    done = eft("check", good, "--fail-if", "eval_loss > 0.8", "--fail-if", "train_loss>=0.8")
    assert done.exit_code == 8
    assert "fails: eval_loss > 0.8 (eval_loss is 0.83)" in done.stdout and "passes: train_loss >= 0.8" in done.stdout
    told = json.loads(eft("check", better, "--fail-if", "eval_loss > 0.8", "--json").stdout)
    assert told["conditions"] == [{"condition": "eval_loss > 0.8", "value": 0.79, "failed": False}]
    missing = eft("check", good, "--fail-if", "f1 < 0.9")
    assert missing.exit_code == 2 and "eval_after.eval_loss" in missing.stderr
    assert eft("check", good, "--fail-if", "eval_loss above 1").exit_code == 2
    waiting = api.submit()["id"]
    assert eft("check", waiting).exit_code == 2
    api.http.post(f"/jobs/{waiting}/cancel")
    assert eft("check", waiting, "--wait", "--fail-if", "eval_loss > 1").exit_code == 3


def test_what_is_no_number_fails() -> None:
    found = figures(
        {"eval_after": {"eval_loss": math.nan}, "words": "x", "done": True}, {"loss": [(1, 2.0), (2, None)]}
    )  # type: ignore[list-item]
    assert set(found) == {"eval_after.eval_loss", "loss"}
    for text in ("eval_loss > 1", "eval_loss < 1", "loss == 3"):
        assert Condition.parse(text).holds(found)
    assert Condition.parse(" a.b<=-1.5e-3 ") == Condition("a.b", "<=", -0.0015)
    with pytest.raises(UsageFault, match=r"x\.loss or y\.loss"):
        Condition.parse("loss > 1").holds({"x.loss": 1.0, "y.loss": 2.0})


# --- open, nodes -------------------------------------------------------------------------------------


def test_an_upload_prints_the_notices_of_its_check(eft: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "completion": "a", "label": "x"}\n')
    done = eft("files", "upload", path)
    assert done.exit_code == 0 and re.fullmatch(r"file-\w+\n", done.stdout), done.stderr
    assert "notice" in done.stderr and "`label`" in done.stderr
    notices = json.loads(eft("files", "upload", path, "--json").stdout)["report"]["notices"]
    assert notices and all(notice["message"].split("`")[0] in done.stderr.replace("\n", " ") for notice in notices)


def test_open_brings_the_file(eft: Any, api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert eft("open").stdout == f"{api.url}/docs\n"
    job_id, token = api.start_job()
    folder = api.layout.artifacts(job_id, token.attempt)
    folder.mkdir(parents=True)
    (folder / "loss.png").write_bytes(b"png")
    sha256 = hashlib.sha256(b"png").hexdigest()
    api.end(token, Succeeded({}, [{"path": "loss.png", "kind": "plot", "bytes": 3, "sha256": sha256}]))
    target = Path(eft("open", job_id).stdout.strip())
    assert target.read_bytes() == b"png" and target.parent.parent.stat().st_mode & 0o777 == 0o700
    assert eft("open", job_id, "adapter").exit_code == 2
    shown, there = json.loads(eft("nodes", "--json").stdout), api.http.get("/nodes").json()
    assert [node["name"] for node in shown["data"]] == [node["name"] for node in there["data"]]


# --- the manual --------------------------------------------------------------------------------------


def commands() -> list[Any]:
    return [page for page in pages(tree()) if not page.commands]


def test_every_command_is_described() -> None:
    for page in pages(tree()):
        assert page.summary, page.name
        for one in (*page.arguments, *page.options):
            assert one.help.endswith((".", "!", "?", ")", "…")), f"{page.name} {one.shown}: no help"
        assert page.examples or page.commands or page.module, f"{page.name} has no example: @manual(examples=[…])"
        assert page.exits or page.module, page.name


def test_every_example_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line parses: its command is there, and so are its options and arguments."""
    monkeypatch.setenv("CI_PIPELINE_ID", "1")
    root = tree()
    for page in pages(root):
        shown: set[tuple[str, ...]] = set()
        for line, purpose in page.examples:
            assert purpose.endswith((".", "?")), (page.name, line)
            _, _, ours = os.path.expandvars(line).partition("eft ")
            reader = shlex.shlex(ours, posix=True, punctuation_chars="()|>")
            reader.whitespace_split = True
            words = list(takewhile(lambda word: word not in {"|", ">", ")"}, reader))
            command, path = root, []
            while words and find(command, words[:1]) is not None:
                path.append(words.pop(0))
                command = find(root, path)
            shown.add(tuple(path))
            if not getattr(command, "commands", None) and page.module is None:
                command.make_context(path[-1], words)
        assert not page.examples or not page.path or page.path in shown, f"{page.name}: its examples are of others"


def test_help_is_the_manual(eft: Any) -> None:
    assert "eft download JOB [ARTIFACT...] [OPTION]…" in eft("help", "download").stdout
    told = eft("help", "submit").stdout
    assert told == eft("submit", "--help").stdout.rstrip("\n") + "\n"
    assert "At least 0. Default: 300." in " ".join(told.split()) and "  8  the job has succeeded and" in told
    wrong = eft("help", "kyes", "create")
    assert wrong.exit_code == 2 and "did you mean `eft help keys create`?" in wrong.stderr
    mistyped = eft("cancle")
    assert mistyped.exit_code == 2 and "Did you mean 'cancel'?" in mistyped.stderr
    assert "Run the whole service" in eft("help").stdout
    narrow = subprocess.run(
        [program(), "help"], env=os.environ | {"COLUMNS": "60"}, capture_output=True, text=True, check=True
    )
    assert all(len(line.rstrip()) <= 60 for line in narrow.stdout.splitlines() if not line.startswith("  eft "))
    assert "\x1b" not in narrow.stdout


def test_the_page_for_man() -> None:
    page = roff([one for one in pages(tree()) if one.path[:1] in ((), ("submit",), ("keys",))])
    assert page.startswith('.TH "EFT" 1 ') and ".SH EXIT STATUS" in page and "\\-\\-fail\\-if" in page
    assert not re.search(r"^[.'](?![A-Z]{2}|[BI] |nf|fi|RE|RS)", page, re.MULTILINE), "a line of text begins a request"
    if (man := shutil.which("man")) and (groff := shutil.which("groff")):
        assert man
        done = subprocess.run([groff, "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True)
        assert "cannot" not in done.stderr and "eft submit FILE" in re.sub(r".\x08|\x1b\[[0-9;]*m", "", done.stdout)


def test_the_help_of_the_box_is_read() -> None:
    text = (
        "usage: python -m box.x [-h] [--port PORT]\n\nWords.\n\npositional arguments:\n  DEST             where\n\n"
        "options:\n  -h, --help       show\n  --port PORT      port to listen on,\n                   0 for any\n"
        "  --a-rather-long-option VALUE\n                   said below\n\nexamples:\n  eft x a   words of it\n"
    )
    assert parse(text) == [
        ("Arguments", [("DEST", "where")]),
        (
            "Options",
            [("-h, --help", "show"), ("--port PORT", "port to listen on, 0 for any"),
             ("--a-rather-long-option VALUE", "said below")],
        ),
        ("Examples", [("eft x a", "words of it")]),
    ]  # fmt: skip


# --- completion --------------------------------------------------------------------------------------


@pytest.fixture
def offered(eft: Any) -> Any:
    root = tree()
    return lambda *words: {value for value, _ in offers(root, words)[1]}


def test_what_completion_offers(offered: Any, eft: Any, api: Any, jobs: tuple[str, str, str]) -> None:
    assert (
        {"submit", "watch", "worker", "whoami", "webhooks"} >= offered("w") == {"watch", "worker", "whoami", "webhooks"}
    )
    assert offered("keys", "re") == {"revoke"} and offered("help", "keys", "c") == {"create"}
    assert set(jobs) <= offered("show", "job-") and offered("show", jobs[0][:-1]) >= {jobs[0]}
    assert jobs[2] in offered("retry", "") and jobs[0] not in offered("retry", "")
    assert jobs[1] in offered("compare", jobs[0], "") and jobs[1] in offered("logs", "-n", "5", "")
    assert offered("ls", "--status", "ru") == {"running"} and offered("ls", "--na") == {"--name"}
    assert "--name" not in offered("ls", "--name", "x", "--") and "--set" in offered("submit", "--set", "a=1", "--s")
    assert offered("completion", "") == {"bash", "zsh", "fish"}
    assert offers(tree(), ["submit", ""]) == (True, []) and offers(tree(), ["ls", ""]) == (False, [])
    file_id = api.http.get("/files").json()["data"][0]["id"]
    assert file_id in offered("files", "get", "") and "--key-file" in offered("up", "--k")
    assert not offered("nonsense", "")


def test_a_server_that_does_not_answer_offers_nothing(offered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFT_URL", "http://127.0.0.1:1")
    assert offered("show", "") == set()
    monkeypatch.setenv("EFT_URL", "no address")
    assert offered("show", "") == set()


def shells() -> list[Any]:
    """How each shell is asked what its Tab would offer, without a terminal; zsh has no such way."""
    bash = pytest.param(
        ["bash", "--norc", "-c"],
        'source <(eft completion bash); COMP_WORDS=({words} ""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
        'COMP_WORDS[COMP_CWORD]="{current}"; _eft_complete; printf "%s\\n" "${{COMPREPLY[@]}}"',
        id="bash",
    )
    fish = pytest.param(
        ["fish", "--no-config", "-c"],
        'eft completion fish | source; complete -C "{words} {current}"',
        id="fish",
        marks=pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here"),
    )
    return [bash, fish]


@pytest.mark.parametrize(("shell", "script"), shells())
def test_a_shell_completes(api: Any, jobs: tuple[str, str, str], shell: list[str], script: str, tmp_path: Path) -> None:
    (tmp_path / "my job.yaml").touch()
    variables = environment(api, PATH=f"{Path(program()).parent}:{os.environ['PATH']}", HOME=str(tmp_path))
    for words, current, wanted in (
        ("eft show", jobs[0][:-2], jobs[0]),
        ("eft submit", "my", "my job.yaml"),
    ):
        line = script.format(words=words, current=current)
        done = subprocess.run([*shell, line], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
        got = {row.split("\t")[0].replace("\\", "") for row in done.stdout.splitlines()}
        assert wanted in got, (done.stdout, done.stderr)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_reads_its_script(api: Any) -> None:
    variables = environment(api, PATH=f"{Path(program()).parent}:{os.environ['PATH']}")
    script = "autoload -Uz compinit; compinit -D -u; source <(eft completion zsh); print $_comps[eft]"
    done = subprocess.run(["zsh", "-f", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "_eft_complete", done.stderr
