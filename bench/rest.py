"""What the service takes while nothing is to be done: `python -m bench.rest [--seconds S]`.

Memory (proportional set size) and processor time of each process of `eft up`, with and without a spare trainer, or a
fork server.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import finish, hardware
from bench.server import cpu_seconds, memory_mib
from tests.support.service import Service, wait_for

SETTLE_SECONDS = 10.0


def at_rest(folder: Path, spare: bool, seconds: float) -> dict[str, tuple[float, float]]:
    """Process → (MiB, percent of one core)."""
    folder.mkdir()
    usual = {"EFT_LEASE_SECONDS": "90", "EFT_RENEW_SECONDS": "15", "EFT_FENCE_SECONDS": "60", "EFT_SWEEP_SECONDS": "5"}
    service = Service(folder, {**usual, "EFT_SPARE": str(int(spare))})
    service.start()
    try:
        pids: dict[str, int] = dict(service.note()["pids"])
        if spare:
            (pids["spare"],) = wait_for(service.spares, 120, "the spare")
            logs = [folder / "up.log", *(service.data / "logs").glob("*.log")]
            wait_for(lambda: any("is ready" in log.read_text(errors="replace") for log in logs), 120, "the spare")
        time.sleep(SETTLE_SECONDS)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        return {
            name: (memory_mib(pid), 100 * (cpu_seconds(pid) - before[name]) / seconds) for name, pid in pids.items()
        }
    finally:
        service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="eft-bench-") as name:
        for spare in (False, True):
            for process, (mib, percent) in at_rest(Path(name) / str(spare), spare, options.seconds).items():
                words = f"{process}_{'with' if spare else 'without'}_spare"
                print(f"{words:<40} {mib:8.1f} MiB   {percent:6.2f} % of a core", flush=True)
                alone = {"peer": None, "ratio": None, "runs": 1, "hardware": hardware()}
                results[f"rest_mib_{words}"] = {"ours": mib} | alone
                results[f"rest_cpu_percent_{words}"] = {"ours": percent} | alone
    finish(results)


if __name__ == "__main__":
    main()
