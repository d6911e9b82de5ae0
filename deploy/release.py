"""`python -m deploy.release`: the files of a release, made from the last commit and from nothing else.

    eft-VERSION.tar.gz            source archive, from which the service is installed
    eft-VERSION-py3-none-any.whl  the client: the `eft` command and its Python package
    eft-VERSION.cdx.json          bill of materials (CycloneDX 1.6) of locks/app.txt; torch is chosen at installation
    SHA256SUMS                    for `sha256sum -c`
    NOTES.md                      section of the changelog

The same commit gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from io import BytesIO
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
TOOLS = HOME / ".venv" / "release"
"""Where `make dist` installs locks/release.txt."""
UNRELEASED = "Unreleased"


class Refused(Exception):
    """A release that cannot be made, with the reason."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(HOME), *arguments], check=True, capture_output=True).stdout


def version(source: Path) -> str:
    """The version that all places of the source state. Raises Refused where they differ."""
    with (source / "pyproject.toml").open("rb") as file:
        stated = {"pyproject.toml": tomllib.load(file)["project"]["version"]}
    found = re.search(r'^VERSION = "(.+)"$', (source / "client/eft/version.py").read_text(encoding="utf-8"), re.M)
    stated["client/eft/version.py"] = found[1] if found else ""
    if len(set(stated.values())) != 1:
        raise Refused(f"the versions differ: {stated}")
    return stated["pyproject.toml"]


def notes(source: Path, name: str) -> str:
    """The section `name` of CHANGELOG.md. Raises Refused where there is none."""
    text = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(name)}\].*?\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    if found is None:
        raise Refused(f"CHANGELOG.md has no section [{name}]")
    return found[1].strip() + "\n"


def archive(name: str) -> bytes:
    """The last commit as a tar.gz below the folder `name`, without the time of its making."""
    packed = BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(git("archive", "--format=tar", f"--prefix={name}/", "HEAD"))
    return packed.getvalue()


def wheel(source: Path, into: Path, epoch: str) -> None:
    """The client's wheel, built from `source` by the setuptools of this environment."""
    call = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    subprocess.run([*call, "-w", str(into), str(source / "client")], check=True, env=environment)


def materials(source: Path, target: Path) -> None:
    """The bill of materials of what `make install` installs by hash."""
    call = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
    call += ["--spec-version", "1.6", "--output-format", "JSON", "--mc-type", "application"]
    call += ["--pyproject", str(source / "pyproject.toml"), "-o", str(target), str(source / "locks/app.txt")]
    subprocess.run(call, check=True, env=os.environ | {"PYTHONPATH": str(TOOLS)}, cwd=source)


def make(into: Path, tag: str | None) -> list[Path]:
    """Write the files of the release into the empty or new folder `into`. `tag`: `vVERSION`; None: a snapshot, whose
    notes are those of [Unreleased]. Raises Refused."""
    if git("status", "--porcelain"):
        raise Refused("there are changes that are not committed: commit or stash them")
    if into.exists() and any(into.iterdir()):
        raise Refused(f"{into} is not empty")
    epoch = git("show", "-s", "--format=%ct", "HEAD").decode().strip()
    with tempfile.TemporaryDirectory(prefix="eft-release-") as folder:
        with tarfile.open(fileobj=BytesIO(git("archive", "--format=tar", "HEAD"))) as files:
            files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it since 3.11.4
            files.extractall(folder)  # noqa: S202 -- our own commit
        source = Path(folder)
        number = version(source)
        if tag not in (None, f"v{number}"):
            raise Refused(f"the tag is {tag} and the version is {number}")
        told = notes(source, UNRELEASED if tag is None else number)
        into.mkdir(parents=True, exist_ok=True)
        (into / f"eft-{number}.tar.gz").write_bytes(archive(f"eft-{number}"))
        wheel(source, into, epoch)
        materials(source, into / f"eft-{number}.cdx.json")
    made = sorted(into.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made)
    (into / "SHA256SUMS").write_text(sums, encoding="utf-8")
    (into / "NOTES.md").write_text(told, encoding="utf-8")
    return [*made, into / "SHA256SUMS", into / "NOTES.md"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description="Make the files of a release.")
    parser.add_argument("--into", type=Path, default=HOME / "dist", help="folder, empty or new (default: dist)")
    parser.add_argument("--tag", help="tag of the release, vVERSION; without it a snapshot is made")
    given = parser.parse_args()
    try:
        for path in make(given.into, given.tag):
            print(f"{path.stat().st_size:>12}  {path}")
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
