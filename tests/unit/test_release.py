"""A release of this very commit: archive, wheel, checksums and bill of materials; and the workflow that makes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML  # 1.2, where `on` is a word

from core import HOME
from deploy import release
from tests.support.official import validator

AUTHOR = ("-c", "user.name=eft", "-c", "user.email=eft@example.org", "-c", "commit.gpgsign=false")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository whose one commit is this tree; releases are made of it."""
    folder = tmp_path_factory.mktemp("release")
    store, tree = folder / "store.git", folder / "eft"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", store], check=True)
    here = ["git", f"--git-dir={store}", f"--work-tree={HOME}"]
    subprocess.run([*here, "add", "--all", "."], cwd=HOME, check=True)
    subprocess.run([*here, *AUTHOR, "commit", "-q", "-m", "This tree"], cwd=HOME, check=True)
    subprocess.run(["git", "clone", "-q", store, tree], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release, "HOME", tree)
        yield tree


@pytest.fixture(scope="module")
def made(checkout: Path) -> Path:
    """The files of a snapshot of it."""
    release.make(checkout.parent / "dist", None)
    return checkout.parent / "dist"


def test_the_archive_is_the_commit_and_the_sums_hold(checkout: Path, made: Path) -> None:
    number = release.version(checkout)
    tracked = release_files(checkout)
    with tarfile.open(made / f"eft-{number}.tar.gz") as archive:
        names = {member.name.removeprefix(f"eft-{number}/") for member in archive if not member.isdir()}
    assert names == tracked
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=made, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == 3
    assert (made / "NOTES.md").read_text().startswith("### Added")
    again = release.archive(f"eft-{number}")
    assert (made / f"eft-{number}.tar.gz").read_bytes() == again, "the same commit gives the same bytes"


def release_files(checkout: Path) -> set[str]:
    listed = subprocess.run(["git", "-C", checkout, "ls-files", "-z"], check=True, capture_output=True).stdout
    return {name for name in listed.decode().split("\0") if name}


def test_the_wheel_has_every_module_of_the_client(checkout: Path, made: Path) -> None:
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        dates = {entry.date_time for entry in packed.infolist()}
    sources = {str(path.relative_to(checkout / "client")) for path in (checkout / "client/eft").rglob("*.py")}
    assert sources <= names, "a package is missing in client/pyproject.toml"
    assert len(dates) == 1, "the commit's time, so that it can be built again"


def test_the_bill_of_materials_is_the_lock(checkout: Path, made: Path) -> None:
    (path,) = made.glob("*.cdx.json")
    bill = json.loads(path.read_text())
    lock = (checkout / "locks/app.txt").read_text()
    pins = set(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^ ;\\]+)", lock, re.M))
    assert pins and {(one["name"], one["version"]) for one in bill["components"]} == pins
    assert bill["specVersion"] == "1.6" and bill["metadata"]["component"]["name"] == "eft-service"
    assert all(one["externalReferences"][0]["hashes"] for one in bill["components"])


def test_what_is_no_release_is_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(release.Refused, match=r"the tag is v99.0.0 and the version is "):
        release.make(tmp_path / "a", "v99.0.0")
    with pytest.raises(release.Refused, match=r"has no section \[99.0.0\]"):
        release.notes(checkout, "99.0.0")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old.whl").touch()
    with pytest.raises(release.Refused, match="not empty"):
        release.make(tmp_path / "b", None)
    (checkout / "stray").touch()
    try:
        with pytest.raises(release.Refused, match="not committed"):
            release.make(tmp_path / "c", None)
    finally:
        (checkout / "stray").unlink()
    assert not (tmp_path / "a").exists() and not (tmp_path / "c").exists()


def test_the_workflow_runs_what_stands_here() -> None:
    path = HOME / ".github" / "workflows" / "release.yml"
    workflow = YAML(typ="safe").load(path)
    assert not list(validator("github-workflows").iter_errors(workflow))
    (job,) = workflow["jobs"].values()
    lines = "\n".join(step.get("run", "") for step in job["steps"])
    for target in re.findall(r"make (?:-C \S+ )?(\w+)", lines):
        assert re.search(rf"^{target}:", (HOME / "Makefile").read_text(), re.M), target
    assert "sha256sum -c SHA256SUMS" in lines and "pipx install dist/eft-*.whl" in lines
    done = subprocess.run([sys.executable, "-m", "deploy.release", "--help"], cwd=HOME, capture_output=True, text=True)
    assert done.returncode == 0 and "--tag" in done.stdout
