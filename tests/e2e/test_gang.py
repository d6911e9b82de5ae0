"""Jobs of two slots on a real service: a rank dies, hangs, or has no memory left, people pause, and the job goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eft.sync.client import Client

from core.spec.run.standby import STANDBY_PADDING
from tests.support.service import RARELY, Service, running, wait_for
from tests.support.squeeze import MMAPS, squeeze
from worker import processes

STEPS = 70
"""Some of them are still to be done after a kill, a pause and a hang."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("gang")
    yield from running(folder, {"EFT_MODEL_ROOTS": str(models), "EFT_CPU_SLOTS": "4", "EFT_RETRY_BACKOFF_SECONDS": "1",
                                "EFT_HANG_SECONDS_TRAINING": "15", **MMAPS})  # fmt: skip


def ranks_of(service: Service, job_id: str) -> list[int]:
    (launcher,) = service.trainers(job_id)
    found = [one for one in processes.members(launcher) if one.pid != launcher]
    assert {one.parent for one in found} == {launcher}
    return sorted(one.pid for one in found)


def variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_a_session_over_two_ranks_ends_with_the_undisturbed_bits(service: Service, models: Path) -> None:
    """kill -9 of one rank within a window, of the launcher, and of the worker; then the session is parked and comes
    back. The same recipe on another adapter, left alone, gives the same bits."""
    rows = [[5, 6, 7, 8, 9, 10], [40, 41, 42], list(range(60, 80)), [1, 2, 3]]
    method = {"type": "lora", "r": 4, "lora_dropout": 0.1}
    spec = {"model": str(models / "tiny"), "precision": "fp32", "resources": {"gpus": 2, "accelerator": "cpu"}}
    with (
        Client(service.note()["url"], service.key, patience=200) as client,
        client.session(**spec, method=None) as session,
    ):

        def launcher() -> int:
            words = f"-m core.train.session {service.data}/runs/{session.id}"
            (pid,) = [pid for pid, command in service.processes().items() if words in command]
            return pid

        def turn(model: str, number: int, strike: Callable[[], None] = lambda: None) -> tuple[float, bytes, bytes]:
            told = session.forward_backward([{"tokens": row} for row in rows], model=model)
            strike()
            session.forward_backward([{"tokens": rows[number]}, {"tokens": rows[number - 1]}], model=model)
            session.step(0.01, max_grad_norm=0.5, model=model)
            drawn = session.generate(rows, model=model, max_tokens=4, seed=number)
            return told.loss, told.arrays["logprobs"].tobytes(), drawn.arrays["tokens"].tobytes()

        def kill_a_rank() -> None:
            ranks = [one.pid for one in processes.members(launcher()) if one.parent == launcher()]
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)

        session.create("struck", method, seed=7)
        struck = [turn("struck", 0, kill_a_rank)]
        struck.append(turn("struck", 1, lambda: os.kill(launcher(), signal.SIGKILL)))
        struck.append(turn("struck", 2, lambda: os.kill(service.pid("worker"), signal.SIGKILL)))
        client.sessions.park(session.id)
        wait_for(lambda: session.status()["status"] == "parked", 60, "the session to leave its slots")
        struck.append(turn("struck", 3))
        session.create("calm", method, seed=7)
        assert [turn("calm", number) for number in range(4)] == struck
        saved = [Path(session.save(name, model=name).values["folder"]) for name in ("struck", "calm")]
        one, other = ((folder / "state.safetensors").read_bytes() for folder in saved)
        assert one == other
        attempts = (service.data / "runs" / session.id).glob("attempt-*")
        notices = [event["message"] for folder in attempts for event in told_in(folder, "notice")]
        assert any("of 2 was ended by SIGKILL" in words for words in notices), notices


def test_killed_paused_and_hung_it_is_the_same_to_the_bit_and_without_memory_it_takes_half(
    service: Service, models: Path
) -> None:
    """One job loses a rank, is paused, and hangs; another one, left alone, gives the same bits; a third one has a rank
    without memory while the first one hangs."""
    rows = service.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"n {n}", "completion": " " + "x" * 120}) + "\n" for n in range(128)))
    file = service.upload(rows)

    def submit(steps: int, batch: int) -> str:
        sizes = {"max_steps": steps, "per_device_train_batch_size": batch, "max_length": 128}
        return service.submit(
            {
                "model": str(models / "tiny"), "data": file, "training": sizes,
                "method": {"type": "lora", "lora_dropout": 0.1},
                "checkpoint": {"type": "disk", "save_steps": 4}, "resources": {"gpus": 2, "accelerator": "cpu"},
            }
        )  # fmt: skip

    def attempt(job_id: str, number: int) -> Path:
        return service.data / "runs" / job_id / f"attempt-{number}"  # the first one prepares the model

    def until(job_id: str, number: int, type: str) -> None:
        wait_for(lambda: told_in(attempt(job_id, number), type), 300, type, lambda: service.describe(job_id))

    def resumed_at(job_id: str, number: int) -> tuple[int, int]:
        (resumed,) = told_in(attempt(job_id, number), "resumed")
        return resumed["step"], resumed["micro_step"]

    job_id, calm = submit(STEPS, 4), submit(STEPS, 4)
    until(job_id, 2, "checkpoint")
    ranks = ranks_of(service, job_id)
    look_at(service, job_id, ranks)
    os.kill(ranks[1], signal.SIGKILL)
    until(job_id, 3, "checkpoint")
    first = attempt(job_id, 2)
    assert not told_in(first, "result") and not told_in(first, "error"), "rank 0 only lost a peer"
    (failure,) = failures(service, job_id)
    assert (failure["class"], failure["code"]) == ("machine", "killed")
    assert not list((first / "checkpoints").glob("tmp-*")) and not list(first.glob("ranks-*"))
    assert resumed_at(job_id, 3)[0] >= told_in(first, "checkpoint")[-1]["step"], "a snapshot in memory may be further"

    assert service.client.post(f"/jobs/{job_id}/pause").status_code == 200
    service.wait(job_id, "paused")
    left = told_in(attempt(job_id, 3), "checkpoint")[-1]
    assert not service.trainers(job_id)
    assert service.client.post(f"/jobs/{job_id}/resume").status_code == 200
    until(job_id, 4, "checkpoint")
    assert resumed_at(job_id, 4) == (left["step"], left["micro_step"]), "where it was paused"
    os.kill(ranks_of(service, job_id)[1], signal.SIGSTOP)

    # While nobody has noticed that yet, another one: a rank that may map no more than it does now.
    large = submit(10_000, 64)
    until(large, 2, "metrics")
    squeeze(ranks_of(service, large)[1], 16 << 20)
    wait_for(lambda: failures(service, large), 200, "memory", lambda: service.describe(large), RARELY)
    until(large, 3, "metrics")
    service.client.post(f"/jobs/{large}/cancel")
    over = service.wait(large, "cancelled")
    assert [failure["code"] for failure in failures(service, large)] == ["out_of_memory"]
    assert "rank 1 of 2" in failures(service, large)[0]["message"]
    batch, accumulation = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    assert over["adjusted"] == {batch: 32, accumulation: 2}

    for one in (calm, job_id):
        assert service.wait(one, "succeeded", "failed", timeout=400)["status"] == "succeeded", service.describe(one)
    assert [failure["code"] for failure in failures(service, job_id)] == ["killed", "hung"]
    assert not failures(service, calm)
    usual = {event["code"] for event in told_in(attempt(calm, 2), "notice")}
    (died,) = [event for event in told_in(first, "notice") if event["code"] not in usual]
    assert died["code"] == "rank_died" and "rank 1 of 2 was ended by SIGKILL" in died["message"]
    stacks = (attempt(job_id, 4) / "log.txt").read_text()
    assert "--- rank 0 of 2" in stacks and "most recent call first" in stacks
    ours, theirs = (service.client.get(f"/jobs/{one}/metrics").json() for one in (job_id, calm))
    assert ours["loss"] == theirs["loss"] and [step for step, _ in ours["loss"]] == list(range(1, STEPS + 1))
    assert {"memory_bytes_rank_0", "memory_bytes_rank_1"} <= ours.keys()
    assert json.loads(service.artifact(job_id, "run_record.json"))["ranks"]["world_size"] == 2
    path = "adapter/adapter_model.safetensors"
    assert service.artifact(job_id, path) == service.artifact(calm, path)


def look_at(service: Service, job_id: str, ranks: list[int]) -> None:
    """The processes of a gang: whose forks they are, what they know, and who may reach them."""
    (launcher,) = service.trainers(job_id)
    assert len(Path(f"/proc/{launcher}/cmdline").read_bytes()) > STANDBY_PADDING, "it was forked, and has forked them"
    for seen in map(variables, ranks):
        assert seen["CUDA_VISIBLE_DEVICES"] == "-1"
        assert "MASTER_PORT" not in seen and not {name for name in seen if "KEY" in name or "DATABASE" in name}
    for rank in ranks:
        assert Path(f"/proc/{rank}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"core.train.ranks"]
        killed_first, launchers = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (rank, launcher))
        assert killed_first > launchers
    assert not listening(ranks), "nobody outside this machine may knock"


def failures(service: Service, job_id: str) -> list[dict[str, Any]]:
    reply = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000}).json()
    changes = [event["data"] for event in reply["data"] if event["type"] == "status"]
    return [change["failure"] for change in changes if change.get("failure")]


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
