"""The client as others get it: its wheel in an environment of its own, built and filled without asking an index."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent


def build(folder: Path) -> Path:
    """The wheel of client/, built in `folder` from a copy: a build leaves things beside its source."""
    source = folder / "client"
    shutil.copytree(ROOT / "client", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    call = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*call, "-w", str(folder), str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("eft-*.whl")
    return wheel


def environment(folder: Path, *more: str) -> Path:
    """A virtual environment that has what the wheel declares, and `more` distributions, as they are installed here;
    not the wheel itself. Its `pip` installs into it. Returns its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    bin_folder = folder / "bin"
    (site,) = folder.glob("lib/python*/site-packages")
    wanted = [*_declared(), *more]
    done: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in done:
            continue
        done.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if not file.parts[0].startswith("..") and (file.suffix != ".pyc" or file.locate().exists()):
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), target)  # with its time: what is compiled is of a file of that time
        wanted += _needed(distribution.requires or ())
    pip = bin_folder / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {bin_folder}/python "$@"\n')
    pip.chmod(0o755)
    return bin_folder


def _declared() -> list[str]:
    import tomllib

    with (ROOT / "client" / "pyproject.toml").open("rb") as file:
        return _needed(tomllib.load(file)["project"]["dependencies"])


def _needed(requirements: list[str] | tuple[str, ...]) -> list[str]:
    parsed = [Requirement(one) for one in requirements]
    return [one.name.lower() for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
