"""The README's lines as they stand, and `eft` as people use it, against the whole service: API, worker, trainer.

The model's name in them is a real one; a hub of our own on this machine serves a tiny model under it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from core.data.check import FileCheck
from core.spec.load import load_json, load_yaml, parse_job
from core.spec.pipeline import parse_pipeline
from core.spec.sweep import job_at, parse_sweep, points
from tests.support import pages
from tests.support.client import EFT
from tests.support.eft_forks import program
from tests.support.hub import serving
from tests.support.service import ROOT, Service, running, wait_for

EXAMPLES = ROOT / "examples"
VOICE = EXAMPLES / "voice-intents"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(language: str) -> list[str]:
    """Of README.md: those that it says are run here, and job files."""
    here = ("run by", "tests/e2e/test_readme.py")
    found = [block for block in pages.blocks(ROOT / "README.md") if block.language == language]
    return [block.text for block in found if language == "yaml" or block.mark == here]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("readme")
    files = {path.name: path.read_bytes() for path in tiny_dir.iterdir()}
    with serving() as hub:
        hub.repo, hub.files = MODEL, files
        yield from running(folder, {"HF_ENDPOINT": hub.url, "EFT_NODE": "readme"})


def environment(service: Service) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    path = f"{Path(program()).parent}:{Path(EFT).parent}:{os.environ['PATH']}"
    address = {"EFT_URL": service.note()["url"], "EFT_API_KEY": service.key}
    return clean | address | {"XDG_CONFIG_HOME": "/nonexistent", "PATH": path}


def eft(service: Service, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line, variables = [program(), *arguments], environment(service)
    return subprocess.run(line, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=120)


# --- the README --------------------------------------------------------------------------------------


def test_curl_lines_run_as_they_stand(service: Service, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)  # loss.png must not land in the checkout
    script = "set -euo pipefail\n" + "\n".join(blocks("bash"))
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(service), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for words in (
        '"to":"succeeded"',
        "event: end",
        '{"loss":[[1,',
        '"adapter/',
        '"dry_run":true',
        "did you mean `method`?",
    ):
        assert words in ran.stdout, ran.stdout


def test_the_python_lines_run_as_they_stand(service: Service, tmp_path: Path) -> None:
    rows = (VOICE / "train.jsonl").read_text().splitlines(keepends=True)[:8]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    [program] = blocks("python")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(service),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


# --- the examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES.rglob("*") if p.suffix in (".yaml", ".json")], ids=lambda p: p.name
)
def test_every_example_is_a_job(path: Path) -> None:
    load = load_json if path.suffix == ".json" else load_yaml
    document = load(path.read_bytes())
    if "steps" in document:
        jobs = [step.job for step in parse_pipeline(document).steps]  # the service parses them with their models
    elif "sweep" in document:
        sweep, job = parse_sweep(document)
        jobs = [job_at(job, point) for point in points(sweep)]
    else:
        jobs = [document]
    for job in jobs if "steps" not in document else ():
        parse_job(job)
    for job in jobs:
        data = job["data"] if isinstance(job["data"], dict) else {"train": job["data"]}
        for part in (data["train"], data.get("eval", data["train"])):
            found = part if isinstance(part, dict) else {"path": part}
            if found.get("type") in ("task", "game"):
                continue  # have no file
            sources = [one["source"] for one in found["sources"]] if "sources" in found else [found["path"]]
            assert all((path.parent / source).is_file() for source in sources)


def test_the_readmes_job_file_is_a_job() -> None:
    for text in blocks("yaml"):
        assert yaml.safe_load(text)["name"] == "voice-intents"
        parse_job(load_yaml(text.encode()))


def test_voice_intents_hold_out_what_they_say() -> None:
    rows = {}
    for name, count in (("train", 84), ("heldout", 60)):
        content = (VOICE / f"{name}.jsonl").read_bytes()
        checker = FileCheck("messages")
        checker.feed(content)
        report = checker.finish()
        assert report.ok and report.rows == count
        rows[name] = [json.loads(line)["messages"] for line in content.splitlines()]
    words = {name: [re.sub(r"\W+", " ", m[1]["content"]).strip().lower() for m in all_] for name, all_ in rows.items()}
    assert len(set(words["train"])) == 84 and len(set(words["heldout"])) == 60
    assert not set(words["train"]) & set(words["heldout"])
    labels = {name: sorted(m[2]["content"] for m in all_) for name, all_ in rows.items()}
    intents = sorted(set(labels["train"]))
    assert len(intents) == 12 and all(f"`{intent}`" in (VOICE / "README.md").read_text() for intent in intents)
    assert labels["train"] == sorted(intents * 7) and labels["heldout"] == sorted(intents * 5)


# --- the command, over the whole service -------------------------------------------------------------


def test_submit_wait_and_download(service: Service, tmp_path: Path) -> None:
    done = eft(service, "submit", str(VOICE / "job.yaml"), "--set", "training.max_steps=3", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    assert job["status"] == "succeeded" and job["result"]["steps"] == 3
    assert "evaluation at step 3: eval_loss" in done.stderr and "step 3/3  loss" in done.stderr
    out = eft(service, "download", job["id"], "adapter", "loss.png", "-o", str(tmp_path))
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file() and (tmp_path / "loss.png").is_file()
    curves = json.loads(eft(service, "metrics", job["id"], "--names", "loss", "--json").stdout)
    assert [step for step, _ in curves["loss"]] == [1, 2, 3]
    assert eft(service, "metrics", job["id"], "--csv").stdout.startswith("name,step,value\n")
    followed = eft(service, "logs", job["id"], "-f")
    assert followed.returncode == 0 and followed.stdout == eft(service, "logs", job["id"]).stdout


def test_a_job_that_fails(service: Service) -> None:
    done = eft(service, "submit", str(VOICE / "job.yaml"), "--set", "model=nobody/nothing", "--wait")
    assert done.returncode == 1, done.stderr
    assert "model_not_found" in done.stdout and "nobody/nothing" in done.stdout


def test_a_job_that_is_cancelled_while_it_runs(service: Service) -> None:
    job_id = eft(service, "submit", str(VOICE / "job.yaml"), "--set", "training.max_steps=100000").stdout.strip()
    service.wait_for_step(job_id, 2)
    watcher = subprocess.Popen(
        [program(), "watch", job_id], env=environment(service), stdout=subprocess.PIPE, text=True
    )
    done = eft(service, "cancel", job_id, "--wait")
    assert done.stdout == f"{job_id} cancelled\n"
    assert watcher.wait(120) == 3
    assert watcher.stdout is not None and "cancelled" in watcher.stdout.read()
    assert service.trainers(job_id) == []


# --- eft up, from anywhere ---------------------------------------------------------------------------


def test_eft_up_from_another_folder(tmp_path: Path) -> None:
    for name in ("core", "api", "worker", "box"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    process = subprocess.Popen(
        [EFT, "up", "--port", "0"],
        cwd=tmp_path,
        env=clean | {"EFT_NODE": "elsewhere", "EFT_MIN_FREE_BYTES": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = ""
        while "API key" not in told:
            line = process.stdout.readline()
            assert line, told
            told += line
        [key] = re.findall(r"shown this once: (eft_\S+)", told)
        note = json.loads((tmp_path / ".eft" / "up.json").read_text())  # the data root lies where the user is
        assert note["pids"]["up"] == process.pid
        listed = subprocess.run([EFT, "ls"], env=clean | {"EFT_URL": note["url"], "EFT_API_KEY": key}, check=False)
        assert listed.returncode == 0
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in note["pids"].values()), 60, "an end")
