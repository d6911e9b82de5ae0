"""How fast a file is checked, and in how much memory: `python -m bench.data_check [--gb 2]`.

The peers read the same file by line and do nothing with it: `for line in open(path)`, as text (which is what a checker
needs to see) and as bytes; and, to have a measure of what checking costs, `json.loads` of every line. Ours parses every
row, checks its types, its UTF-8, doubled keys, the order of its turns and that there is something to learn, and counts.
In turn, in one process, the file in the page cache. Memory is the peak of a process of its own, children included.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import finish, in_turn, show
from core.data.check import check_file
from core.data.parallel import processes

WORDS = """
lamp kitchen turn on off warm please could you the a bright timer minutes play music louder quiet door lock window
weather tomorrow morning remind me to call milk order train at seven late reading which because answer number
""".split()  # noqa: SIM905
PEAK = """
import resource, sys
from pathlib import Path
from bench import process
from core.data.check import check_file
report = check_file(Path(sys.argv[1]))
assert report.ok, report.faults
print(process.peak() / 2**20, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def write_chats(path: Path, size: int) -> int:
    """Chats of two to six turns, from 100 bytes to a few KB, some of it not ASCII, some of it escaped; how many."""
    pick = random.Random(0)  # noqa: S311 -- the same file every time
    pool = []
    for _ in range(20_000):
        turns = []
        for role in ("user", "assistant") * pick.randint(1, 3):
            text = " ".join(pick.choices(WORDS, k=pick.randint(3, 160)))
            turns.append({"role": role, "content": text + pick.choice(["", "\n", " „größer“", ' {"on": true}'])})
        pool.append(json.dumps({"messages": turns}, ensure_ascii=pick.random() < 0.5).encode() + b"\n")
    rows = written = 0
    with path.open("wb") as stream:
        while written < size:
            block = pick.choices(pool, k=1000)
            stream.writelines(block)
            written += sum(map(len, block))
            rows += len(block)
    return rows


def seconds_of(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    size = int(options.gb * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        path, small = Path(folder) / "chats.jsonl", Path(folder) / "small.jsonl"
        rows = write_chats(path, size)
        write_chats(small, size // 10)
        actual = path.stat().st_size

        def ours() -> None:
            report = check_file(path)
            assert report.ok and report.rows == rows, report.faults

        def by_line_text() -> None:
            with path.open(encoding="utf-8") as stream:
                for _ in stream:
                    pass

        def by_line_bytes() -> None:
            with path.open("rb") as stream:
                for _ in stream:
                    pass

        def loads() -> None:
            with path.open("rb") as stream:
                for line in stream:
                    json.loads(line)

        results = {}
        peers = {"by line, as text": by_line_text, "by line, as bytes": by_line_bytes, "json.loads by line": loads}
        for name, peer in peers.items():
            runs = options.runs if peer is not loads else 2
            speed = in_turn(
                lambda: actual / 1e6 / seconds_of(ours), lambda work=peer: actual / 1e6 / seconds_of(work), runs
            )
            show(f"checking {actual / 1e9:.1f} GB against {name}", speed, "MB/s")
            results[f"check_against_{name.replace(', ', '_').replace(' ', '_')}"] = speed
        peaks = {}
        for name, file in (("small", small), ("large", path)):
            run = subprocess.run([sys.executable, "-c", PEAK, str(file)], check=True, capture_output=True, text=True)
            peaks[name] = [round(float(peak), 1) for peak in run.stdout.split()]
            print(
                f"peak memory, {file.stat().st_size / 1e9:.2f} GB: {peaks[name][0]} MB, of a child {peaks[name][1]} MB"
            )
        results["memory"] = {
            "bytes": [small.stat().st_size, actual],
            "peak_mb": peaks,
            "processes": processes(),
            "rows": rows,
        }
    finish(results)


if __name__ == "__main__":
    main()
