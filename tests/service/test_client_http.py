"""The client against a real API: exit codes, JSON, restarts, broken connections, damaged downloads."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eft import ApiError, Client, NotEft, Unreachable

from core.jobs.lifecycle.finish import Failed, Requeued, Succeeded
from tests.support import forks
from tests.support.client import EFT, Cutter, client, eft, environment
from tests.support.eft_forks import program

ROW = '{"prompt": "lamp %d on", "completion": "lamp.on"}\n'
JOB = "model: HuggingFaceTB/SmolLM2-135M-Instruct\ndata: rows.jsonl\nmethod: lora\n"


@pytest.fixture
def job_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    # Rows of this test alone: a file that the project has already would not be sent again.
    (tmp_path / "rows.jsonl").write_text(ROW % (hash(request.node.nodeid) % 10**9) + ROW % 1)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


# --- exit codes and output ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (Succeeded({"steps": 2, "eval_after": {"eval_loss": 0.5}}), 0, "eval_loss 0.5"),
        (Failed("user", "bad_rows", "row 3 is [bad] here", "data.train"), 1, "row 3 is [bad] here"),
        (None, 3, "cancelled"),
    ],
)
def test_watch_ends_as_the_job_does(api: Any, outcome: Any, code: int, words: str) -> None:
    job_id, token = api.start_job()
    watcher = subprocess.Popen(
        [program(), "watch", job_id], env=environment(api), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    api.tell(
        token,
        {"type": "metrics", "step": 1, "values": {"loss": 1.25}},
        {"type": "progress", "step": 1, "total_steps": 2, "epoch": 0.5, "seconds_left": 61},
    )
    assert watcher.stderr is not None
    told = ""
    while "step 1/2" not in told:  # it has looked
        line = watcher.stderr.readline()
        assert line, told
        told += line
    if outcome is None:
        assert eft(api, "cancel", job_id).returncode == 0
        outcome = Requeued("cancelled by its owner")
    api.end(token, outcome)
    stdout, rest = watcher.communicate(timeout=120)
    stderr = told + rest
    assert watcher.returncode == code, stderr
    assert words in stdout and "Traceback" not in stderr
    assert re.search(r"step 1/2 +loss 1\.250 +1m 01s left", stderr), stderr


def test_submit_twice_is_one_job_and_one_file(api: Any, job_file: Path) -> None:
    command = ["submit", str(job_file), "--idempotency-key", f"ci-{os.urandom(8).hex()}", "--json"]
    first, second = eft(api, *command), eft(api, *command)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert json.loads(first.stdout)["id"] == json.loads(second.stdout)["id"]
    sha256 = hashlib.sha256((job_file.parent / "rows.jsonl").read_bytes()).hexdigest()
    listed = json.loads(eft(api, "files", "ls", "--json").stdout)["data"]
    assert [file["sha256"] for file in listed].count(sha256) == 1


def test_a_dry_run_leaves_nothing_behind_and_a_typo_is_told_before_the_upload(api: Any, job_file: Path) -> None:
    rows = job_file.parent / "rows.jsonl"
    sha256 = hashlib.sha256(rows.read_bytes()).hexdigest()

    def left() -> tuple[Any, set[Path]]:
        """Rows of the table, and all that lies on the disk."""
        there = {path for name in ("files", "uploads") for path in (api.root / name).rglob("*")}
        return client(api).find_file(sha256), there

    before = left()
    assert before[0] is None
    done = eft(api, "submit", str(job_file), "--dry-run", "--eval", str(rows), "--json")
    assert done.returncode == 2 and "same_rows" in done.stderr  # found without either of them
    done = eft(api, "submit", str(job_file), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["training"]["max_length"] == 1024
    assert "rows.jsonl would be uploaded" in done.stderr
    for setting in ("metod=lora", "training.max_length=1", "method=qlora", "data.format=text"):
        refused = ["--set", setting, *(["--set", "quantization=none"] if setting == "method=qlora" else [])]
        for command in ("submit", "plan"):
            done = eft(api, command, str(job_file), *refused)
            assert done.returncode == 2, (command, setting, done.stdout)
            assert "rows.jsonl is file-" not in done.stderr
    assert left() == before
    assert eft(api, "submit", str(job_file)).returncode == 0
    assert left()[0] is not None
    done = eft(api, "submit", str(job_file), "--dry-run", "--json")  # of a file that is there it says its format
    assert json.loads(done.stdout)["data"]["train"]["format"] == "prompt_completion"
    unsent = {"model": "a/b", "data": f"file-{'0' * 26}"}
    assert api.http.post("/jobs", json=unsent).json()["error"]["code"] == "file_not_found"


def test_stdout_has_json_and_nothing_else(api: Any, job_file: Path) -> None:
    resolved = json.loads(eft(api, "submit", str(job_file), "--dry-run", "--json").stdout)
    assert resolved["method"] == {**resolved["method"], "type": "lora", "r": 32}
    job = json.loads(eft(api, "submit", str(job_file), "--set", "method.r=4", "--json").stdout)
    assert job["spec"]["method"]["r"] == 4
    assert json.loads(eft(api, "show", job["id"], "--json").stdout)["id"] == job["id"]
    assert job["id"] in {j["id"] for j in json.loads(eft(api, "ls", "-n", "500", "--json").stdout)["data"]}
    assert json.loads(eft(api, "metrics", job["id"], "--json").stdout) == {}
    assert json.loads(eft(api, "download", job["id"], "--list", "--json").stdout) == {"data": []}
    assert [json.loads(x)["status"] for x in eft(api, "cancel", job["id"], "--json").stdout.splitlines()] == [
        "cancelled"
    ]
    watched = eft(api, "watch", job["id"], "--json")
    assert watched.returncode == 3
    assert [json.loads(line)["seq"] for line in watched.stdout.splitlines()] == [1, 2]
    again = json.loads(eft(api, "retry", job["id"], "--json").stdout)
    assert again["spec"] == job["spec"] and again["id"] != job["id"]
    paused = json.loads(eft(api, "pause", again["id"], "--json").stdout)["status"]
    resumed = json.loads(eft(api, "resume", again["id"], "--json").stdout)["status"]
    assert (paused, resumed) == ("paused", "queued")
    assert eft(api, "cancel", again["id"]).stdout == f"{again['id']} cancelled\n"


def test_errors_name_what_to_do(api: Any, job_file: Path) -> None:
    done = eft(api, "submit", str(job_file), "--set", "metod=lora", "--set", "training.num_train_epochs=-1")
    assert (done.returncode, done.stdout) == (2, "")
    for words in ("invalid_spec", "did you mean `method`?", "training.num_train_epochs", "request id: req-"):
        assert words in done.stderr
    told = json.loads(eft(api, "submit", str(job_file), "--set", "metod=lora", "--json").stderr.splitlines()[-1])
    assert told["error"]["faults"][0]["field"] == "metod" and told["error"]["request_id"].startswith("req-")

    (job_file.parent / "rows.jsonl").write_text(ROW % 1 + "{broken\n")
    done = eft(api, "submit", str(job_file))
    assert done.returncode == 2 and "line 2" in done.stderr

    assert eft(api, "show", f"job-{'0' * 26}").returncode == 6
    assert eft(api, "show", "../files").returncode == 2
    assert eft(api, "ls", EFT_API_KEY="eft_wrong").returncode == 5
    assert eft(api, "ls", "--no-such-option").returncode == 2
    assert eft(api, "submit", "/nonexistent.yaml").returncode == 7
    assert eft(api, "ls", EFT_URL="not-an-url").returncode == 2
    full = subprocess.run(f"{EFT} ls --json > /dev/full", shell=True, env=environment(api), check=False)
    assert full.returncode == 7
    gone = subprocess.run(
        f"{EFT} watch {api.submit()['id']} --json | true", shell=True, env=environment(api), timeout=120,
        capture_output=True, check=False,
    )  # fmt: skip
    assert gone.stderr == b""


def test_a_job_of_another_project_is_not_there(api: Any) -> None:
    with api.client("elsewhere") as other:
        job_id = api.submit(client=other)["id"]
    assert eft(api, "show", job_id).returncode == 6


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:1", "eft_x", patience=0.5) as nobody, pytest.raises(Unreachable, match="EFT_URL"):
        nobody.jobs()


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        (b"text/html\r\nContent-Length: 5\r\n\r\n<p>hi", lambda client: client.logs("job-1")),
        (b"application/json\r\nContent-Length: 4\r\n\r\nnull", lambda client: client.jobs()),
        (b"application/json\r\nContent-Length: 3\r\n\r\n{\xff}", lambda client: client.version()),
    ],
)
def test_a_page_that_is_no_answer_of_ours(answer: bytes, call: Any) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: "
    told = pytest.raises(NotEft, match="Is EFT_URL right")
    with one_answer(head + answer) as url, Client(url, "eft_x") as lost, told as refused:
        call(lost)
    assert refused.value.exit_code == 4 and url in str(refused.value)


@contextlib.contextmanager
def one_answer(text: bytes) -> Iterator[str]:
    """A server of another kind, for one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(10_000)
            connection.sendall(text)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_something_else_on_that_port() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://evil/\r\nContent-Length: 2\r\n\r\nno"
    with one_answer(moved) as url, Client(url, "eft_x") as lost, pytest.raises(ApiError) as refused:
        lost.jobs()
    assert refused.value.code == "http_302"  # and the key did not follow


def test_login_keeps_a_key_that_works(api: Any, tmp_path: Path) -> None:
    there = environment(api, XDG_CONFIG_HOME=str(tmp_path), EFT_API_KEY="")

    def login(key: str) -> int:
        command = [program(), "login", "--key-stdin", "--url", api.url]
        return subprocess.run(
            command, env=there, input=key + "\n", text=True, capture_output=True, check=False
        ).returncode

    assert login("eft_wrong") == 5 and not (tmp_path / "eft").exists()
    assert login(api.key) == 0
    assert (tmp_path / "eft" / "config.toml").stat().st_mode & 0o777 == 0o600
    done = subprocess.run([program(), "ls"], env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("no_color", [False, True])
def test_a_narrow_terminal(api: Any, no_color: bool) -> None:
    job_id = api.submit(name="a rather long name of a job longer than the terminal is wide")["id"]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    more = {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    process = subprocess.Popen([program(), "ls", "-n", "1"], env=environment(api, **more), stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while chunk := os.read(master, 10_000):
            seen += chunk
    os.close(master)
    assert process.wait(120) == 0
    text = seen.decode()
    assert ("\x1b[36m" in text) is not no_color
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert all(len(line) <= 60 for line in lines) and any(job_id[4:16] in line for line in lines)


# --- restarts and broken connections -----------------------------------------------------------------


def start_again(api: Any) -> None:
    """The same API on the same port, which the fixture will stop."""
    settings = {"EFT_DATA": str(api.root), "EFT_DATABASE_URL": api.database_url, "EFT_PORT": api.url.rpartition(":")[2]}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    with api.log_file.open("ab") as log:
        api.process = forks.start("api", environment=clean | settings, log=log.fileno())


def test_watching_survives_a_kill_of_the_server(start_api: Any) -> None:
    with start_api() as api:
        job_id, token = api.start_job()
        command = [program(), "watch", job_id, "--json"]
        watcher = subprocess.Popen(command, env=environment(api), stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        first = json.loads(watcher.stdout.readline())
        looker = subprocess.Popen(
            [program(), "watch", job_id],
            env=environment(api),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert looker.stderr is not None
        looker.stderr.readline()

        api.process.kill()
        api.process.wait()
        api.tell(token, *[{"type": "notice", "code": "n", "message": f"meanwhile {n}"} for n in range(3)])
        time.sleep(1)
        start_again(api)
        api.end(token, Succeeded({"steps": 1}))

        rest = [json.loads(line) for line in watcher.stdout.read().splitlines()]
        assert watcher.wait(120) == 0
        seqs = [first["seq"], *(event["seq"] for event in rest)]
        assert seqs == list(range(1, len(seqs) + 1))  # every event, once, in order
        stdout, stderr = looker.communicate(timeout=120)
        assert looker.returncode == 0 and "succeeded" in stdout
        assert "trying again" in stderr and [stderr.count(f"meanwhile {n}") for n in range(3)] == [1, 1, 1]


@pytest.fixture
def cutter(api: Any) -> Iterator[Cutter]:
    proxy = Cutter(api.url)
    yield proxy
    proxy.close()


def test_every_event_once_over_a_bad_line(api: Any, cutter: Cutter) -> None:
    job_id, token = api.start_job()
    api.tell(token, *[{"type": "notice", "code": "n", "message": "ü\u2028" * n} for n in range(40)])
    api.end(token, Succeeded({}))
    cutter.cuts = [0, 300, 700, 1500, 2900, 1, 4000]
    gaps: list[Exception] = []
    with client(api, cutter.url) as behind:
        events = list(behind.events(job_id, on_gap=gaps.append))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [e.data["message"] for e in events if e.type == "notice"] == ["ü\u2028" * n for n in range(40)]
        assert len(gaps) == 7
        assert [e.seq for e in behind.events(job_id, after=41)] == [e.seq for e in events if e.seq > 41]


def test_interrupted_watching_leaves_the_job_alone(api: Any) -> None:
    job_id = api.submit()["id"]
    watcher = subprocess.Popen([EFT, "watch", job_id], env=environment(api), stderr=subprocess.PIPE, text=True)
    assert watcher.stderr is not None
    watcher.stderr.readline()
    watcher.send_signal(signal.SIGINT)
    _, stderr = watcher.communicate(timeout=120)
    assert watcher.returncode == 130 and f"eft watch {job_id}" in stderr
    with client(api) as here:
        assert here.get(job_id).status == "queued"
