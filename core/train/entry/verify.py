"""`eft verify JOB`: replay the first steps of a job under TRL's trainer on the same tokens, and compare the curves.

Runs on the box whose data root has the job, or on a folder of `eft train`. Needs the extra `verify`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core.errors import EftError, SpecError
from core.spec.run.folder import ORDER_FILE

SHOWN = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "accuracy")
"""Figures that the table has columns for, where both curves have them."""
RUNS = "runs"


def main() -> int:
    args = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Trainers print on their own; standard output is the document's.
            with contextlib.redirect_stdout(sys.stderr):
                document = _verify(args.job, args.steps)
    except EftError as error:
        if args.json:
            print(json.dumps({"error": error.as_dict()}))
        console.print(f"{error.field}: {error.message}" if error.field else error.message, style="red", markup=False)
        return 1
    if args.json:
        print(json.dumps(document))
    else:
        _draw(document)
    worst = document["largest"]["loss"]["relative"]
    if args.tolerance is not None and worst > args.tolerance:
        console.print(f"the losses differ by {worst:.1e}, more than {args.tolerance:g}", style="red", markup=False)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eft verify", description="Replay a job's first steps under TRL's trainer and compare the curves."
    )
    parser.add_argument("job", metavar="JOB", help="id of a job below $EFT_DATA, or a folder of `eft train`")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps to replay (default: 20)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="fail if losses differ by more, relative to TRL's")
    parser.add_argument("--json", action="store_true", help="print both curves as JSON")
    return parser


def _verify(job: str, steps: int) -> dict[str, Any]:
    if steps < 1:
        raise SpecError("--steps is at least 1", field="steps")
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = ""
    folders = attempts(job)
    from core.train.model.noise import hush

    hush()
    from core.train.verify.compare import compare
    from core.train.verify.peer import EXTRA, train
    from core.train.verify.replay import prepare, recorded

    if not found:
        raise SpecError(EXTRA, field="stage")
    ours = recorded(folders)
    if not ours:
        raise SpecError(f"{job} has reported no step yet", field="job")
    replayed = prepare(folders[0], min(steps, max(ours)))
    trajectory = train(replayed.replay, replayed.model, replayed.tokenizer)
    return {"job": job, "trl": found, "notes": replayed.differing} | compare(ours, trajectory.curve)


def attempts(job: str) -> list[Path]:
    """Folders of a job's attempts, oldest first; or the one folder of a run by hand. SpecError where there is none."""
    folder = Path(job)
    if (folder / ORDER_FILE).is_file():
        return [folder.absolute()]
    root = Path(os.environ.get("EFT_DATA", ".eft")).absolute() / RUNS
    if re.fullmatch(r"[a-z]{2,8}-[0-9a-z]{26}", job):
        numbered = [(int(path.name.partition("-")[2]), path) for path in (root / job).glob("attempt-[0-9]*")]
        found = [path for _, path in sorted(numbered) if (path / ORDER_FILE).is_file()]
        found = [path for path in found if "spec" in json.loads((path / ORDER_FILE).read_bytes())]
        if found:
            return found
    raise SpecError(
        f"{job} is not a folder with {ORDER_FILE}, and {root} has no such job: run this on the box that trained it, "
        "with the same EFT_DATA",
        field="job",
    )


def _table(document: dict[str, Any], names: list[str]) -> Table:
    """Both curves of these figures, side by side."""
    table = Table("step", "loss apart", *(f"{name}{side}" for name in names for side in ("", " (TRL)")))
    for row in document["steps"]:
        cells = [f"{row[side][name]:.6g}" for name in names for side in ("ours", "trl")]
        apart = abs(row["ours"]["loss"] - row["trl"]["loss"]) / max(abs(row["trl"]["loss"]), 1e-12)
        table.add_row(str(row["step"]), f"{apart:.1e}", *cells)
    return table


def _draw(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    names = [name for name in SHOWN if name in document["largest"]]
    shown = len(names)
    unbounded = console.options.update(max_width=1000)
    while shown > 1 and console.measure(_table(document, names[:shown]), options=unbounded).maximum > console.width:
        shown -= 1  # a number that is cut says nothing; the lines below name every figure
    console.print(_table(document, names[:shown]))
    for name in names:
        most = document["largest"][name]
        apart = f"{most['absolute']:.2g} ({most['relative']:.1e} of TRL's)"
        console.print(f"{name}: largest difference {apart} at step {most['step']}")
    for note in document["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"TRL {document['trl']}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
