"""`python -m tests.support.recording`: docs/images/first-minute.svg and docs/images/loss.png, from commands that run.

Starts a service of its own with the example's model, types what the README tells, and records the terminal. A pause
lasts at most PAUSE seconds and a command at most LONGEST seconds on the picture, which says so. Takes a few minutes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from eft.errors import ExitCode

from bench import wheel
from tests.support.hub import serving
from tests.support.recording.emulator import Emulator
from tests.support.recording.svg import Picture, animated, still
from tests.support.service import ROOT, running
from tests.support.terminal import Terminal

COLUMNS, LINES = 92, 26
PAUSE = 0.8
"""Longest time for which a picture is shown, seconds."""
EVERY = 0.15
"""Seconds between two pictures at least."""
TYPED = 0.04
"""Seconds for a character that is typed."""
LONGEST = 12.0
"""Longest time for which a command is shown, seconds; a longer one runs faster."""
SHORTEST = 0.12
"""Shortest time for which a picture is shown, seconds."""
READ = 2.5
"""Seconds for which the end of a command is shown."""
LAST = 4.0
"""Seconds for which the last picture is shown."""
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
IMAGES = ROOT / "docs" / "images"
COMMANDS: list[tuple[str, float | None]] = [
    ("eft submit job.yaml --wait", None),
    ("eft submit job.yaml --set name=slower --set optimizer.learning_rate=3e-4", None),
    ("eft watch slower", 75),
    ("eft download voice-intents --output out", None),
]
"""What is typed, and after how many seconds q is pressed."""


class Recording:
    """Commands one after another on one screen."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self.screen = Emulator(COLUMNS, LINES)
        self.pictures: list[tuple[float, Picture]] = []

    def type(self, command: str) -> None:
        self.screen.feed("\x1b[1m\x1b[32m$\x1b[0m ")
        for start in range(0, len(command), 3):
            self.screen.feed(command[start : start + 3])
            self._show(3 * TYPED)
        self.screen.feed("\r\n")

    def run(self, command: str, *, quit_after: float | None = None) -> int:
        """Type a command, and record it to its end; `quit_after`: press q after so many seconds. Its exit status."""
        self.type(command)
        first = len(self.pictures)
        code = self._recorded(command, quit_after)
        self.pictures[first:] = faster(self.pictures[first:])
        return code

    def _recorded(self, command: str, quit_after: float | None) -> int:
        terminal = Terminal(["bash", "-c", f"cd {self.folder} && {command}"], self.environment, COLUMNS, LINES)
        started = shown = time.monotonic()
        fed = 0
        try:
            while True:
                ended = terminal.process.poll() is not None
                if ended:
                    time.sleep(0.3)  # the rest of what it wrote
                text = terminal.raw
                if len(text) > fed:
                    self.screen.feed(text[fed:])
                    fed = len(text)
                    now = time.monotonic()
                    self._show(now - shown)
                    shown = now
                if ended:
                    return int(terminal.process.returncode)
                if quit_after is not None and time.monotonic() - started > quit_after:
                    terminal.press("q")
                    quit_after = None
                time.sleep(EVERY)
        finally:
            terminal.close()

    def _show(self, seconds: float) -> None:
        picture = self.screen.picture()
        if self.pictures:
            before, same = self.pictures[-1]
            if same == picture:
                return
            self.pictures[-1] = (min(PAUSE, max(before, seconds)), same)
        self.pictures.append((TYPED, picture))


def faster(pictures: list[tuple[float, Picture]]) -> list[tuple[float, Picture]]:
    """The pictures in at most LONGEST seconds; those too short to be seen are left out, never the last one."""
    speed = min(1.0, LONGEST / max(LONGEST, sum(seconds for seconds, _ in pictures)))
    kept: list[tuple[float, Picture]] = []
    held = 0.0
    for number, (seconds, picture) in enumerate(pictures):
        held += seconds * speed
        if held >= SHORTEST or number == len(pictures) - 1:
            kept.append((held, picture))
            held = 0.0
    kept[-1] = (READ, kept[-1][1])
    return kept


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="recording-"))
    for name in ("train.jsonl", "heldout.jsonl", "job.yaml"):
        (folder / name).write_bytes((ROOT / "examples" / "voice-intents" / name).read_bytes())
    with serving() as hub:
        hub.repo = MODEL
        hub.files = {path.name: path.read_bytes() for path in wheel.model().iterdir() if path.is_file()}
        settings = {"HF_ENDPOINT": hub.url, "EFT_NODE": "gpu-box", "OMP_NUM_THREADS": "2", "EFT_SPARE": "1"}
        for service in running(folder / "data", settings):
            clean = {key: value for key, value in os.environ.items() if not key.startswith("EFT_")}
            recording = Recording(
                clean
                | {
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "EFT_URL": service.note()["url"],
                    "EFT_API_KEY": service.key,
                    "XDG_CONFIG_HOME": str(folder / "config"),
                },
                folder,
            )
            for command, quit_after in COMMANDS:
                code = recording.run(command, quit_after=quit_after)
                if code not in ({0} if quit_after is None else {0, int(ExitCode.INTERRUPTED)}):
                    raise SystemExit(f"{command} ended with {code}:\n{still(recording.screen.picture())}")
    recording.pictures[-1] = (LAST, recording.pictures[-1][1])
    title = "eft submit, eft watch and eft download on a terminal; long waits are shortened"
    (IMAGES / "first-minute.svg").write_text(animated(recording.pictures, title), encoding="utf-8")
    shutil.copyfile(folder / "out" / "loss.png", IMAGES / "loss.png")
    print(f"{len(recording.pictures)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
