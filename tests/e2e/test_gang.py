"""A job of two slots on a real service: one of its ranks dies, and the job goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Service, running, wait_for
from worker import processes

STEPS = 30
"""A few of them are done when the rank is killed."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("gang")
    yield from running(folder, {"EFT_MODEL_ROOTS": str(models), "EFT_CPU_SLOTS": "2", "EFT_RETRY_BACKOFF_SECONDS": "1"})


def ranks_of(service: Service, job_id: str) -> list[int]:
    (launcher,) = service.trainers(job_id)
    found = [one for one in processes.members(launcher) if one.pid != launcher]
    assert {one.parent for one in found} == {launcher}
    return sorted(one.pid for one in found)


def variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_a_rank_is_killed_and_the_job_goes_on(service: Service, models: Path) -> None:
    rows = service.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": " " + "x" * 99}) + "\n" for n in range(96)))
    job_id = service.submit(
        {
            "model": str(models / "tiny"),
            "data": service.upload(rows),
            "training": {"max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
            "checkpoint": {"type": "disk", "save_steps": 5},
            "resources": {"gpus": 2, "accelerator": "cpu"},
        }
    )
    folder = service.data / "runs" / job_id / "attempt-2"  # the first one prepares the model
    wait_for(lambda: told_in(folder, "checkpoint"), 300, "a checkpoint", lambda: service.describe(job_id))
    ranks = ranks_of(service, job_id)
    for rank, seen in enumerate(map(variables, ranks)):
        told = [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")]
        assert told == [str(rank), str(rank), "2", "-1"]
        assert "MASTER_PORT" not in seen and not {name for name in seen if "KEY" in name or "DATABASE" in name}
    assert not listening(ranks), "nobody outside this machine may knock"
    os.kill(ranks[1], signal.SIGKILL)

    ended = service.wait(job_id, "failed", "succeeded", timeout=400)
    assert ended["status"] == "succeeded", service.describe(job_id)
    assert not told_in(folder, "result") and not told_in(folder, "error"), "rank 0 only lost a peer"
    assert [event["code"] for event in told_in(folder, "notice")] == ["rank_died"]
    assert "rank 1 of 2 was ended by SIGKILL" in told_in(folder, "notice")[0]["message"]
    reply = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000}).json()
    changes = [event["data"] for event in reply["data"] if event["type"] == "status"]
    (failure,) = [change["failure"] for change in changes if change.get("failure")]
    assert (failure["class"], failure["code"]) == ("machine", "killed")
    newest = told_in(folder, "checkpoint")[-1]
    assert not list((folder / "checkpoints").glob("tmp-*")) and not list(folder.glob("ranks-*"))
    (resumed,) = told_in(folder.with_name("attempt-3"), "resumed")
    assert resumed["step"] == newest["step"]
    metrics = service.client.get(f"/jobs/{job_id}/metrics").json()
    assert [step for step, _ in metrics["loss"]] == list(range(1, STEPS + 1))
    assert {"memory_bytes_rank_0", "memory_bytes_rank_1"} <= metrics.keys()
    assert json.loads(service.artifact(job_id, "run_record.json"))["ranks"]["world_size"] == 2


def told_in(folder: Path, type: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == type]


def listening(pids: list[int]) -> list[str]:
    """TCP addresses of these processes that listen, beside the loopback's (proc_net_tcp: 0A is LISTEN)."""
    sockets = {link.readlink().name for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            loopback = fields[1].partition(":")[0] in ("0100007F", "0" * 24 + "01000000")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets and not loopback:
                found.append(fields[1])
    return found
