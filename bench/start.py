"""From POST to the trainer: `python -m bench.start [--runs N]`.

Two whole services on this machine, one that keeps a spare trainer and one that does not (EFT_SPARE=0), get the same
job in turn. The clock runs from before the POST is sent to the first line of the trainer's events.jsonl, and to its
first training step; the model (0.2 million weights) is on the data root already. The spare, or the fork server of a
box without GPUs, is ready before each POST; the other service's fork server is ended before each POST.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import compare, finish, show
from tests.support.service import Service, wait_for
from tests.support.tiny_model import make


class Site:
    """A running service and its one job spec."""

    def __init__(self, folder: Path, models: Path, spare: bool) -> None:
        folder.mkdir()
        self.spare = spare
        self.service = Service(
            folder,
            {
                "EFT_SPARE": str(int(spare)),
                "EFT_MODEL_ROOTS": str(models),
                # What an installation has, not what tests shorten.
                "EFT_LEASE_SECONDS": "90",
                "EFT_RENEW_SECONDS": "15",
                "EFT_FENCE_SECONDS": "60",
                "EFT_RELAY_SECONDS": "1",
                "EFT_SWEEP_SECONDS": "5",
            },
        )
        self.service.start()
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(32)))
        training = {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 64}
        self.spec = {"model": str(models / "tiny"), "data": self.service.upload(rows), "training": training}
        self.jobs = 0

    def run(self) -> dict[str, float]:
        """Seconds from the POST to each stage of one job."""
        if self.spare:
            wait_for(self.ready, 120, "a spare trainer or a fork server")
        else:
            for pid in self.service.spares():
                os.kill(pid, signal.SIGKILL)
        began = time.time()
        job_id = self.service.submit(self.spec)
        posted = time.time()
        job = self.service.wait(job_id, "succeeded", "failed", timeout=300)
        assert job["status"] == "succeeded", self.service.describe(job_id)
        self.jobs += 1
        (path,) = (self.service.data / "runs" / job_id).glob("attempt-2/events.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        step = next(line["time"] for line in lines if line["type"] == "metrics")
        prepared = (self.service.data / "runs" / job_id / "attempt-1" / "events.jsonl").stat().st_mtime
        claimed = (self.service.data / "runs" / job_id / "attempt-2" / "run.json").stat().st_mtime
        return {
            "answered": posted - began,
            "prepared": prepared - began,
            "claimed": claimed - began,
            "line": lines[0]["time"] - began,
            "step": step - began,
        }

    def ready(self) -> bool:
        """Whether the next job finds a spare trainer of its own, or the fork server of all."""
        logs = [self.service.folder / "up.log", *(self.service.data / "logs").glob("*.log")]
        text = "\n".join(path.read_text(errors="replace") for path in logs)
        return re.search(r"fork server \d+ is ready", text) is not None or text.count("spare trainer") > self.jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    sites: list[Site] = []
    with tempfile.TemporaryDirectory(prefix="eft-bench-") as name:
        folder = Path(name)
        make(folder / "models" / "tiny")
        try:
            for spare in (True, False):
                sites.append(Site(folder / ("warm" if spare else "cold"), folder / "models", spare))
            for site in sites:
                site.run()  # the model's first way to the data root, and everybody's caches
            figures: list[list[dict[str, float]]] = [[], []]
            for run in range(options.runs):
                for which in (0, 1) if run % 2 == 0 else (1, 0):
                    if which == 1:  # nobody imports torch beside the cold start
                        wait_for(sites[0].ready, 120, "a spare trainer or a fork server")
                    figures[which].append(sites[which].run())
        finally:
            for site in sites:
                site.service.stop()
        for which, label in enumerate(("warm", "cold")):
            medians = {stage: statistics.median(run[stage] for run in figures[which]) for stage in figures[which][0]}
            print(f"{label}, seconds after POST: " + ", ".join(f"{stage} {at:.3f}" for stage, at in medians.items()))
        for stage, words in (("line", "first_line"), ("step", "first_step")):
            key = f"post_to_{words}_seconds_warm_against_cold"
            results[key] = compare([run[stage] for run in figures[0]], [run[stage] for run in figures[1]])
            show(key, results[key], "s")
    finish(results)


if __name__ == "__main__":
    main()
