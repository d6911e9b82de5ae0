"""A child that ignores SIGTERM and has a helper that does too: `python -m tests.support.stubborn FOLDER`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    if folder.name != "helper":
        subprocess.Popen([sys.executable, "-m", "tests.support.stubborn", str(folder / "helper")])
        print("out", os.getcwd(), flush=True)
        print("err", file=sys.stderr, flush=True)
    else:
        (folder.parent / "ready").write_text(str(os.getpid()))
    time.sleep(600)
