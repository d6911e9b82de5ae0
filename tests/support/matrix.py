"""The matrix of what goes together: cells of stage, method, base, optimizer, batching and memory, each a real run.

The axes and the refusals are those of the compatibility table (core/plan/compatibility.py). A cell that the table
allows is trained for two optimizer steps, stopped inside the second and resumed; its weights must be those of a run
that nobody stopped, and what it hands back must read back, merged where it can be.

`python -m tests.support.matrix --write` runs a covering choice of cells and writes the report, `--all` all of them.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

from core.plan.compatibility import AXES, RULES, values_of
from core.spec.axes.stage import Stage
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.base.stop import Stop
from core.train.recipe import run
from tests.support.preferences import judged, preferences
from tests.support.selection import covering
from tests.support.trainer import ROOT, events, pairs, write_rows, write_run

REPORT = ROOT / "bench" / "results" / "matrix-cpu.txt"

METHODS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "full, last layer": {"type": "full", "train": {"layers": "last 1"}},
    "lora": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "dora+": {"type": "lora", "r": 4, "use_dora": True, "loraplus_lr_ratio": 4},
    "pissa": {"type": "lora", "r": 4, "init_lora_weights": "pissa"},
    "whole norms": {"type": "lora", "r": 4, "modules_to_save": ["input_layernorm", "model.norm"]},
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
    "projected": ["galore", "apollo", "apollo_mini"],
}
"""Optimizers by how they are computed; a cell takes the member of its family whose turn it is."""
OPTIONS: dict[str, dict[str, Any]] = {
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
SHORT_ROLLOUTS = {
    "type": "grpo",
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

    @property
    def values(self) -> tuple[str, ...]:
        return (self.stage, self.method, self.base, self.family, self.batching, self.memory)

    @property
    def optimizer(self) -> str:
        members = FAMILIES[self.family]
        return members[sum(map(len, self.values)) % len(members)]

    @property
    def rows(self) -> str:
        """The format that the stage is fed with."""
        return next(name for name in STAGES[self.stage].rows if name in ROWS)

    def axes(self) -> dict[str, Any]:
        """Fields of the job."""
        method = METHODS[self.method]
        rate = 1e-3 if method["type"] == "full" else 1e-2
        return {
            "stage": SHORT_ROLLOUTS if self.stage == "grpo" else self.stage,
            "method": method,
            "quantization": self.base,
            "optimizer": {"type": self.optimizer, "learning_rate": rate, **OPTIONS.get(self.optimizer, {})},
            "batching": BATCHING[self.batching],
            "memory": MEMORY[self.memory],
            "training": {
                "max_steps": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "max_length": 48,
                "precision": "bf16",
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
    *("offload optimizer", "train rows"),
)
"""Axes of the table that cells differ in."""
_LIVE = [rule for rule in RULES if all(_BASE[axis] in among for axis, among in rule.when.items() if axis not in VARIED)]
"""Rules that may refuse a cell."""


def refusals(cell: Cell) -> list[str]:
    """Codes of the rules that refuse the cell; none: it is allowed."""
    memory = MEMORY[cell.memory]
    checkpointing = {None: "default", True: "yes", "selective": "selective"}
    values = _BASE | {
        "stage": cell.stage,
        "method": METHODS[cell.method]["type"],
        "quantization": cell.base,
        "optimizer": cell.optimizer,
        "batching": cell.batching,
        "checkpointing": checkpointing[memory.get("gradient_checkpointing")],
        "activation offloading": "host" if "activation_offloading" in memory else _BASE["activation offloading"],
        "stream": memory.get("stream", _BASE["stream"]),
        "offload optimizer": memory.get("offload_optimizer", _BASE["offload optimizer"]),
        "train rows": cell.rows,
    }
    return [rule.code for rule in _LIVE if rule.refuses(values)]


@cache
def allowed() -> list[Cell]:
    return [cell for cell in cells() if not refusals(cell)]


@cache
def chosen() -> list[Cell]:
    """Allowed cells in which every pair of values occurs that is allowed at all."""
    return [Cell(*values) for values in covering([cell.values for cell in allowed()])]


class InSecondStep(Stop):
    """Asked to leave once the first optimizer step and a micro-step of the next are done."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.left = run_dir, 3

    @property  # type: ignore[override]
    def requested(self) -> bool:
        if all(event["phase"] != "training" for event in events(self.run_dir, "phase")):
            return False
        self.left -= 1
        return self.left < 0


def try_cell(cell: Cell, model: Path, folder: Path, cache: Path) -> None:
    """Run a cell below `folder`. AssertionError where it does not hold what the module says."""
    rows = write_rows(folder / "rows.jsonl", ROWS[cell.rows])
    axes = cell.axes()
    data = {"train": {"type": "path", "path": str(rows), "format": cell.rows}, "rendering": {"pairs": "joined"}}
    adapter = METHODS[cell.method]["type"] != "full"
    merges = {"export": [{"type": "merged", "dtype": "fp32"}]} if adapter else {}

    def attempt(name: str, **more: Any) -> Path:
        return write_run(folder / name, model, rows, cache_dir=cache, data=data, **axes | more)

    calm = attempt("calm")
    assert run(calm) == EXIT_OK, events(calm)[-1]
    first = attempt("first")
    assert run(first, InSecondStep(first)) == EXIT_CHECKPOINTED, events(first)[-1]
    second = attempt("second", resume_from=[first], **merges)
    assert run(second) == EXIT_OK, events(second)[-1]
    assert events(second, "resumed"), "it began anew"
    assert _handed_back(second) == _handed_back(calm), "other weights after a resume"
    losses = [event["values"]["loss"] for event in events(calm, "metrics")]
    assert len(losses) == 2 and all(abs(loss) < 1e4 for loss in losses), losses
    for outcome in events(second, "result")[0]["result"].get("export", ()):
        assert outcome["released"], outcome


def _handed_back(run_dir: Path) -> bytes:
    """What was trained, byte for byte; a merged model beside it is left out."""
    files = [*run_dir.glob("artifacts/adapter/*.safetensors"), *run_dir.glob("artifacts/model/*.safetensors")]
    assert files
    return b"".join(path.read_bytes() for path in sorted(files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every allowed cell, not only a covering choice")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    from tests.support import models

    tried = allowed() if arguments.all else chosen()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(tried):
            place = Path(folder) / str(number)
            place.mkdir()
            try:
                try_cell(cell, models.folder() / "tiny", place, Path(folder) / "cache")
            except Exception as error:  # each is a line of the report
                faults.append(f"{' | '.join(cell.values)}: {error}")
                print(faults[-1], file=sys.stderr, flush=True)
    text = report(tried, faults, everything=arguments.all)
    print(text)
    if arguments.write:
        REPORT.write_text(text, encoding="utf-8")
    sys.exit(bool(faults))


def report(tried: list[Cell], faults: list[str], *, everything: bool) -> str:
    every = list(cells())
    reasons = Counter(code for cell in every for code in refusals(cell)[:1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    lines = [
        "The matrix: python -m tests.support.matrix" + (" --all" if everything else "") + " --write",
        f"axes: {len(AXES['stage'])} stages, {len(METHODS)} methods, {len(BASES)} bases, {len(FAMILIES)} families of "
        f"optimizers, {len(BATCHING)} batchings, {len(MEMORY)} memories",
        f"cells {len(every)}, allowed {len(every) - sum(reasons.values())}, refused {sum(reasons.values())}",
        *(f"  refused by {code}: {count}" for code, count in reasons.most_common()),
        f"run {len(tried)} ({'all' if everything else 'every allowed pair of values'}), wrong {len(faults)}, "
        f"{used.ru_utime + used.ru_stime:.0f} CPU seconds",
        "",
        *(f"  {'WRONG ' if any(f.startswith(name) for f in faults) else ''}{name} ({cell.optimizer})"
          for cell in tried for name in (" | ".join(cell.values),)),
        *(["", "Faults:", *faults] if faults else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
