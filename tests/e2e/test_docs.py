"""Every command that the pages show is run as it stands, page by page, against one real service; or the page says what
it needs that a test has not (`<!-- needs: … -->`), where else it is run (`<!-- run by: … -->`), or that it is shown
alone (`<!-- shown: … -->`). And what pages name is there: files, headings, commands, options, fields of a job.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from eft import Client
from eft.cli import tree
from eft.jobfile import read_job, upload_data, uploader
from eft.manual.source import pages as manual_pages

from api.docs import routes_page
from core.spec.job import JobSpec
from core.spec.load import load_yaml, parse_job
from tests.support import pages
from tests.support.eft_forks import program
from tests.support.hub import serving
from tests.support.pages import Block
from tests.support.service import ROOT, Service, running

PAGES = pages.pages()
RUNNABLE = [page for page in PAGES if any(block.runs for block in pages.blocks(page))]
BEHIND = {ROOT / "docs" / "quick-start.md": [ROOT / "docs" / "methods.md"]}
"""Page → pages that are run behind it. Both of these import peft, which takes a process seconds; methods.md has nothing
else to run."""
TOGETHER = [[page, *BEHIND.get(page, [])] for page in RUNNABLE if not any(page in later for later in BEHIND.values())]
EFT = ("box.doctor", "box.db", "box.backup", "core.train.entry.data")
"""What `eft` becomes or starts on the pages: forks, as it is itself."""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MANUAL = sorted((ROOT / "docs").glob("cli*.md"))
VOICE = ROOT / "examples" / "voice-intents"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- what stands on the pages ------------------------------------------------------------------------


def test_every_block_says_what_it_is() -> None:
    faults = []
    for page in PAGES:
        faults += [f"{name(page)}:{line}: a block without a fence" for line in pages.indented(page)]
        for block in pages.blocks(page):
            if block.language not in (*pages.RUN, *pages.SHOWN):
                faults.append(f"{block}: ```{block.language}: one of {pages.RUN + pages.SHOWN}")
            match block.mark:
                case ("needs", what) if not set(what.split(", ")) <= pages.NEEDS:
                    faults.append(f"{block}: needs {what}: of {sorted(pages.NEEDS)}")
                case ("run by", test) if not (ROOT / test).is_file() or page.name not in (ROOT / test).read_text():
                    faults.append(f"{block}: {test} does not name {page.name}")
                case ("shown", _) if block.language in pages.RUN and page not in MANUAL:
                    faults.append(f"{block}: a command is run, or says what it needs")
    assert not faults, "\n".join(faults)


def test_links_lead_somewhere() -> None:
    faults = []
    for page in PAGES:
        for line, target in pages.links(page):
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists():
                faults.append(f"{name(page)}:{line}: no {target}")
            elif anchor and anchor not in pages.anchors(there):
                faults.append(f"{name(page)}:{line}: no heading #{anchor} in {name(there)}")
    assert not faults, "\n".join(faults)


def test_commands_and_options_are_those_of_the_manual() -> None:
    """The pages of the manual are written from the commands themselves and held fresh by `make check`."""
    own = {one.name: " ".join(flag for option in one.options for flag in option.flags) for one in manual_pages(tree())}
    manual = dict(own)
    for page in MANUAL:
        for section in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]:
            title, _, text = section.partition("\n")
            manual[title] = f"{text} {own[title]}"
    assert len(manual) > 90
    assert all(len(page.read_text().split()) <= 4000 for page in MANUAL), (
        "people read them: give a page its own heading"
    )
    faults = []
    for page in PAGES:
        for place, words in pages.commands(page):
            verbs = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
            known = [n for n in range(len(verbs), 0, -1) if f"eft {' '.join(words[:n])}" in manual]
            if not known:
                if words[0] not in ("--json", "--version", "--help", "help", "man"):
                    faults.append(f"{place}: no command eft {' '.join(words)}")
                continue
            section = manual[f"eft {' '.join(words[: known[0]])}"]
            for option in (word.partition("=")[0] for word in words[known[0] :]):
                if (
                    re.fullmatch(r"--[a-z][a-z-]*", option)
                    and option not in section
                    and "eft keys local" not in section
                ):
                    faults.append(f"{place}: eft {' '.join(words[: known[0]])} has no {option}")
    assert not faults, "\n".join(faults)


def test_parts_of_jobs_are_parts_of_jobs() -> None:
    fields, shown = set(JobSpec.model_fields), 0
    for page in PAGES:
        for block in pages.blocks(page):
            if block.language == "json" and block.mark is None:
                for line in block.text.splitlines():
                    json.loads(line)
            if block.language == "yaml" and block.mark is None:
                for part in re.split(r"^---$", block.text, flags=re.MULTILINE):
                    job = load_yaml(part.replace("file-…", f"file-{'0' * 26}").encode())
                    assert set(job) <= fields, f"{block}: {sorted(set(job) - fields)}"
                    parse_job({"model": MODEL, "data": f"file-{'0' * 26}"} | job)
                    shown += 1
    assert shown > 5


def test_the_reference_of_the_api_is_fresh() -> None:
    assert routes_page.PAGE.read_text(encoding="utf-8") == routes_page.page(), "run `python -m api.docs.routes_page`"


# --- what is run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("docs")
    with serving() as hub:
        hub.repo, hub.files = MODEL, {path.name: path.read_bytes() for path in tiny_dir.iterdir()}
        settings = {
            "HF_ENDPOINT": hub.url,
            "EFT_NODE": "box-1",
            "EFT_SPARE": "1",
            "EFT_CPU_SLOTS": "2",
            "EFT_WEBHOOK_ALLOW": "127.0.0.1",
        }
        yield from running(folder, settings)


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A folder that looks like a checkout with a few rows in it, also where the examples have more."""
    for part in ("client", "deploy", "docs"):
        (tmp_path / part).symlink_to(ROOT / part)
    examples = Path(shutil.copytree(ROOT / "examples", tmp_path / "examples"))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    rows = (VOICE / "train.jsonl").read_text().splitlines(keepends=True)
    for folder in (tmp_path, examples / VOICE.name):
        for file, part in (("rows.jsonl", rows[:8]), ("train.jsonl", rows[:16]), ("heldout.jsonl", rows[16:20])):
            (folder / file).write_text("".join(part))
    return tmp_path


def script(found: list[Block]) -> str:
    """The blocks in their order, in one shell, each told before it begins. Python's that follow one another are one
    program."""
    parts = ["set -euo pipefail"]
    for language, blocks in itertools.groupby(found, lambda block: block.language):
        if language == "bash":
            parts += [f"echo '=== {block}' >&2\n{block.text}" for block in blocks]
        else:
            program = "".join(f"print('=== {block}', file=__import__('sys').stderr)\n{block.text}" for block in blocks)
            parts.append(f"python - <<'END_OF_PROGRAM'\n{program}END_OF_PROGRAM")
    return "\n".join(parts)


def environment(service: Service, sandbox: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("EFT_")}
    return clean | {
        "PATH": f"{Path(program(*EFT)).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EFT_URL": service.note()["url"],
        "EFT_API_KEY": service.key,
        "EFT_HOME": str(ROOT),
        "EFT_DATA": str(service.data),
        "HF_ENDPOINT": service.environment["HF_ENDPOINT"],
        "HF_HOME": str(sandbox / "hf"),
        "HOME": str(sandbox),
        "XDG_CONFIG_HOME": str(sandbox / "config"),
        "BACKUP": str(sandbox / "backup"),
        "NO_COLOR": "1",
    }


@pytest.mark.timeout(900)  # users.md alone starts forty processes; a busy machine takes minutes for them
@pytest.mark.parametrize("together", TOGETHER, ids=lambda together: "+".join(map(name, together)))
def test_the_pages_commands_run_as_they_stand(together: list[Path], service: Service, sandbox: Path) -> None:
    ran = subprocess.run(
        ["bash", "-c", script([block for page in together for block in pages.blocks(page) if block.runs])],
        cwd=sandbox,
        env=environment(service, sandbox),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}\n{service.log()[-2000:]}"


def test_the_recipes_are_jobs_for_the_service(service: Service, sandbox: Path) -> None:
    files = sorted((sandbox / "examples" / "recipes").glob("*.yaml"))
    with Client(service.note()["url"], service.key) as client:
        for file in files:
            spec, folder = read_job(str(file))
            resolved = client.resolve(upload_data(spec, folder, {}, uploader(client)))
            assert resolved["name"] == file.stem
    page = (ROOT / "examples" / "recipes" / "README.md").read_text()
    assert len(files) >= 9 and [file.name for file in files if f"({file.name})" not in page] == []
