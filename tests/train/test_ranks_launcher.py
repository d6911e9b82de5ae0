"""The launcher of several ranks: what strikes one of them, or it, strikes all; and it ends as the first of them did.

But for one gang that trains, its ranks are struck while they import torch, which here is a module that never ends: none
of them is quicker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.base.clock import boottime
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_DATA_ROOT_LOST, EXIT_FAILED, EXIT_FENCED, EXIT_NO_SPACE
from core.spec.run.heartbeat import heartbeat
from core.train.base.events import NullEventWriter
from core.train.failures import describe
from core.train.ranks import launch
from core.train.ranks.env import RankEnv, last_word, leave_word
from core.train.ranks.group import PeerLost, fingerprint
from core.train.ranks.last_word import tell_launcher
from core.train.ranks.launch import End
from tests.support.trainer import events, log, pairs, start, write_rows, write_run
from worker import processes

RANKS = 2


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that gets no further than its imports."""
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "torch.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "endless"))
    train = write_rows(tmp_path / "train.jsonl", pairs(4))
    resources = {"gpus": RANKS, "accelerator": "cpu"}
    return write_run(tmp_path / "run", tmp_path / "no-model", train, resources=resources, fence_seconds=60.0)


@contextmanager
def launched(run_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The launcher and its ranks, all of them listening for signals by now."""
    process = start(run_dir, stdin=subprocess.PIPE)
    try:
        ranks: list[int] = []
        deadline = time.monotonic() + 200
        while len(ranks) < RANKS or not all(map(armed, ranks)):
            assert process.poll() is None and time.monotonic() < deadline, log(run_dir)
            ranks = sorted(one.pid for one in processes.everyone() if one.parent == process.pid)
            time.sleep(0.02)  # each look reads all of /proc
        yield process, ranks
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def armed(pid: int) -> bool:
    """It has said to the kernel that it ends with its launcher, which comes after its handlers."""
    try:
        return Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    return not any((seen := processes.look(pid)) is not None and seen.alive for pid in pids)


def await_end(process: subprocess.Popen[bytes], ranks: list[int]) -> int:
    code = process.wait(120)
    deadline = time.monotonic() + 120
    while not gone(ranks):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return code


def test_stacks_of_every_rank_and_one_ranks_death_is_the_death_of_all(run_dir: Path) -> None:
    with launched(run_dir) as (process, ranks):
        for rank, seen in enumerate(map(variables, ranks)):
            told = [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EFT_LAUNCHER")]
            assert told == [str(rank), str(rank), "2", "2", str(process.pid)] and "MASTER_PORT" not in seen
        process.send_signal(signal.SIGTERM)  # a wish, which each keeps until it comes to a place to leave
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 200
        while log(run_dir).count("most recent call first") < 2 * RANKS:  # two threads each: the fence's is one
            assert process.poll() is None and time.monotonic() < deadline, log(run_dir)
            time.sleep(0.01)
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(120) == -signal.SIGKILL
        assert gone(ranks), "the launcher outlives its ranks"
    told = log(run_dir)
    first, second = (told.index(f"--- rank {rank} of {RANKS}") for rank in range(RANKS))
    assert first < told.index("most recent call first") < second < told.rindex("most recent call first")
    (notice,) = events(run_dir)
    assert notice["code"] == "rank_died" and f"of {RANKS} was ended by SIGKILL" in notice["message"]
    assert not list(run_dir.glob("ranks-*"))


def end_of_file(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def interrupt_twice(process: subprocess.Popen[bytes]) -> None:
    """Two that come at once are one to the kernel."""
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("strike", "code"),
    [(end_of_file, EXIT_FENCED), (subprocess.Popen.kill, -signal.SIGKILL), (interrupt_twice, -signal.SIGINT)],
    ids=["its worker is gone", "it is killed", "Ctrl-C, the second time"],
)
def test_no_rank_outlives_its_launcher(
    run_dir: Path, strike: Callable[[subprocess.Popen[bytes]], None], code: int
) -> None:
    with launched(run_dir) as (process, ranks):
        strike(process)
        assert await_end(process, ranks) == code, log(run_dir)


def test_no_rank_trains_beyond_the_lease_while_its_launcher_stands_still(tiny_dir: Path, tmp_path: Path) -> None:
    """Heartbeats go on, into the pipe of a launcher that is stopped: nobody who knows of the lease hears the ranks'
    wish, and they end by themselves. Where this machine did not let us beat in time before, again."""
    train = write_rows(tmp_path / "train.jsonl", pairs(21))
    axes = {"resources": {"gpus": RANKS, "accelerator": "cpu"}, "training": {"max_steps": 1_000_000}}
    for fence in (2.0, 8.0, 32.0):
        folder = write_run(tmp_path / f"fence-{fence:g}", tiny_dir, train, fence_seconds=fence, **axes)
        process = start(folder, stdin=subprocess.PIPE)
        try:
            while process.poll() is None and len(events(folder, "metrics")) < 3:
                beat(process)
            if process.poll() is not None:
                assert process.returncode == EXIT_FENCED, log(folder)
                continue
            ranks = [one.pid for one in processes.everyone() if one.parent == process.pid]
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 200
            while not gone(ranks) and time.monotonic() < deadline:
                beat(process)
            # They wait to be reaped, so that the kernel tells how they ended (proc_pid_stat(5), exit_code).
            codes = [
                os.waitstatus_to_exitcode(int(Path(f"/proc/{rank}/stat").read_text().split()[-1])) for rank in ranks
            ]
            assert codes == [EXIT_FENCED] * RANKS, log(folder)
            assert log(folder).count("fenced: no heartbeat for") == RANKS
            told = events(folder)
            process.send_signal(signal.SIGCONT)
            assert process.wait(200) == EXIT_FENCED, log(folder)
            assert events(folder) == told and not events(folder, "error"), "nothing was written after it"
            return
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    pytest.fail("fenced in spite of heartbeats")


def beat(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(heartbeat(boottime()))
        process.stdin.flush()
    time.sleep(0.05)


# --- whose error it was ----------------------------------------------------------------------------------


def test_who_only_lost_a_peer_was_not_the_first(tmp_path: Path) -> None:
    lost = describe(PeerLost("connection closed"))
    hit = describe(MemoryError(), "training")
    for rank, payload in ((0, lost), (1, hit)):
        leave_word(RankEnv(rank, RANKS, rank, tmp_path), payload, lost_peer=rank == 0)
    ends = [End(rank, EXIT_FAILED, last_word(tmp_path, rank)) for rank in range(RANKS)]
    assert min(ends, key=launch._blame).rank == 1
    killed, aborted = End(1, -signal.SIGKILL), End(0, -signal.SIGABRT)
    assert min([aborted, killed], key=launch._blame) is killed, "NCCL aborts whoever has lost a peer"
    assert min([ends[0], killed], key=launch._blame) is killed
    assert launch._tell(ends[1], RANKS, tmp_path, asked=False) == EXIT_FAILED
    (error,) = events(tmp_path)
    assert (error["failure"], error["code"]) == ("memory", "out_of_memory")
    assert error["field"] == "training.per_device_train_batch_size" and error["message"].endswith("(rank 1 of 2)")


def test_a_rank_that_could_not_even_say_that_the_disk_is_full(tmp_path: Path) -> None:
    assert launch._tell(End(1, EXIT_NO_SPACE), RANKS, tmp_path, asked=False) == EXIT_NO_SPACE
    assert launch._tell(End(1, -signal.SIGTERM), RANKS, tmp_path, asked=True) == EXIT_CHECKPOINTED
    assert events(tmp_path) == []


def test_a_rank_whose_run_folder_is_gone(tmp_path: Path) -> None:
    """It has nowhere to leave a word: its exit code says it, and the launcher ends as it did. Under torchrun there is
    no such folder, and what a rank that is not the first has to tell is its traceback."""
    error, payload = OSError("the file system is gone"), {"code": "crashed", "message": "x", "failure": "internal"}
    assert tell_launcher(error, RankEnv(1, 2, 1, tmp_path / "gone"), NullEventWriter(), payload) == EXIT_DATA_ROOT_LOST
    assert launch._tell(End(1, EXIT_DATA_ROOT_LOST), 2, tmp_path / "gone", asked=False) == EXIT_DATA_ROOT_LOST
    assert tell_launcher(error, RankEnv(1, 2, 1, None), NullEventWriter(), payload) == EXIT_FAILED


def test_a_fingerprint_sees_one_bit() -> None:
    import torch

    weights = {"a": torch.randn(7, 5), "b": torch.randn(3).to(torch.bfloat16)}
    other = {name: tensor.clone() for name, tensor in weights.items()}
    assert fingerprint(weights) == fingerprint(other)
    other["b"].view(torch.int16)[1] ^= 1
    assert fingerprint(weights) != fingerprint(other)
