"""Every `python -m …` of the application answers --help and refuses what it does not know, before it does anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from core import HOME

ALL = """
import contextlib, io, json, os, runpy, sys
told = {}
for module in sys.argv[1:]:
    for word in ("--help", "--no-such-option"):
        sys.argv = [module, word]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = "it went on"
        except SystemExit as end:
            code = end.code
        told[f"{module} {word}"] = [code, (err if word == "--no-such-option" else out).getvalue()]
told["torch"] = "torch" in sys.modules
sys.stdout.write(json.dumps(told))
sys.stdout.flush()
os._exit(0)
"""
"""One process for all of them: it is what they import that takes its time."""


ELSEWHERE = "_program.py"
"""Ends the names of programs that import what is not in eft's environment; they take what their caller gives them."""


def entries() -> list[str]:
    found = []
    for folder in ("api", "worker", "box", "core"):
        for path in sorted((HOME / folder).glob("**/*.py")):
            if path.name.endswith(ELSEWHERE):
                continue
            if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8"):
                parts = path.relative_to(HOME).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("entries")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    done = subprocess.run(
        [sys.executable, "-c", ALL, *entries()],
        cwd=folder, env=environment | {"EFT_DATA": str(folder / "data"), "PYTHONPATH": str(HOME)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "nothing was made"
    found = json.loads(done.stdout)
    assert found.pop("torch") is False, "help does not wait for torch"
    return {name: (code, text) for name, (code, text) in found.items()}


@pytest.mark.parametrize("module", entries())
def test_it_says_what_it_takes(module: str, told: dict[str, tuple[int, str]]) -> None:
    code, text = told[f"{module} --help"]
    assert code == 0 and text.startswith("usage: "), text
    code, text = told[f"{module} --no-such-option"]
    assert code == 2 and text.startswith("usage: ") and "error: " in text, text
