"""The unmodified SDK of Tinker against a whole service, with a real small model."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tinker_sdk
from tests.support.service import Service, running

LOOP = Path(__file__).with_name("supervised.py")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {"EFT_MODEL_ROOTS": str(models), "EFT_RETRY_BACKOFF_SECONDS": "0.05"}
    yield from running(tmp_path_factory.mktemp("tinker"), environment, settle=0)


def test_a_supervised_loop_runs_to_its_end(service: Service, models: Path) -> None:
    """Loss falls; a resumed model goes on to the bit; a sampler sees the log-probabilities of training."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(service.folder),
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": str(service.note()["url"]),
        "TINKER_API_KEY": f"tml-{service.key}",
    }
    ran = subprocess.run(
        [str(tinker_sdk.python()), str(LOOP), str(models / "tiny")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    losses = told["losses"]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(norm > 0 for norm in told["norms"])
    assert told["saved"].startswith("tinker://") and told["saved"].endswith("/weights/first")
    assert told["info"]["lora_rank"] == 4
    assert told["lengths"] == [5, 3, 19]
    assert told["resumed"] == told["logprobs"]
    assert told["next"][0] == told["next"][1]
    assert told["again"] == told["sampled"] and told["sampled"][0] != told["sampled"][1]
    assert [len(tokens) for tokens, _ in told["sampled"]] == [5, 5]
    assert told["of_prompt"][0] is None
    assert told["of_prompt"][1:] == pytest.approx(told["logprobs"][0], abs=1e-2)
    assert all(math.isfinite(loss) for loss in told["rewarded"].values())
    assert told["rewarded"]["importance_sampling"] == pytest.approx(told["rewarded"]["ppo"])
    assert "99999" in told["refused"] or "target" in told["refused"]
    assert len(told["from_path"]) == 6
