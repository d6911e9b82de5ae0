"""The client's wheel in a clean environment: its own tests, and the examples for CI systems, line by line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select

from core.db.tables import Job
from core.jobs.lifecycle.claims import Slot, claim
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from tests.support import wheel

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Iterator[Path]:
    """The folder of programs of an environment that has the wheel, what it declares, and pytest."""
    found = wheel.environment(tmp_path_factory.mktemp("clean") / "venv", "pytest")
    subprocess.run(
        [found / "pip", "install", "-q", "--no-index", "--no-deps", built], check=True, capture_output=True, text=True
    )
    yield found


def clean(programs: Path, api: Any, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
    path = f"{programs}:/usr/bin:/bin"
    return kept | {"PATH": path, "EFT_URL": api.url, "EFT_API_KEY": api.key, "XDG_CONFIG_HOME": "/nonexistent"} | more


def test_what_is_in_the_wheel(built: Path) -> None:
    with zipfile.ZipFile(built) as wheel_file:
        names = wheel_file.namelist()
        (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert wheel_file.read(licence) == (ROOT / "LICENSE").read_bytes(), "client/LICENSE is a copy"
    assert "eft/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eft"}


def test_the_wheels_own_tests(api: Any, programs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [programs / "python", "-m", "pytest", "-p", "no:cacheprovider", ROOT / "client" / "tests"],
        env=clean(programs, api), cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check = subprocess.run([programs / "pip", "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


# --- examples/ci -------------------------------------------------------------------------------------


def github(file: Path) -> list[tuple[str, str]]:
    """(when it runs, lines), in their order."""
    (job,) = yaml.safe_load(file.read_text())["jobs"].values()
    return [(step.get("if", "success()"), step["run"]) for step in job["steps"] if "run" in step]


def gitlab(file: Path) -> list[tuple[str, str]]:
    (job,) = (part for part in yaml.safe_load(file.read_text()).values() if isinstance(part, dict))
    # A shell for the script, another for what comes after it.
    return [("success()", "\n".join(job["script"])), ("always()", "\n".join(job["after_script"]))]


def due(when: str, failed: bool, variables: Mapping[str, str]) -> bool:
    """Whether a step runs, of a pipeline that nobody cancels."""
    status, *conditions = when.split(" && ")
    assert set(conditions) <= {"env.JOB != ''"}
    if any(not variables.get("JOB") for _ in conditions):
        return False
    return {"success()": not failed, "always()": True, "cancelled()": False}[status]


def play_worker(api: Any, result: dict[str, Any], stop: threading.Event) -> None:
    """What a box does: whatever waits is prepared, trained, and handed back with one artifact."""
    adapter = b"weights"
    while not stop.wait(0.1):
        with api.database.read() as session:
            waiting = session.execute(select(Job.id).where(Job.status == "queued", Job.kind == "train")).scalars().all()
        for job_id in waiting:
            with api.database.write() as session:
                first = claim(session, "wrk-test", "box", Slot(f"prepare-{job_id}", "prepare"), 600)
                assert first is not None and first.token.job_id == job_id
                finish(session, first.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
            token = api.go_on(first.token.job_id)
            path = api.layout.artifacts(token.job_id, token.attempt) / "adapter" / "adapter_model.safetensors"
            path.parent.mkdir(parents=True)
            path.write_bytes(adapter)
            sha256 = hashlib.sha256(adapter).hexdigest()
            artifact = {"path": "adapter/adapter_model.safetensors", "kind": "adapter", "bytes": 7, "sha256": sha256}
            api.end(token, Succeeded(result, [artifact]))


@pytest.mark.parametrize(
    ("system", "loss", "code"), [("github-actions", 0.8, 0), ("github-actions", 1.5, 8), ("gitlab-ci", 0.8, 0)]
)
def test_the_examples_for_ci(
    api: Any, programs: Path, built: Path, tmp_path: Path, system: str, loss: float, code: int
) -> None:
    """Every shell line of both files, as their systems run them: submit, wait, fail on a metric."""
    file = ROOT / "examples" / "ci" / f"{system}.yml"
    parts = github(file) if system == "github-actions" else gitlab(file)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "rows.jsonl").write_text(json.dumps({"prompt": f"{tmp_path} on", "completion": "on"}) + "\n")
    (tmp_path / "train" / "job.yaml").write_text(f"model: {MODEL}\ndata: rows.jsonl\n")
    told, after, run = tmp_path / "env", tmp_path / "summary", str(tmp_path)
    told.touch()
    variables = clean(
        programs, api, EFT_CLIENT=str(built), PIP_NO_INDEX="1", CI="true", FORCE_COLOR="1", GITHUB_ENV=str(told),
        GITHUB_STEP_SUMMARY=str(after), GITHUB_REPOSITORY="lab/voice", GITHUB_RUN_ID=run, GITHUB_RUN_ATTEMPT="1",
        CI_PROJECT_PATH="lab/voice", CI_PIPELINE_ID=run, CI_JOB_ID="1",
    )  # fmt: skip
    api.clear_line()
    stop = threading.Event()
    result = {"eval_after": {"eval_loss": loss, "eval_exact_match": 0.9}}
    worker = threading.Thread(target=play_worker, args=(api, result, stop))
    worker.start()
    status, output = 0, ""
    try:
        for when, lines in parts:
            variables |= dict(line.split("=", 1) for line in told.read_text().splitlines())
            if not due(when, bool(status), variables):
                continue
            variables["CI_JOB_STATUS"] = "failed" if status else "success"
            done = subprocess.run(
                ["/bin/bash", "-e", "-o", "pipefail", "-c", lines], env=variables, cwd=tmp_path,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
            )  # fmt: skip
            output += done.stdout
            status = status or done.returncode
    finally:
        stop.set()
        worker.join(60)
    assert status == code, output
    assert (tmp_path / "model" / "adapter" / "adapter_model.safetensors").exists() is (code == 0)
    assert f"eval_loss {loss}" in output + (after.read_text() if after.exists() else "")
    assert ("fails: eval_loss > 1.2" in output) is (code == 8)


def test_of_a_job_that_was_refused_nothing_is_asked(api: Any, programs: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "job.yaml").write_text(f"model: {MODEL}\ndata: rows.jsonl\n")  # which is not there
    told = tmp_path / "env"
    told.touch()
    repository = {"GITHUB_REPOSITORY": "lab/voice", "GITHUB_RUN_ID": str(tmp_path), "GITHUB_RUN_ATTEMPT": "1"}
    variables = clean(programs, api, GITHUB_ENV=str(told), **repository)
    _, submit, *rest = github(ROOT / "examples" / "ci" / "github-actions.yml")
    done = subprocess.run(
        ["/bin/bash", "-e", "-c", submit[1]], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "rows.jsonl" in done.stderr
    assert told.read_text() == ""
    assert len(rest) == 4 and not [lines for when, lines in rest if due(when, True, variables)]
    cancelled = next(when for when, _ in rest if when.startswith("cancelled()"))
    assert due(cancelled.replace("cancelled()", "always()"), True, variables) is False


def test_who_cancels_the_pipeline_cancels_the_job(api: Any, programs: Path, tmp_path: Path) -> None:
    lines = {
        "github": next(run for when, run in github(ROOT / "examples/ci/github-actions.yml") if "cancelled" in when),
        "gitlab": next(run for when, run in gitlab(ROOT / "examples/ci/gitlab-ci.yml") if when == "always()"),
    }
    for system in lines:
        job_id = api.submit()["id"]
        (tmp_path / "job-id").write_text(f"{job_id}\n")
        variables = clean(programs, api, JOB=job_id, CI_JOB_STATUS="canceled")
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", lines[system]], env=variables, cwd=tmp_path, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert api.http.get(f"/jobs/{job_id}").json()["status"] == "cancelled", system
