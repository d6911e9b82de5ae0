"""The dashboard in headless Chromium beside MLflow's page: `python -m bench.web [--runs N] [--metrics N] [--steps N]
[--jobs N] [--longest N] [--rounds N] [--mlflow FOLDER] [--folder FOLDER]`.

Compare holds `runs` jobs with `metrics` curves of `steps` steps beside each other: time to the first paint and to the
drawn curves, when nobody has looked at them before, right after the server was started again, and later; frames while
one drags over a curve, moves over it and shows all of it again; memory of the page. Jobs scrolls through `jobs` rows:
time to load all of them, and frames while scrolling. MLflow's server holds the same curves, and its page is asked in
turn, in a browser of its own: processor seconds of browser and server until the curves are drawn, and of the browser
for a gesture; the other browser is suspended meanwhile. It is installed into an environment of its own (`--mlflow`, by
default a folder that is deleted afterwards). Rows are written to the databases directly, in the form in which workers
and MLflow's store write them. Another job has one curve of `longest` steps; its page is opened alone. With `--folder`
the databases are kept there, and filled only where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import web_mlflow
from bench.api import _json, our_server, started
from bench.report import compare, finish, hardware, show
from bench.server import Server
from bench.web_data import NAMES, Wanted, fill
from core.storage.layout import Layout
from tests.support.browser import MISSING, Browser, browser, programs

FRAMES = """const [work, frames] = arguments, done = arguments[arguments.length - 1], times = [];
const step = new Function("n", work);
let last = performance.now(), n = 0;
const frame = () => { const now = performance.now(); if (n) times.push(now - last); last = now;
  if (n++ < frames) { step(n); requestAnimationFrame(frame); } else done(times); };
requestAnimationFrame(frame);"""
COLLECT = """const times = window.benchFrames = []; let last = performance.now();
const frame = () => { const now = performance.now(); times.push(now - last); last = now;
  if (window.benchFrames === times) requestAnimationFrame(frame); };
requestAnimationFrame(frame);"""
COLLECTED = "const times = window.benchFrames; window.benchFrames = null; return times.slice(2);"
PAINTED = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
SHOWN = """const shown = [...eft.charts.values()].filter(({ u }) => u);
return [shown.length, shown.reduce((sum, { lines }) => sum + lines.length, 0)];"""
"""Charts and lines of our page."""
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 300
"""Seconds for which curves are waited for; a page that has not drawn all of them by then is told so."""


@dataclass(slots=True)
class Page:
    """A page with curves, in a browser of its own."""

    window: Browser
    folder: Path
    """Of the browser."""
    server: int
    """Process of the server behind it."""
    address: str
    drawn: str
    """Script that says whether all curves are drawn."""
    curve: str
    """Selector of the part of the first chart that one drags over."""

    def open(self) -> dict[str, float]:
        """Load it; how long it took, in milliseconds of the clock and seconds of processors. Where the curves were not
        drawn within PATIENCE, `curves drawn` is missing and the other figures are lower bounds."""
        origin = urlsplit(self.address)
        self.window.go(f"{origin.scheme}://{origin.netloc}/nothing")  # of this server: the process of the page goes on
        before = self._spent()
        self.window.go(self.address)
        drawn = self._drawn()
        found = {"first paint, ms": self.window.run(PAINTED)}
        if drawn:
            found["curves drawn, ms"] = self.window.run("return performance.now()")
            first = self.window.run("return typeof eft === 'undefined' ? null : eft.shownAt")
            found |= {} if first is None else {"first curves drawn, ms": first}
        time.sleep(1)
        browser, server = (now - then for now, then in zip(self._spent(), before, strict=True))
        return found | {"browser, CPU s": browser, "server, CPU s": server}

    def _drawn(self) -> bool:
        end = time.monotonic() + PATIENCE
        while not self.window.run(self.drawn):
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def gestures(self, count: int) -> dict[str, Any]:
        """Drag over the first curve, which zooms in; move over it; show all. Frames, and CPU seconds of each."""
        box = self.window.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({ block: 'center' });"
            "const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]",
            self.curve,
        )
        time.sleep(0.5)
        before = self._spent()[0]
        self.window.run(COLLECT)
        for turn in range(count):
            self._gesture(box, 0.1 + 0.05 * (turn % 5))
        times = self.window.run(COLLECTED)
        return {"frames": times, "cpu": (self._spent()[0] - before) / count}

    def _gesture(self, box: list[float], start: float) -> None:
        left, top, width, height = box
        y = top + height / 2

        def mouse(kind: str, x: float, **more: Any) -> None:
            self.window.cdp("Input.dispatchMouseEvent", type=kind, x=left + width * x, y=y, **more)

        press: dict[str, Any] = {"button": "left", "clickCount": 1}
        mouse("mouseMoved", start)
        mouse("mousePressed", start, **press)
        for step in range(1, 9):
            mouse("mouseMoved", start + 0.07 * step, button="left", buttons=1)
        mouse("mouseReleased", start + 0.56, **press)
        for step in range(8):
            mouse("mouseMoved", 0.9 - 0.1 * step)
        for clicks in (1, 2):
            mouse("mousePressed", 0.5, button="left", clickCount=clicks)
            mouse("mouseReleased", 0.5, button="left", clickCount=clicks)
        time.sleep(0.4)

    def memory(self) -> dict[str, float]:
        self.window.cdp("HeapProfiler.collectGarbage")
        time.sleep(1)
        heap = self.window.run("return performance.memory.usedJSHeapSize / 1e6")
        pages = [pid for pid in _family(self.folder) if b"--type=renderer" in _words(pid)]
        return {"heap of the page, MB": heap, "its process, MB": max(map(_own_memory, pages)) / 1e6}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Its browser does nothing meanwhile, so that it takes no processor from what is measured."""
        processes = _family(self.folder)
        try:
            for pid in processes:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _spent(self) -> tuple[float, float]:
        return sum(map(_cpu, _family(self.folder))), sum(map(_cpu, _below({self.server})))


def _family(folder: Path) -> set[int]:
    """Processes of the browser whose profile is below the folder."""
    mark = f"--user-data-dir={folder / 'profile'}".encode()
    return _below({pid for pid in _processes() if mark in _words(pid)})


def _below(roots: set[int]) -> set[int]:
    parents = {pid: int(fields[1]) for pid in _processes() if (fields := _stat(pid))}
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _stat(pid: int) -> list[str]:
    """Fields of proc(5)'s stat behind the name; none where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def _own_memory(pid: int) -> int:
    """Bytes that only this process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.web")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--metrics", type=int, default=10, choices=range(1, len(NAMES) + 1))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--longest", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mlflow", type=Path, help="environment with MLflow; made where it is not there")
    parser.add_argument("--folder", type=Path, help="where the databases are kept")
    asked = parser.parse_args()
    if programs() is None:
        raise SystemExit(f"this bench needs {MISSING}")
    print(f"{hardware()}, load average {os.getloadavg()[0]:.1f}", flush=True)
    wanted = Wanted(asked.runs, NAMES[: asked.metrics], asked.steps, asked.longest)
    with tempfile.TemporaryDirectory(prefix="eft-web-") as name, ExitStack() as stack:
        folder = Path(name)
        kept = asked.folder or folder
        kept.mkdir(exist_ok=True)
        peer = web_mlflow.Peer(web_mlflow.environment(asked.mlflow or folder / "mlflow"), kept)
        url = f"sqlite:///{kept / 'eft.db'}"
        first = stack.enter_context(ExitStack())
        ours, headers, file_id = our_server(url, kept, first)
        compared = _filled(kept, wanted, asked.jobs, peer, ours, headers, file_id)
        for job in compared:
            kept_curves = Layout(kept / "data").curves(job)
            kept_curves.parent.mkdir(parents=True, exist_ok=True)
            kept_curves.unlink(missing_ok=True)

        def beside(what: str, address: str) -> Browser:
            (folder / what).mkdir()
            made = stack.enter_context(browser(f"http://{address}", folder / what))
            made.size(1440, 900)
            return made

        window = beside("browser", ours.address)
        window.go("ui/signin")
        window.type("input[name=key]", headers["Authorization"].removeprefix("Bearer "))
        window.click("button.main")
        window.find("header.bar")
        compare_path = "/ui/compare?" + "&".join(f"job={one}" for one in compared[:-1])
        paths = {"compare": compare_path, "one of the runs": f"/ui/jobs/{compared[0]}"}
        paths["one long curve"] = f"/ui/jobs/{compared[-1]}"

        def page(server: Server, what: str) -> Page:
            address = f"http://{server.address}{paths[what]}"
            return Page(window, folder / "browser", server.pid, address, "return eft.drawn > 0", "#plot-loss .u-over")

        results: dict[str, dict[str, Any]] = {what: {} for what in paths}
        for what in ("compare", "one long curve"):
            results[what] |= {f"first look: {key}": value for key, value in page(ours, what).open().items()}
        first.close()
        ours = stack.enter_context(started(url, kept))
        for what in paths:
            results[what] |= {f"after a restart: {key}": value for key, value in page(ours, what).open().items()}
        mine = page(ours, "compare")
        # While nothing of the peer runs: its server works on after its page was drawn.
        for what, one in (("compare", mine), ("one long curve", page(ours, "one long curve"))):
            results[what] |= one.open() | _of_frames("gestures", sorted(one.gestures(8)["frames"]))
        window.go(f"http://{ours.address}/ui/jobs")
        results["jobs"] = _jobs(window, asked.jobs)
        stack.enter_context(peer.serve())
        other = beside("peer", peer.address)
        theirs = Page(
            other,
            folder / "peer",
            peer.pid,
            peer.page,
            web_mlflow.DRAWN % min(asked.runs, web_mlflow.SHOWN_RUNS),
            ".js-plotly-plot .nsewdrag",
        )
        results |= _beside(mine, theirs, asked.rounds)
    for page, figures in results.items():
        for what, value in figures.items() if "ratio" not in figures else ():  # shown already
            if isinstance(value, float | int):
                print(f"{page:<22} {what:<44} {value:>12,.1f}", flush=True)
    finish({page: figures | {"hardware": hardware()} for page, figures in results.items()})


def _filled(
    folder: Path, wanted: Wanted, jobs: int, peer: web_mlflow.Peer, ours: Server, headers: dict[str, str], file_id: str
) -> list[str]:
    """Ids of the jobs that have curves, in both databases."""
    note = folder / "filled.json"
    asked = [wanted.runs, list(wanted.names), wanted.steps, wanted.longest, jobs]
    if note.exists():
        found = json.loads(note.read_text())
        if found["asked"] != asked:
            raise SystemExit(f"{folder} was filled with {found['asked']}: take another folder")
        peer.experiment = found["experiment"]
        return list(found["compared"])
    began = time.monotonic()
    spec = {"name": "one of many", "model": "org/model", "data": {"train": file_id}}
    first = _json(ours, "POST", "/jobs", json.dumps(spec).encode(), headers)["id"]
    compared = fill(folder / "eft.db", first, jobs, wanted)
    between = time.monotonic()
    peer.fill(wanted)
    spent = f"{between - began:.0f} s, and for the peer in {time.monotonic() - between:.0f} s"
    print(f"{jobs:,} jobs, {wanted.points:,} points written in {spent}", flush=True)
    note.write_text(json.dumps({"asked": asked, "compared": compared, "experiment": peer.experiment}))
    return compared


def _beside(mine: Page, theirs: Page, rounds: int) -> dict[str, dict[str, Any]]:
    """Both pages in turn: opened, and then looked at."""
    opened: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    looked: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for turn in range(rounds):
        pair = [("ours", mine), ("peer", theirs)]
        for name, page in pair if turn % 2 == 0 else pair[::-1]:
            with (theirs if page is mine else mine).suspended():
                opened[name].append(page.open())
                if "curves drawn, ms" in opened[name][-1]:
                    looked[name].append(page.gestures(8))
                else:
                    print(f"{name}: not all curves were drawn within {PATIENCE} s", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for key, unit in (("browser, CPU s", "s"), ("server, CPU s", "s")):
        found[f"open: {key}"] = compare(
            *([max(one[key], 1 / TICKS) for one in opened[name]] for name in ("ours", "peer"))
        )
        show(f"open: {key}", found[f"open: {key}"], unit)
    if len(looked["ours"]) == len(looked["peer"]):
        found["gesture: browser, CPU s"] = compare(*([one["cpu"] for one in looked[name]] for name in ("ours", "peer")))
        show("gesture: browser, CPU s", found["gesture: browser, CPU s"], "s")
    for name, page in (("ours", mine), ("peer", theirs)):
        shown = page.window.run(web_mlflow.SHOWN if name == "peer" else SHOWN)
        times = sorted(time for one in looked[name] for time in one["frames"])
        found[f"page, {name}"] = {
            **{
                key: statistics.median(one[key] for one in opened[name])
                for key in ("first paint, ms", "curves drawn, ms")
                if all(key in one for one in opened[name])
            },
            **(_of_frames("gestures", times) if times else {}),
            **page.memory(),
            "charts": shown[0],
            "lines": shown[1],
        }
    return found


def _jobs(window: Browser, count: int) -> dict[str, float]:
    window.find("#jobs tbody tr")
    began = time.monotonic()

    def loaded() -> bool:
        window.run("scrollTo(0, document.documentElement.scrollHeight)")
        return bool(window.run("return eft.rows.all.length >= arguments[0]", count))

    window.wait(loaded, "all jobs", 600)
    found = {"all rows loaded, s": time.monotonic() - began}
    window.run("scrollTo(0, 0)")
    time.sleep(1)
    found |= _frames(window, "scroll by 120 px a frame", "scrollBy(0, 120)", 300)
    jump = "scrollTo(0, (n * 7919 % 100) / 100 * document.documentElement.scrollHeight)"
    found |= _frames(window, "jump to anywhere each frame", jump, 60)
    found["rows in the page"] = window.run("return document.querySelectorAll('#jobs tbody tr').length")
    window.cdp("HeapProfiler.collectGarbage")
    found["heap of the page, MB"] = window.run("return performance.memory.usedJSHeapSize / 1e6")
    return found


def _frames(window: Browser, what: str, work: str, frames: int) -> dict[str, float]:
    return _of_frames(what, sorted(window.run_async(FRAMES, work, frames)))


def _of_frames(what: str, times: list[float]) -> dict[str, float]:
    """Of sorted times."""
    return {
        f"{what}: median frame, ms": statistics.median(times),
        f"{what}: 99th of 100 frames, ms": times[int(len(times) * 0.99) - 1],
        f"{what}: longest frame, ms": times[-1],
    }


if __name__ == "__main__":
    main()
