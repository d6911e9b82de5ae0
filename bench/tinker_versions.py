"""Which versions of Tinker's SDK run against the service: `python -m bench.tinker_versions [--only VERSION …]`.

Each version runs a recipe in an environment of its own, unmodified: six steps, saved weights, samples,
log-probabilities and resumption. All of them have to come to the same numbers as the newest, to the bit. The report is
bench/results/tinker-versions.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import models, tinker_sdk
from tests.support.service import ROOT, Service

LOOP = ROOT / "tests" / "contract" / "tinker" / "supervised.py"
REPORT = ROOT / "bench" / "results" / "tinker-versions.json"
SAME = ("losses", "norms", "logprobs", "sampled", "again", "rescored", "of_prompt", "in_place", "rank", "next")
NEWEST = "0.38.0"


def tried(service: Service, version: str, seconds: float) -> dict[str, Any]:
    """What the recipe came to: `told`, or `failed` with the last lines of its output."""
    python = tinker_sdk.python(None if version == NEWEST else version)
    began = time.monotonic()
    ran = subprocess.run(
        [str(python), str(LOOP), str(models.folder() / "tiny"), "common"],
        env=tinker_sdk.environment(service),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    took = round(time.monotonic() - began, 1)
    if ran.returncode:
        return {"failed": ran.stderr[-1000:], "seconds": took}
    return {"told": json.loads(ran.stdout.splitlines()[-1]), "seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tinker_versions", description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, metavar="VERSION")
    parser.add_argument("--seconds", type=float, default=400, help="time for one version")
    given = parser.parse_args()
    versions = [NEWEST, *reversed(tinker_sdk.older())] if given.only is None else [NEWEST, *given.only]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), {"EFT_MODEL_ROOTS": str(models.folder()), "EFT_MAX_SESSIONS": "0"})
        try:
            service.start()
            for version in versions:
                found[version] = tried(service, version, given.seconds)
                told, newest = found[version].get("told"), found[NEWEST].get("told")
                same = bool(told) and bool(newest) and all(told[name] == newest[name] for name in SAME)
                found[version]["outcome"] = "same bits" if same else "other numbers" if told else "failed"
                print(f"{version:8} {found[version]['outcome']:14} {found[version]['seconds']:6.1f} s", flush=True)
                if "failed" in found[version]:
                    print(found[version]["failed"], flush=True)
        finally:
            service.stop()
    outcomes = {version: one["outcome"] for version, one in found.items()}
    summary = {"bench": "tinker_versions", "outcomes": outcomes}
    if given.only is None:
        REPORT.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
