"""Libraries' messages that are known and harmless do not reach a job's log; all others do."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.trainer import ENVIRONMENT, ROOT

IMPORTS = """
import logging, warnings
from core.train.model.load import quiet
quiet()
quiet()
import torchao
from torchao.prototype import mx_formats
import bitsandbytes
warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed in v6.", FutureWarning)
logging.getLogger("torchao").warning("Failed to find what it needs")
warnings.warn("something else is deprecated", FutureWarning)
"""


def test_known_and_harmless_messages_are_silent_and_no_others() -> None:

    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip() and "warnings.warn(" not in line]
    assert len(lines) == 2, done.stderr
    assert "Failed to find what it needs" in lines[0] and "something else is deprecated" in lines[1]
