"""`make demo` on the real small model, cut to two steps: the whole of it, and what it leaves behind.

README.md, docs/quick-start.md and examples/voice-intents/README.md begin with it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.service import ROOT, Service, wait_for

DEMO = ROOT / "examples" / "voice-intents" / "demo.py"


def test_demo_ends_well_and_leaves_nothing_running(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((DEMO.parent / "heldout.jsonl").read_text().splitlines(keepends=True)[:6]))
    less = ("training.max_steps=2", "training.per_device_train_batch_size=2", f"data.eval={_from(DEMO.parent, few)}")
    command = [sys.executable, str(DEMO), "--folder", str(tmp_path), *(x for one in less for x in ("--set", one))]
    # What a user has set for a real installation is none of the demo's business.
    hostile = os.environ | {"EFT_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x", "EFT_URL": "http://127.0.0.1:1"}
    ran = subprocess.run(command, env=hostile, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == "succeeded" and report["answer"]
    assert all(0 <= report[name] <= 1 for name in ("accuracy_before", "accuracy_after"))
    assert all(math.isfinite(report[name]) and report[name] > 0 for name in ("train_seconds", "tokens_per_second"))
    assert Path(report["artifacts"]["loss_plot"]).read_bytes().startswith(b"\x89PNG")
    assert (Path(report["artifacts"]["adapter"]) / "adapter_model.safetensors").is_file()
    assert "held-out accuracy" in ran.stderr and report["job_id"] in ran.stderr
    (model,) = (tmp_path / "models").iterdir()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
    here = Service(tmp_path)  # never started: it only looks at whose data root is in /proc
    assert here.processes() == {}

    again = subprocess.Popen(command, env=hostile, stderr=subprocess.PIPE, text=True)
    assert again.stderr is not None
    for line in again.stderr:
        if line.startswith(("loading", "running")):
            break
    assert here.processes() != {}
    again.send_signal(signal.SIGINT)
    told = again.stderr.read()
    assert again.wait(200) == 130 and "interrupted" in told
    wait_for(lambda: here.processes() == {}, 200, "an end of all processes")
    assert not (tmp_path / "report.json").exists()


def _from(folder: Path, path: Path) -> str:
    """Relative, so that it is a file beside the job and goes up."""
    return os.path.relpath(path, folder)
