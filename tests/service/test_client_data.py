"""`eft data check|preview` by hand, without a server: readable, coloured where colours are, JSON where asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from eft.terminal.datasheet import CLOSE, OPEN, print_preview
from rich.console import Console

from tests.support.eft_forks import program

MODULES = ("core.train.entry.data", "core.train.data.preview", "core.train.model.load")
"""What `eft data` starts, and what that imports."""
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("EFT_") and k not in ("NO_COLOR", "FORCE_COLOR")}


def eft(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Nothing listens anywhere, and no key is set."""
    environment = CLEAN | {"EFT_URL": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"} | more
    line = [program(*MODULES), *arguments]
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(tiny_dir, folder / "tiny")
    good = [{"prompt": f"say {n % 3}:", "completion": " \x1b[31mred" if n == 0 else f" {n % 3}"} for n in range(6)]
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 1, "completion": "b"}\n{\n')
    return folder


def test_check_names_every_fault(folder: Path) -> None:
    done = eft("data", "check", "good.jsonl", "bad.jsonl", cwd=folder)
    assert done.returncode == 2
    assert "good.jsonl" in done.stdout and "6 rows, prompt_completion" in done.stdout and "no fault" in done.stdout
    assert "line 2: prompt" in done.stdout and "line 3" in done.stdout
    assert "\x1b" not in done.stdout
    documents = [
        json.loads(line) for line in eft("data", "check", "bad.jsonl", "--json", cwd=folder).stdout.splitlines()
    ]
    assert [(one["ok"], one["fault_count"]) for one in documents] == [(False, 2)]


def test_one_cause_is_one_line(folder: Path) -> None:
    (folder / "same.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 60)
    done = eft("data", "check", "same.jsonl", cwd=folder)
    assert done.returncode == 2 and done.stdout.count("fault") == 1
    assert "lines 1 to 60: " in done.stdout and "--column prompt=question --column completion=answer" in done.stdout
    assert "more" not in done.stdout


def test_what_is_not_learned_is_asked_about(folder: Path) -> None:
    (folder / "labels.csv").write_text("text,intent\nlights on,lights.on\nlights off,lights.off\n")
    told = "--column prompt=text --column completion=intent"
    done = eft("data", "check", "labels.csv", cwd=folder)
    assert done.returncode == 0 and "`intent` is not learned" in done.stdout and told in done.stdout
    mapped = eft("data", "check", "labels.csv", *told.split(), cwd=folder)
    assert "2 rows, prompt_completion" in mapped.stdout and "not learned" not in mapped.stdout
    seen = eft("data", "preview", "labels.csv", "--model", str(folder / "tiny"), cwd=folder)
    assert seen.returncode == 0 and "`intent` is not learned" in seen.stdout, seen.stderr


def test_check_of_a_file_that_is_not_there(folder: Path) -> None:
    done = eft("data", "check", "nope.jsonl", cwd=folder)
    assert done.returncode == 2 and "nope.jsonl cannot be read: No such file" in done.stderr
    among = eft("data", "check", "good.jsonl", "nope.jsonl", "bad.jsonl", cwd=folder)
    assert among.returncode == 2 and "nope.jsonl cannot be read" in among.stderr
    assert "6 rows" in among.stdout and "line 3" in among.stdout


def test_columns_are_held_to_what_an_upload_is_held_to(folder: Path) -> None:
    for pairs, words in (
        (("prompt=completion", "completion=completion"), "two names"),
        (("question=prompt",), "our names"),
        (("prompt=a", "prompt=b"), "twice"),
    ):
        columns = [word for pair in pairs for word in ("--column", pair)]
        done = eft("data", "check", "good.jsonl", *columns, cwd=folder)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_preview_shows_what_is_learned(folder: Path) -> None:
    arguments = ("data", "preview", "good.jsonl", "--model", "tiny", "--set", "training.max_length=16")
    arguments += ("--set", "data.rendering.pairs=joined")
    piped = eft(*arguments, cwd=folder)
    assert piped.returncode == 0, piped.stderr
    assert f"say 1:{OPEN} 1" in piped.stdout and "\x1b" not in piped.stdout
    assert "6 rows of prompt_completion" in piped.stdout and "rows are there more than once" in piped.stdout
    assert "\\u001b[31mred" in piped.stdout  # of the rows a terminal obeys nothing
    asked = eft(*arguments, "--json", cwd=folder)
    document = json.loads(asked.stdout)
    assert document["ok"] and document["max_length"] == 16 and len(document["samples"]) == 6
    assert not list(folder.glob(".eft/**/*.safetensors"))


def test_a_wrong_option_is_told_as_everywhere(folder: Path) -> None:
    done = eft("data", "preview", "good.jsonl", "--model", "tiny", "--set", "training.max_lenght=16", cwd=folder)
    assert done.returncode == 2
    assert "did you mean `max_length`" in done.stderr and "training.max_lenght" in done.stderr and not done.stdout


@pytest.mark.parametrize("colours", [True, False])
def test_colours_or_marks(colours: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {
        "rows": {"file": 1},
        "format": "text",
        "samples": [{"line": 1, "tokens": 2, "label_tokens": 1, "segments": [{"text": "yes", "learned": True}]}],
    }
    print_preview(found, Console(force_terminal=True, no_color=not colours, color_system="standard"))
    out = capsys.readouterr().out
    assert (f"{OPEN}yes{CLOSE}" in out) is not colours
    assert ("\x1b[1;32myes" in out) is colours
