"""`eft train` without a server: `python -m core.train.entry.cli MODEL DATA --method lora`.

Makes the same order a worker would make and gives it to the same child process, so that a run by hand and a job are
one thing. Ctrl-C asks the child to write a checkpoint; the same command with the same --output goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from core import HOME
from core.errors import EftError, SpecError
from core.plan import compatibility
from core.spec.axes.data import Generated, HubDataset, Single
from core.spec.axes.rollout.models import model_rewards
from core.spec.files import data_orders
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import ARTIFACTS, EVENTS_FILE, LOG_FILE, ORDER_FILE
from core.spec.run.orders import RewardModelFolder, RewardModelOrder, RunOrder
from core.train.entry.jobfile import document, located, several

POLL_SECONDS = 0.1


def main() -> int:
    args = _parser().parse_args()
    console = Console(stderr=True, highlight=False)
    try:
        spec = resolve(parse_job(several(document(args), args.gpus, args.slots)))
        if refused := compatibility.check(spec):
            raise SpecError(refused[0].message, field=refused[0].field, faults=refused, code=refused[0].code)
        run_dir = args.output.absolute()
        order = _order(spec, args, console)
        _write_order(order, run_dir)
        return _follow(run_dir, console, as_json=args.json)
    except EftError as error:
        _complain(console, error.message, error.field)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eft train", description="Train on this machine, without a server.")
    parser.add_argument("model", nargs="?", help="hub id, local folder or .gguf file")
    parser.add_argument("data", nargs="?", help="training rows (JSONL, JSON, CSV or Parquet)")
    parser.add_argument("--method", help="lora, qlora or full")
    parser.add_argument("--eval", help="held-out rows")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="e.g. training.max_steps=10")
    parser.add_argument("--spec", type=Path, help="job file (YAML or JSON) with other fields")
    parser.add_argument("--gpus", type=int, metavar="K", help="train on K GPUs of this machine (resources.gpus)")
    parser.add_argument("--slots", type=int, metavar="K", help="train on the CPU with K ranks")
    parser.add_argument("--output", type=Path, default=Path("eft-run"), help="folder of the run (default: eft-run)")
    parser.add_argument(
        "--models-dir",
        type=Path,
        default=Path(os.environ.get("EFT_DATA", ".eft")) / "models",
        help="cache of prepared models (default: below $EFT_DATA)",
    )
    parser.add_argument("--offline", action="store_true", help="do not contact hubs")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


# --- from the command line to an order -------------------------------------------------------------------


def _order(spec: JobSpec, args: argparse.Namespace, console: Console) -> RunOrder:
    from core.train.export.prepare import prepare_exports
    from core.train.hub.datasets import prepare_dataset
    from core.train.hub.model_cache import ModelCache
    from core.train.prepare.chains import prepare_reward_model  # reads models: seconds
    from core.train.prepare.models import prepare_model
    from core.train.rollout.sandboxed.tasks import prepare_problems

    with console.status("preparing") as status:

        def told(phase: str, done: int, total: int | None) -> None:
            status.update(f"{phase}: {done / 1e6:.0f} MB" + (f" of {total / 1e6:.0f}" if total else ""))

        def found(source: Single, field: str) -> tuple[list[Path], dict[str, Any]]:
            if isinstance(source, HubDataset):
                return prepare_dataset(source, field, ModelCache(models_dir), args.offline, told)
            if isinstance(source, Generated):
                models = ModelCache(models_dir)
                return prepare_problems(source, field, models, cache_dir, offline=args.offline, told=told)
            return located(source, field)

        models_dir = args.models_dir.absolute()
        cache_dir = models_dir.parent / "cache"
        train, held_out = data_orders(spec.data, found)
        prepared = prepare_model(spec.model, models_dir, None, args.offline, told)
        scorers = [
            prepare_reward_model(
                RewardModelOrder(reward=name, field=field, model=reward.model),
                models_dir,
                None,
                None,
                args.offline,
                told,
            )
            for field, name, reward in model_rewards(spec.stage)
        ]
        prepare_exports(spec.export, prepared.model_dir, cache_dir, offline=args.offline)
    return RunOrder(
        job_id=args.output.absolute().name,
        attempt=1,
        spec=spec,
        model_dir=str(prepared.model_dir),
        model_source=prepared.source,
        train=train,
        eval=held_out,
        reward_models=[RewardModelFolder.model_validate(one) for one in scorers],
        cache_dir=str(cache_dir),
        world_size=spec.resources.gpus,
    )


def _write_order(order: RunOrder, run_dir: Path) -> None:
    """Start the folder, or go on in it if it holds the very same run."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = run_dir / ORDER_FILE
    if path.exists():
        before = RunOrder.model_validate_json(path.read_bytes())
        if before != order:
            raise SpecError(f"{run_dir} holds another run; give this one another --output", field="output")
        return
    path.write_text(order.model_dump_json(indent=1), encoding="utf-8")


# --- the child and its progress --------------------------------------------------------------------------


def _follow(run_dir: Path, console: Console, *, as_json: bool) -> int:
    events_path = run_dir / EVENTS_FILE
    position = events_path.stat().st_size if events_path.exists() else 0
    with (run_dir / LOG_FILE).open("ab") as log:
        # A session of its own: Ctrl-C reaches us alone, and we hand it on as SIGTERM.
        child = subprocess.Popen(
            [sys.executable, "-m", "core.train", str(run_dir)],
            cwd=HOME,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        # No KeyboardInterrupt: wherever it came up, in a library's callback say, it could get lost.
        signal.signal(number, lambda *_: child.terminate())
    last: dict[str, Any] = {}
    with _bar(console) as bar:
        task = bar.add_task("starting", total=None, loss="", left="")
        for event in _events(events_path, position, child):
            last = event if event["type"] in ("result", "error") else last
            _show(event, bar, task, console)
    match child.wait():
        case code if code == EXIT_OK and last.get("type") == "result":
            _report(run_dir, last, console, as_json=as_json)
            return EXIT_OK
        case code if code == EXIT_CHECKPOINTED:
            console.print("stopped at a checkpoint; the same command continues from there")
            return EXIT_CHECKPOINTED
        case code:
            message = last.get("message") or f"the trainer ended with {code}"
            _complain(console, f"{message}; its log is {run_dir / LOG_FILE}", last.get("field"))
            return 1


def _complain(console: Console, message: str, field: str | None) -> None:
    # soft_wrap: a message stays one line when it is piped; no markup: `messages[0]` is not a style.
    console.print(
        f"error: {field + ': ' if field and field not in message else ''}{message}", markup=False, soft_wrap=True
    )


def _events(path: Path, position: int, child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Whole lines as they appear, until the child has ended and all is read."""
    rest = b""
    while True:
        ended = child.poll() is not None
        if path.exists():
            with path.open("rb") as stream:
                stream.seek(position)
                chunk = stream.read()
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[left]}"),
        console=console,
    )


def _show(event: dict[str, Any], bar: Progress, task: TaskID, console: Console) -> None:
    match event["type"]:
        case "phase":
            bar.update(task, description=event["phase"])
        case "progress" if "step" in event:
            left = event["seconds_left"]
            words = "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d} left"
            bar.update(task, completed=event["step"], total=event["total_steps"], left=words)
        case "metrics" if "loss" in event["values"]:
            bar.update(task, loss=f"loss {event['values']['loss']:.4f}")
        case "evaluation":
            values = ", ".join(f"{name} {value:.4g}" for name, value in event["values"].items())
            console.print(f"step {event['step']}: {values}", markup=False)
        case "notice":
            console.print(f"notice: {event['message']}", markup=False)
        case "resumed":
            console.print(f"continuing from step {event['step']}", markup=False)


def _report(run_dir: Path, event: dict[str, Any], console: Console, *, as_json: bool) -> None:
    folder = run_dir / ARTIFACTS
    weights = next(name for name in ("adapter", "model") if (folder / name).is_dir())
    places = {weights: str(folder / weights), "plot": str(folder / "loss.png")}
    places |= {
        one["folder"]: str(folder / one["folder"]) for one in event["result"].get("export", ()) if one["released"]
    }
    if as_json:
        print(json.dumps(event["result"] | places))
        return
    result = event["result"]
    console.print(
        f"{result['steps']} steps in {result['train_seconds']:.1f} s, {result['tokens_per_second']:.0f} tokens/s, "
        f"loss {result['train_loss']:.4f}",
        markup=False,
    )
    for name, path in places.items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    sys.exit(main())
