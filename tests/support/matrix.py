"""The matrix of what goes together: cells of stage, method, base, optimizer, batching and memory, each a real run.

The axes and the refusals are those of the compatibility table (core/plan/rules). A cell that the table
allows is trained for two optimizer steps, stopped inside the second and resumed; its weights must be those of a run
that nobody stopped, and what it hands back must read back, merged where it can be.

A few cells are run by two ranks as well, and a few with compiled blocks. `--accelerator gpu` trains on this machine's
GPU instead, in a report of its own; two ranks then want two GPUs.

`python -m tests.support.matrix --write` runs a covering choice of cells and writes the report, `--all` all of them.
Each cell that is done is a line of a journal: a run that was stopped (`--seconds`, Ctrl-C) goes on behind it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, get_args

from bench.report import gpus
from core.base import quick_imports
from core.plan.compatibility import check
from core.plan.rules.axes import AXES, values_of
from core.plan.rules.table import RULES
from core.spec.axes.stage import Stage
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.base.code import code_sha256
from core.train.base.stop import Stop
from tests.support import models
from tests.support.gang import forked
from tests.support.preferences import judged, preferences
from tests.support.selection import covering
from tests.support.trainer import ROOT, events, log, pairs, run, write_rows, write_run

RESULTS = ROOT / "bench" / "results"
LISTED = 200
"""Cells that a report lists by name, at most."""
RANKS = 2
"""Ranks of a gang."""

METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "full, last layer": {"type": "full", "train": {"layers": "last 1"}},
    "lora": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "dora+": {"type": "lora", "r": 4, "use_dora": True, "loraplus_lr_ratio": 4},
    "pissa": {"type": "lora", "r": 4, "init_lora_weights": "pissa"},
    "whole norms": {"type": "lora", "r": 4, "modules_to_save": ["input_layernorm", "model.norm"]},
    "new tokens": {"type": "lora", "r": 4, "new_tokens": ["<look>", "<hear>"]},
    "oft": {"type": "oft", "oft_block_size": 8},
    "qlora": {"type": "qlora", "r": 4},
}
BASES = [name for name in AXES["quantization"] if name != "default"]
FAMILIES: dict[str, list[str]] = {
    "fused": ["adamw", "sgd"],
    "lists": ["lion", "ademamix"],
    "quantised": ["adamw_8bit", "adamw_4bit"],
    "pair": ["muon"],
    "factored": ["adafactor", "adalomo"],
    "staged": ["badam", "sophia_g"],
    "projected": ["galore", "apollo", "apollo_mini"],
}
"""Optimizers by how they are computed; a cell takes the member of its family whose turn it is."""
OPTIONS: dict[str, dict[str, Any]] = {
    "badam": {"switch_block_every": 1},
    "sophia_g": {"update_period": 1},
    "galore": {"rank": 2, "update_proj_gap": 1},
    "apollo": {"rank": 2, "update_proj_gap": 1},
    "apollo_mini": {"update_proj_gap": 1},
}
MEMORY: dict[str, dict[str, Any]] = {
    "resident": {},
    "checkpointed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "activations on host": {"activation_offloading": True},
    "blocks from host": {"stream": "host"},
    "blocks from disk": {"stream": "disk"},
    "optimizer on host": {"offload_optimizer": "host"},
}
BATCHING: dict[str, dict[str, Any]] = {
    "rows": {"type": "rows"},
    "tokens": {"type": "tokens", "tokens_per_batch": 128},
    "packed": {"type": "packed", "tokens_per_batch": 128},
}
ROWS: dict[str, Any] = {
    "text": [{"text": row["prompt"] + row["completion"]} for row in pairs(16)],
    "prompt_completion": pairs(16),
    "preference": preferences(16),
    "kto": judged(16),
    "stepwise": [
        {"prompt": row["prompt"], "completions": [" one", row["completion"]], "labels": [True, bool(n % 2)]}
        for n, row in enumerate(pairs(16))
    ],
    "prompt": [{"prompt": row["prompt"]} for row in pairs(16)],
}
ROLLOUTS = ("grpo", "rloo", "ppo")
SHORT_ROLLOUTS = {
    "num_generations": 2,
    "max_completion_length": 8,
    "reward": [{"type": "regex", "pattern": "[e-m]"}],
}
STAGES = {arm.model_fields["type"].default: arm for arm in get_args(get_args(Stage)[0])}


@dataclass(frozen=True)
class Cell:
    stage: str
    method: str
    base: str
    family: str
    batching: str
    memory: str
    ranks: int = 1
    compiled: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        several = (f"{self.ranks} ranks",) if self.ranks > 1 else ()
        blocks = ("compiled",) if self.compiled else ()
        return (self.stage, self.method, self.base, self.family, self.batching, self.memory, *several, *blocks)

    @property
    def optimizer(self) -> str:
        members = FAMILIES[self.family]
        return members[sum(map(len, self.values[:6])) % len(members)]

    @property
    def rows(self) -> str:
        """The format that the stage is fed with."""
        return next(name for name in STAGES[self.stage].rows if name in ROWS)

    def axes(self, accelerator: str = "cpu") -> dict[str, Any]:
        """Fields of the job."""
        method = METHODS[self.method]
        if self.base == "qat" and method["type"] == "lora":  # an adapter that is rounded with its base has no dropout
            method = {**method, "lora_dropout": 0.0}
        rate = 1e-3 if method["type"] == "full" else 1e-2
        return {
            "stage": {"type": self.stage, **SHORT_ROLLOUTS} if self.stage in ROLLOUTS else self.stage,
            "method": method,
            "quantization": self.base,
            "optimizer": {"type": self.optimizer, "learning_rate": rate, **OPTIONS.get(self.optimizer, {})},
            "batching": BATCHING[self.batching],
            "memory": MEMORY[self.memory],
            "resources": {"gpus": self.ranks, "accelerator": accelerator},
            "training": {
                "max_steps": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_length": 48,
                "precision": "bf16",
                "compile": self.compiled,
            }
            | ({} if self.stage == "cpt" else {"truncation": "cut_right"}),
        }


def cells() -> Iterator[Cell]:
    """Every cell, allowed or not."""
    for values in product(AXES["stage"], METHODS, BASES, FAMILIES, BATCHING, MEMORY):
        yield Cell(*values)


_BASE = values_of(JobSpec.model_validate({"model": "a/b", "data": {"train": "/rows.jsonl"}}))


VARIED = (
    *("stage", "method", "quantization", "optimizer", "batching", "checkpointing", "activation offloading", "stream"),
    *("offload optimizer", "train rows", "ranks", "compile"),
)
"""Axes of the table that cells differ in."""
_LIVE = [
    (rule.code, [(axis, frozenset(among)) for axis, among in rule.when.items() if axis in VARIED])
    for rule in RULES
    if all(_BASE[axis] in among for axis, among in rule.when.items() if axis not in VARIED)
]
"""Rules that may refuse a cell: the code, and what the rule asks of the axes that cells differ in."""


def refusals(cell: Cell) -> list[str]:
    """Codes of the rules that refuse the cell; none: it is allowed."""
    method = METHODS[cell.method]["type"]
    by_rules = _by_rules(
        *(cell.stage, method, cell.base, cell.optimizer, cell.batching, cell.memory, cell.rows),
        *(cell.ranks, cell.compiled),
    )
    rounding = _rounding(cell.stage, cell.method, cell.memory) if cell.base == "qat" else ()
    return [*by_rules, *rounding]


@cache
def _by_rules(
    stage: str,
    method: str,
    base: str,
    optimizer: str,
    batching: str,
    memory: str,
    rows: str,
    ranks: int,
    compiled: bool,
) -> tuple[str, ...]:
    """Codes of the rules of the table; many cells are one to them."""
    held = MEMORY[memory]
    checkpointing = {None: "default", True: "yes", "selective": "selective"}
    values = {
        "stage": stage,
        "method": method,
        "quantization": base,
        "optimizer": optimizer,
        "batching": batching,
        "checkpointing": checkpointing[held.get("gradient_checkpointing")],
        "activation offloading": "host" if "activation_offloading" in held else _BASE["activation offloading"],
        "stream": held.get("stream", _BASE["stream"]),
        "offload optimizer": held.get("offload_optimizer", _BASE["offload optimizer"]),
        "train rows": rows,
        "ranks": "one" if ranks == 1 else "several",
        "compile": "yes" if compiled else "no",
    }
    return tuple(code for code, asked in _LIVE if all(values[axis] in among for axis, among in asked))


@cache
def _rounding(stage: str, method: str, memory: str) -> tuple[str, ...]:
    """Faults of `quantization: qat` that no rule of the table has."""
    cell = Cell(stage, method, "qat", "fused", "rows", memory)
    job = {"model": "a/b", "data": {"train": "/rows.jsonl"}, **cell.axes()}
    return tuple({fault.code for fault in check(JobSpec.model_validate(job))} & {"qat_adapter", "qat_refused"})


@cache
def allowed() -> list[Cell]:
    return [cell for cell in cells() if not refusals(cell)]


@cache
def chosen() -> list[Cell]:
    """Allowed cells in which every pair of values occurs that is allowed at all."""
    return [Cell(*values) for values in covering([cell.values for cell in allowed()])]


@cache
def gangs() -> list[Cell]:
    """Cells of two ranks in which each value occurs that two ranks may have; none of rollouts, which have one rank."""
    rows = [replace(cell, ranks=RANKS) for cell in chosen() if cell.stage not in ROLLOUTS]
    return _covering_values([cell for cell in rows if not refusals(cell)])


@cache
def compiled() -> list[Cell]:
    """Cells with compiled blocks in which each value occurs that may be compiled."""
    rows = [replace(cell, compiled=True) for cell in chosen()]
    return _covering_values([cell for cell in rows if not refusals(cell)])


def _covering_values(rows: Sequence[Cell]) -> list[Cell]:
    missing, found = {value for cell in rows for value in cell.values}, list[Cell]()
    while missing:
        found.append(max(rows, key=lambda cell: len(missing & set(cell.values))))
        missing -= set(found[-1].values)
    return found


class InSecondStep(Stop):
    """Asked to leave once the first optimizer step and a micro-step of the next are done."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.left = run_dir, 3

    @property
    def requested(self) -> bool:
        if all(event["phase"] != "training" for event in events(self.run_dir, "phase")):
            return False
        self.left -= 1
        return self.left < 0


def try_cell(cell: Cell, model: Path, folder: Path, cache: Path, accelerator: str = "cpu") -> None:
    """Run a cell below `folder`. AssertionError where it does not hold what the module says."""
    rows = write_rows(folder / "rows.jsonl", ROWS[cell.rows])
    axes = cell.axes(accelerator)
    data = {"train": {"type": "path", "path": str(rows), "format": cell.rows}, "rendering": {"pairs": "joined"}}
    adapter = METHODS[cell.method]["type"] != "full"
    merges = {"export": [{"type": "merged", "dtype": "fp32"}]} if adapter and cell.base != "qat" else {}

    def attempt(name: str, **more: Any) -> Path:
        return write_run(folder / name, model, rows, cache_dir=cache, data=data, **axes | more)

    calm = attempt("calm")
    assert run(calm) == EXIT_OK, told(calm)
    first = attempt("first")
    assert run(first, InSecondStep(first)) == EXIT_CHECKPOINTED, told(first)
    second = attempt("second", resume_from=[first], **merges)
    assert run(second) == EXIT_OK, told(second)
    assert events(second, "resumed"), "it began anew"
    assert _handed_back(second) == _handed_back(calm), "other weights after a resume"
    assert "activations_stayed" not in [notice["code"] for notice in events(calm, "notice")], events(calm, "notice")
    losses = [event["values"]["loss"] for event in events(calm, "metrics")]
    assert len(losses) == 2 and all(abs(loss) < 1e4 for loss in losses), losses
    if cell.compiled:
        for of in (calm, second):
            record = events(of, "run_record")[0]["record"]["compile"]
            if record["eager"]:  # docs/performance.md: DoRA's blocks are computed as without it on a CPU, and told
                assert METHODS[cell.method].get("use_dora"), record
                assert "compile_fallback" in [one["code"] for one in events(of, "notice")], record
            else:
                assert record["compiled"] == record["blocks"], record
    for outcome in events(second, "result")[0]["result"].get("export", ()):
        assert outcome["released"], outcome


def told(run_dir: Path) -> str:
    """The run's last event and the end of its log."""
    return f"{events(run_dir)[-1]} {log(run_dir)[-1000:]}"


def _handed_back(run_dir: Path) -> bytes:
    """What was trained, byte for byte; a merged model beside it is left out."""
    files = [*run_dir.glob("artifacts/adapter/*.safetensors"), *run_dir.glob("artifacts/model/*.safetensors")]
    assert files
    return b"".join(path.read_bytes() for path in sorted(files))


def try_gangs(
    tried: Sequence[Cell], model: Path, folder: Path, cache: Path, accelerator: str = "cpu"
) -> dict[Cell, str | None]:
    """Run cells of two ranks below `folder`, all of them in one pair of processes, and say what each does not hold."""
    runs: dict[Cell, tuple[Path, Path, Path]] = {}
    for number, cell in enumerate(tried):
        rows = write_rows(folder / f"{number}.jsonl", ROWS[cell.rows])
        data = {"train": {"type": "path", "path": str(rows), "format": cell.rows}, "rendering": {"pairs": "joined"}}
        names = [folder / f"{number}-{name}" for name in ("calm", "first", "second")]
        resumed: tuple[list[Path], ...] = ([], [], [names[1]])
        for name, before in zip(names, resumed, strict=True):
            write_run(name, model, rows, cache_dir=cache, data=data, resume_from=before, **cell.axes(accelerator))
        runs[cell] = (names[0], names[1], names[2])
    arguments = [
        f"{path}@0:3" if path.name.endswith("first") else str(path) for paths in runs.values() for path in paths
    ]
    assert forked(*arguments, ranks=RANKS) == [EXIT_OK] * RANKS, log(next(iter(runs.values()))[0])
    found: dict[Cell, str | None] = {}
    for cell, (calm, first, second) in runs.items():
        try:
            assert [event["phase"] for event in events(first, "phase")][-1] == "training", events(first)[-1]
            assert events(second, "resumed"), "it began anew"
            assert _handed_back(second) == _handed_back(calm), "other weights after a resume"
            assert len(events(calm, "metrics")) == 2, events(calm)[-1]
        except AssertionError as error:
            found[cell] = str(error)
        else:
            found[cell] = None
    return found


def try_alone(cell: Cell, folder: Path, cache: Path, accelerator: str = "cpu") -> str | None:
    """What a cell of one rank does not hold."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        try_cell(cell, models.folder() / "tiny", place, cache, accelerator)
    except Exception as error:  # each is a line of the report
        return str(error) or type(error).__name__
    finally:
        shutil.rmtree(place)
    return None


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: str | None
    seconds: float
    """CPU seconds."""


class Journal:
    """Cells that were run, a line each; those that another version of the code ran do not count."""

    def __init__(self, path: Path) -> None:
        self.path, self._code = path, code_sha256()
        self.outcomes: dict[tuple[str, ...], Outcome] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            if (one := json.loads(line))["code"] == self._code:
                self.outcomes[tuple(one["cell"])] = Outcome(one["fault"], one["seconds"])

    def add(self, cell: Cell, outcome: Outcome) -> None:
        self.outcomes[cell.values] = outcome
        line = {"cell": cell.values, "fault": outcome.fault, "seconds": round(outcome.seconds, 2), "code": self._code}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def in_order() -> list[Cell]:
    """Every allowed cell: the covering choice first, then the others, mixed, so that a part of them is a sample."""
    first = chosen()
    rest = sorted(set(allowed()) - set(first), key=lambda cell: sha256(repr(cell.values).encode()).digest())
    return [*first, *rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every allowed cell, not only a covering choice")
    parser.add_argument("--write", action="store_true", help="write bench/results/matrix-DEVICE.txt")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many seconds")
    parser.add_argument(
        "--journal", type=Path, help="file of the cells that are done (default: .matrix-ACCELERATOR.jsonl)"
    )
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="cells that are run at a time")
    arguments = parser.parse_args()
    quick_imports.install()  # bitsandbytes asks for the GPU when it is imported, and a process that has it cannot fork
    cards = [name for name, _ in gpus()] if arguments.accelerator == "gpu" else []
    if arguments.accelerator == "gpu" and not cards:
        sys.exit("--accelerator gpu: torch sees no GPU here")
    journal = Journal(arguments.journal or ROOT / f".matrix-{arguments.accelerator}.jsonl")
    began = time.monotonic()
    wanted = [*compiled(), *(in_order() if arguments.all else chosen())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        several = gangs() if arguments.accelerator == "cpu" or len(cards) >= RANKS else []
        if left := [cell for cell in several if cell.values not in journal.outcomes]:
            (folder / "gangs").mkdir()
            before = _cpu_seconds()
            model = models.folder() / "tiny"
            found = try_gangs(left, model, folder / "gangs", folder / "cache", arguments.accelerator)
            each = (_cpu_seconds() - before) / len(left)
            for cell, fault in found.items():
                journal.add(cell, Outcome(fault, each))
        alone = [cell for cell in wanted if cell.values not in journal.outcomes]
        for cell, outcome in _outcomes(alone, folder, arguments, began + arguments.seconds):
            journal.add(cell, outcome)
            if outcome.fault is not None:
                print(f"{' | '.join(cell.values)}: {outcome.fault}", file=sys.stderr, flush=True)
    text = report(journal.outcomes, cards)
    print(text)
    if arguments.write:
        kind = cards[0] if cards else "cpu"
        (RESULTS / f"matrix-{kind.lower().replace(' ', '-')}.txt").write_text(text, encoding="utf-8")
    sys.exit(any(outcome.fault is not None for outcome in journal.outcomes.values()))


def _outcomes(
    alone: Sequence[Cell], folder: Path, arguments: argparse.Namespace, until: float
) -> Iterator[tuple[Cell, Outcome]]:
    """Run the cells, `--jobs` at a time, and begin none after `until`."""
    try_one = functools.partial(_outcome, folder=folder, accelerator=arguments.accelerator, until=until)
    if arguments.jobs == 1:
        tried = map(try_one, alone)
        yield from ((cell, outcome) for cell, outcome in zip(alone, tried, strict=True) if outcome is not None)
        return
    models.folder()  # the one that waits for it to be made
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for cell, outcome in pool.imap_unordered(functools.partial(_named, try_one), alone):
            if outcome is not None:
                yield cell, outcome


def _named(try_one: Callable[[Cell], Outcome | None], cell: Cell) -> tuple[Cell, Outcome | None]:
    return cell, try_one(cell)


def _outcome(cell: Cell, folder: Path, accelerator: str, until: float) -> Outcome | None:
    if time.monotonic() > until:
        return None
    before = _cpu_seconds()
    fault = try_alone(cell, folder, folder / "cache", accelerator)
    return Outcome(fault, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def report(outcomes: Mapping[tuple[str, ...], Outcome], cards: Sequence[str] = ()) -> str:
    """The outcomes in words; `cards`: those of the machine that trained them, none for its CPU."""
    every = list(cells())
    reasons = Counter(code for cell in every for code in refusals(cell)[:1])
    open_cells = len(every) - sum(reasons.values())
    run = [cell for cell in [*in_order(), *gangs(), *compiled()] if cell.values in outcomes]
    alone = [cell for cell in run if cell.ranks == 1 and not cell.compiled]
    several = [cell for cell in run if cell.ranks > 1]
    missing = sum(cell.values not in outcomes for cell in chosen())
    faults = {cell: fault for cell in run if (fault := outcomes[cell.values].fault) is not None}
    seconds = sum(outcomes[cell.values].seconds for cell in run)
    mean = sum(outcomes[cell.values].seconds for cell in alone) / max(1, len(alone))
    lines = [
        "The matrix: python -m tests.support.matrix [--all] [--seconds N] [--accelerator gpu] --write",
        *([f"trained on {', '.join(cards)} with torch {version('torch')}"] if cards else []),
        f"axes: {len(AXES['stage'])} stages, {len(METHODS)} methods, {len(BASES)} bases, {len(FAMILIES)} families of "
        f"optimizers, {len(BATCHING)} batchings, {len(MEMORY)} memories",
        f"cells {len(every)}, allowed {open_cells}, refused {sum(reasons.values())}",
        *(f"  refused by {code}: {count}" for code, count in reasons.most_common()),
        f"run {len(run)}, of these {len(several)} with two ranks and {len(run) - len(alone) - len(several)} with "
        f"compiled blocks; wrong {len(faults)}; {seconds:.0f} CPU seconds",
        f"of the choice in which every allowed pair of values occurs, {missing} are left to run",
        f"a cell takes {mean:.1f} CPU seconds, all allowed ones {mean * open_cells / 3600:.0f} CPU hours",
        "",
        "Cells run by value:",
        *_by_value(alone),
        *(
            ["", "Faults:", *(f"{' | '.join(cell.values)}: {fault}" for cell, fault in faults.items())]
            if faults
            else []
        ),
    ]
    if len(run) <= LISTED:
        named = (f"  {'WRONG ' if cell in faults else ''}{' | '.join(cell.values)} ({cell.optimizer})" for cell in run)
        lines += ["", *named]
    return "\n".join(lines) + "\n"


def _by_value(run: Sequence[Cell]) -> Iterator[str]:
    for at, axis in enumerate(("stage", "method", "base", "family", "batching", "memory")):
        counts = Counter(cell.values[at] for cell in run)
        yield f"  {axis}: " + ", ".join(f"{value} {count}" for value, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
