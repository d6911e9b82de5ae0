"""`EFT_HARDWARE_SMOKE=1 make smoke`: five minutes of the real thing on this box's card, and a report to send in.

A service of its own trains the same QLoRA job twice, kills the first one's trainer in the middle (`kill -9`) and lets
it go on from its checkpoint, compares the two, looks at the check of the merged model, asks the merged model and the
adapter the same question, runs tests/gpu where there is a GPU, and takes a QLoRA step's time against plain LoRA (and
against bitsandbytes, PEFT and TRL, where bitsandbytes is installed). The card is the first that eft finds; without any
it is the CPU. The report holds the doctor's findings and no serial numbers, host names or paths of this box.

Exit status 0: all of it held. 1: the report says what did not. 2: not asked for (EFT_HARDWARE_SMOKE is not 1).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import wheel
from bench.report import hardware
from core import __version__
from tests.support.service import ROOT, Service, wait_for

EXAMPLE = ROOT / "examples" / "voice-intents"
QUESTION = "would you mind making it a little louder"
ADAPTER = "adapter/adapter_model.safetensors"
LOSS_TOLERANCE = 0.02
"""Where a card's sums are not the same twice: largest difference of a step's loss between the two runs, relative. bf16
keeps 8 bits, and 44 steps let a difference of its last one grow to about a hundredth."""
JOB_SECONDS = 900

Part = Callable[[], dict[str, Any]]


class SmokeFailed(Exception):
    """What did not hold, in words."""


class Smoke:
    """The parts in their order; what an earlier one has found lies in the attributes."""

    def __init__(self, model: Path, folder: Path, epochs: int, skip: list[str]) -> None:
        self.model, self.folder, self.epochs, self.skip = model, folder, epochs, skip
        usual = {"EFT_LEASE_SECONDS": "90", "EFT_RENEW_SECONDS": "15", "EFT_FENCE_SECONDS": "60"}
        place = {"EFT_MODEL_ROOTS": str(model.parent), "EFT_OFFLINE": "true", "EFT_NODE": "smoke"}
        threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
        asked = {"OMP_NUM_THREADS": threads, "EFT_SELFTEST_SECONDS": "180"}
        self.service = Service(folder, {**usual, **place, **asked})
        self.parts: list[dict[str, Any]] = []
        self.doctor: dict[str, Any] = {}
        self.jobs: list[str] = []

    def run(self) -> bool:
        """All parts; whether every one held. A part that fails does not keep the others from being tried."""
        try:
            self._part("doctor", self.look)
            self._part("start", self.start)
            if self.parts[-1]["ok"]:
                for name, part in (
                    ("train, killed in the middle", self.killed),
                    ("train, undisturbed", self.undisturbed),
                    ("the two compared", self.compared),
                    ("merged", self.merged),
                    ("generate", self.generated),
                ):
                    self._part(name, part)
        finally:
            self.service.stop()
        if self.gpus:
            self._part("tests/gpu", self.tests)
        self._part("bench", self.bench)
        return all(part["ok"] for part in self.parts)

    def _part(self, name: str, part: Part) -> None:
        if name in self.skip:
            self.parts.append({"part": name, "ok": True, "skipped": True, "seconds": 0.0})
            return
        began = time.monotonic()
        print(f"{name} …", flush=True)
        found: dict[str, Any] = {"part": name, "ok": True}
        try:
            found |= part()
        except (SmokeFailed, AssertionError, LookupError, OSError, subprocess.SubprocessError) as error:
            found |= {"ok": False, "why": str(error) or traceback.format_exc(limit=-1)}
        found["seconds"] = round(time.monotonic() - began, 1)
        self.parts.append(found)
        shown = {
            key: value for key, value in found.items() if key not in ("part", "ok", "seconds", "doctor", "figures")
        }
        print(f"  {'ok' if found['ok'] else 'FAILED'}, {found['seconds']:.0f} s  {json.dumps(shown)[:600]}", flush=True)

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return list(self.doctor.get("gpus", []))

    @property
    def kind(self) -> str:
        return str(self.gpus[0]["name"]) if self.gpus else "CPU"

    # --- the parts -------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "box.doctor", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.service.environment, capture_output=True, text=True, check=False, timeout=120
        )
        self.doctor = json.loads(done.stdout)
        return {"doctor": self.doctor, "determinism": self.doctor["determinism"].get("class", "")}

    def start(self) -> dict[str, Any]:
        self.service.start()
        train, held_out = (self.service.upload(EXAMPLE / f"{name}.jsonl") for name in ("train", "heldout"))
        self.spec: dict[str, Any] = {
            "name": "smoke",
            "model": {"type": "gguf", "path": str(self.model)} if self.model.is_file() else str(self.model),
            "data": {"train": train, "eval": held_out},
            "method": {"type": "qlora", "r": 16},
            "optimizer": {"type": "adamw", "learning_rate": 1e-3},
            "training": {"num_train_epochs": self.epochs, "per_device_train_batch_size": 8, "max_length": 256},
            "evaluation": {"type": "held_out", "per_device_eval_batch_size": 30},
            "checkpoint": {"type": "disk", "save_steps": 5},
            "export": "merged",
            "resources": {"accelerator": "gpu" if self.gpus else "cpu"},
        }
        return {}

    def killed(self) -> dict[str, Any]:
        job_id = self._killed()
        job = self._ended(job_id)
        record = json.loads(self.service.artifact(job_id, "run_record.json"))
        resumed = self._resumed(job_id)
        if not resumed:
            raise SmokeFailed("the job was not gone on with from a checkpoint")
        return {
            "resumed_at_step": resumed,
            "tokens_per_second": job["result"]["tokens_per_second"],
            "exact_match": [job["result"][when]["eval_exact_match"] for when in ("eval_before", "eval_after")],
            "record": {name: record.get(name) for name in ("kernels", "precision", "device", "selftest", "attention")},
        }

    def _killed(self) -> str:
        """A job whose trainer was killed beyond a checkpoint. A small model may have come to its end by then: then it
        is another's turn."""
        for _ in range(5):
            job_id = self.service.submit(self.spec)
            wait_for(lambda job_id=job_id: self._beyond(job_id, 7), JOB_SECONDS, f"step 7 of {job_id}")
            for trainer in self.service.trainers(job_id):
                os.kill(trainer, signal.SIGKILL)
                return job_id
            if self.service.job(job_id)["status"] in ("failed", "cancelled"):
                return job_id  # which is told
        raise SmokeFailed("each of five jobs had ended before its trainer could be killed")

    def _beyond(self, job_id: str, step: int) -> bool:
        for slot in (slot for node in self.service.client.get("/nodes").json()["data"] for slot in node["slots"]):
            if slot["quarantined"]:
                raise SmokeFailed(f"slot {slot['id']} is in quarantine: {slot['quarantined']}")
        job = self.service.job(job_id)
        ended = job["status"] in ("succeeded", "failed", "cancelled")
        return ended or (job["progress"] or {}).get("step", 0) >= step

    def undisturbed(self) -> dict[str, Any]:
        job = self._ended(self.service.submit(self.spec))
        return {"resumed_at_step": self._resumed(job["id"]), "tokens_per_second": job["result"]["tokens_per_second"]}

    def _resumed(self, job_id: str) -> list[int]:
        reply = self.service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000})
        return [event["data"]["step"] for event in reply.json()["data"] if event["type"] == "resumed"]

    def _ended(self, job_id: str) -> dict[str, Any]:
        job = self.service.wait(job_id, "succeeded", "failed", "cancelled", timeout=JOB_SECONDS)
        if job["status"] != "succeeded":
            failure = job["failure"] or {}
            raise SmokeFailed(f"the job has {job['status']}: {failure.get('code')}: {failure.get('message')}")
        self.jobs.append(job_id)
        return job

    def compared(self) -> dict[str, Any]:
        killed, undisturbed = self._both()
        same = self.service.artifact(killed, ADAPTER) == self.service.artifact(undisturbed, ADAPTER)
        curves = [self._losses(job_id) for job_id in (killed, undisturbed)]
        if curves[0].keys() != curves[1].keys():
            raise SmokeFailed(f"steps of the two differ: {len(curves[0])} and {len(curves[1])} (lost or done twice)")
        gap = max(abs(loss - curves[1][step]) / curves[1][step] for step, loss in curves[0].items())
        if not same and gap > LOSS_TOLERANCE:
            raise SmokeFailed(f"the losses are {gap:.2g} apart, tolerated are {LOSS_TOLERANCE:g}")
        return {"weights": "bitwise the same" if same else "not the same", "largest_loss_difference": gap}

    def _both(self) -> tuple[str, str]:
        if len(self.jobs) < 2:
            raise SmokeFailed("one of the two jobs has not succeeded")
        return self.jobs[0], self.jobs[1]

    def _losses(self, job_id: str) -> dict[int, float]:
        rows = [json.loads(line) for line in self.service.artifact(job_id, "metrics.jsonl").splitlines()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def merged(self) -> dict[str, Any]:
        job_id = self._both()[1]
        (outcome,) = self.service.job(job_id)["result"]["export"]
        if not outcome["released"]:
            raise SmokeFailed(f"the merged model was not released: {outcome}")
        return {"distance": outcome["check"]["distance"], "tolerance": outcome["check"]["tolerance"]}

    def generated(self) -> dict[str, Any]:
        into = self.folder / "job"
        environment = self.service.environment | {
            "EFT_URL": self.service.note()["url"],
            "EFT_API_KEY": self.service.key,
        }
        subprocess.run(
            [sys.executable, "-m", "eft.cli", "download", self._both()[1], "merged", "--output", str(into)],
            env=environment, check=True, capture_output=True, timeout=JOB_SECONDS,
        )  # fmt: skip
        with (EXAMPLE / "heldout.jsonl").open() as rows:
            system = json.loads(rows.readline())["messages"][0]["content"]
        done = subprocess.run(
            [sys.executable, "-m", "core.train.generate", str(into / "merged"), "--system", system,
             "--prompt", QUESTION, "--max-new-tokens", "16", "--json"],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        if done.returncode != 0:
            raise SmokeFailed(done.stderr[-1000:])
        return {"asked": QUESTION, "answer": json.loads(done.stdout)["text"].strip()}

    def tests(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=JOB_SECONDS)
        if done.returncode != 0:
            raise SmokeFailed(done.stdout[-2000:])
        return {"told": done.stdout.splitlines()[-1]}

    def bench(self) -> dict[str, Any]:
        peers = ["ours", "lora"] + (["trl"] if importlib.util.find_spec("bitsandbytes") else [])
        command = [sys.executable, "-m", "bench.qlora", "--runs", "3", "--only", *peers]
        if self.model.is_dir():
            command += ["--model", str(self.model)]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*command, "--report", str(Path(folder) / "report.txt")],
                cwd=ROOT, capture_output=True, text=True, check=False, timeout=JOB_SECONDS,
            )  # fmt: skip
        if done.returncode != 0:
            raise SmokeFailed(done.stderr[-1000:])
        figures = json.loads(done.stdout.splitlines()[-1])
        return {
            "figures": figures,
            "ratios": {name: round(row["ratio"], 3) for name, row in figures.items() if row.get("ratio")},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: SmolLM2-135M from the demo's wheel)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--report", type=Path, help="folder for the report (default: build/smoke)")
    parser.add_argument("--skip", nargs="*", default=[], metavar="PART", help="parts by name; the report says so")
    given = parser.parse_args()
    if os.environ.get("EFT_HARDWARE_SMOKE") != "1":
        print("this trains for about five minutes on this box's card: EFT_HARDWARE_SMOKE=1 make smoke", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped on the way out
    began = datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="eft-smoke-") as folder:
        smoke = Smoke((given.model or wheel.gguf()).absolute(), Path(folder), given.epochs, given.skip)
        ok = smoke.run()
        report = {
            "smoke": 1,
            "ok": ok,
            "eft": __version__,
            "began": began.isoformat(timespec="seconds"),
            "card": smoke.kind,
            "hardware": hardware(),
            "parts": smoke.parts,
        }
        text = json.dumps(report, indent=1).replace(folder, "<folder>").replace(str(Path.home()), "~")
    where = given.report or ROOT / "build" / "smoke"
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"smoke-{smoke.kind.lower().replace(' ', '-')}-{began:%Y-%m-%d-%H%M}.json"
    path.write_text(text + "\n")
    print(f"\n{'all of it held' if ok else 'NOT ALL OF IT HELD'} on {smoke.kind}. The report to send in: {path}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
