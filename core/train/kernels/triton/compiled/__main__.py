"""`python -m core.train.kernels.triton.compiled` compiles every Triton kernel for every target, without a GPU.

`--check` (the default) compares with the committed table and fails on a difference, a spill, scratch memory or too
much local memory; `--write` writes the table. Triton comes from `.venv/aot` (`make test` puts it there).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from core.train.kernels.triton.compiled import table

ROOT = Path(__file__).resolve().parents[5]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m core.train.kernels.triton.compiled", description=__doc__)
    todo = parser.add_mutually_exclusive_group()
    todo.add_argument("--check", action="store_true", help="compare with the table (default)")
    todo.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "eft" / "compiled")
    parser.add_argument("--no-cache", action="store_true", help="compile everything anew")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()

    # What a shell has set for Triton would change what is compiled.
    for name in [name for name in os.environ if name.startswith("TRITON_")]:
        del os.environ[name]
    if problem := _triton():
        print(problem, file=sys.stderr)
        return 2
    from core.train.kernels.triton.compiled import build

    began = time.monotonic()
    rows, compiled = build.rows(None if arguments.no_cache else _usable(arguments.cache), arguments.processes)
    took = time.monotonic() - began
    print(f"{len(rows)} forms for {len(table.TARGETS)} targets, {compiled} of them compiled now, {took:.1f} s")
    wrong = [fault for row in rows for fault in table.faults(row)]
    changed = table.differences(table.read(), rows)
    if arguments.write:
        table.write(rows)
        print(f"{table.PATH.relative_to(ROOT)}: {len(changed)} lines changed; `make docs` renders them")
    else:
        wrong += [f"differs from the table: {line}" for line in changed]
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong and changed and not arguments.write:
        print("If that is meant: run this with --write, then `make docs`, and commit both.", file=sys.stderr)
    return int(bool(wrong))


def _usable(cache: Path) -> Path | None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"nothing is kept for the next time: {error}", file=sys.stderr)
        return None
    return cache


def _triton() -> str | None:
    """Make the right compiler importable; otherwise say what is missing."""
    sys.path.insert(0, str(ROOT / ".venv" / "aot"))
    try:
        import triton
    except ImportError:
        return f"Triton {table.TRITON} is needed, in .venv/aot: `make test` puts it there (locks/aot.txt)."
    if triton.__version__ != table.TRITON:
        return f"The table is of Triton {table.TRITON}, and this is {triton.__version__} ({triton.__file__})."
    return None


if __name__ == "__main__":
    sys.exit(main())
