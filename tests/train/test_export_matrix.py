"""Formats × families × methods: what each format's own reader makes of a small model of each family, tuned by each
method.

The rule: every pair of two values that a job may ask for occurs in a cell. A run takes a quarter of the cells, by the
commit; `EFT_TEST_EVERYTHING=1` takes the whole product. A cell is no job: `tuned` makes the trained model, cells of one
model share it and what it answers, and a reader takes all files of its kind in one process.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from core.spec.axes.export import GGUF_RETENTION, Export, PackedExport, about, required_retention
from core.train.export.formats import packed
from core.train.export.formats.gguf import PROGRAMS, conversion
from core.train.export.formats.subject import Subject
from core.train.export.formats.write import _written
from core.train.export.gguf import proof
from core.train.export.gguf.proof import saved_for_converter
from core.train.export.packed.readers import reader_of
from core.train.export.retention import measure
from core.train.tools.install import install
from tests.support.selection import EVERYTHING, covering, one_a_commit
from tests.support.tool_forks import tool_forks
from tests.support.tools import CACHE, compressed_tools, gguf_tools, torchao_tools
from tests.support.tuned import METHODS, MODELS, tuned

ITEMS: dict[str, Export] = {
    about(item).folder: item
    for item in TypeAdapter(list[Export]).validate_python(
        [
            {"type": "merged"},
            {"type": "vllm"},
            *({"type": "gguf", "quantization": kind} for kind in GGUF_RETENTION),
            *({"type": kind} for kind in ("fp8", "gptq", "awq", "mxfp4", "torchao_int8", "torchao_int4")),
        ]
    )
}
Cell = tuple[str, str, str]


def refused(cell: Cell) -> str | None:
    """Why a job cannot ask for it."""
    format, family, method = cell
    if format == "merged" and method == "full":
        return "it is what is handed back"
    if format == "vllm" and method in ("dora", "full"):
        return "vLLM loads plain LoRA"
    if family == "qwen2_moe" and (method == "qlora" or isinstance(ITEMS[format], PackedExport)):
        return "fused experts are not packed"
    return None


ALLOWED = [cell for cell in product(ITEMS, MODELS, METHODS) if refused(cell) is None]
CHOSEN = ALLOWED if EVERYTHING else covering(ALLOWED)


def quarters() -> list[list[Cell]]:
    """Cells of one model stay together, so that it is made once."""
    found: list[list[Cell]] = [[] for _ in range(4)]
    for number, model in enumerate(product(METHODS, MODELS)):
        found[number % 4] += [cell for cell in CHOSEN if cell[:0:-1] == model]
    return found


def test_every_pair_that_a_job_may_ask_for_is_in_a_cell() -> None:
    def pairs(cells: list[Cell]) -> set[Any]:
        return {(at, cell[at[0]], cell[at[1]]) for cell in cells for at in combinations(range(3), 2)}

    every = [cell for quarter in quarters() for cell in quarter]
    assert sorted(every) == sorted(CHOSEN) and pairs(every) == pairs(ALLOWED)


@pytest.mark.parametrize("cells", one_a_commit(*quarters()), ids=lambda cells: f"{len(cells)}-cells")
def test_each_reader_finds_what_was_trained(tmp_path: Path, cells: list[Cell]) -> None:
    tools = gguf_tools()
    compressed_tools(), torchao_tools()
    subjects: dict[tuple[str, str], Subject] = {}
    for _, family, method in cells:
        if (family, method) not in subjects:
            subjects[family, method] = tuned(family, method, tmp_path / f"{family}-{method}", spread=0.1)
    asked = {
        (family, method): tmp_path / f"{family}-{method}.gguf"
        for format, family, method in cells
        if format.startswith("gguf")
    }
    told = [conversion(subjects[one], "trained", file) for one, file in asked.items()]
    with ExitStack() as stack:
        for one, order in zip(asked, told, strict=True):
            stack.enter_context(saved_for_converter(subjects[one].tokenizer, Path(order["folder"])))
        tools.run(PROGRAMS / "convert_program.py", json.dumps(told))
    for one, file in asked.items():
        subjects[one].once("converted-trained", file.rename)
    quants = install("quants", CACHE, offline=True, field="export")
    with tool_forks() as forks:  # these two start cold in test_exports.py
        for program in (PROGRAMS / "quantise_program.py", proof.PROGRAM):
            forks.prepare(program, replace(tools, beside=(quants.folder,)))
        found = {cell: made(subjects[cell[1:]], ITEMS[cell[0]]) for cell in cells if not is_packed(cell)}
    found |= read_at_once({cell: subjects[cell[1:]] for cell in cells if is_packed(cell)})
    lost = {
        cell: retention
        for cell, retention in found.items()
        if not required_retention(ITEMS[cell[0]]) <= retention <= 1  # type: ignore[arg-type]
    }
    assert not lost and len(found) == len(cells)


def is_packed(cell: Cell) -> bool:
    return isinstance(ITEMS[cell[0]], PackedExport)


def made(subject: Subject, item: Export) -> float:
    """Retention of a format, written and proven as a job does it."""
    known = about(item).folder
    written = _written(item.model_copy(update={"min_retention": 0.0}), subject, subject.artifacts / known)
    return float(written["retention"]["retention"])


class Written(Exception):
    """A folder is complete; its reader comes later."""


def read_at_once(cells: dict[Cell, Subject]) -> dict[Cell, float]:
    """Retention of packed formats: all are written first, then each library reads all of its folders in a process."""

    def later(*_: object) -> None:
        raise Written

    jobs: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_proven", later)
        for (format, *_), subject in cells.items():
            folder = subject.artifacts / format
            with pytest.raises(Written):
                _written(ITEMS[format], subject, folder)
            rows = subject.artifacts / "rows.json"
            rows.write_text(json.dumps([row.tolist() for row in subject.rows]))
            reader = reader_of(ITEMS[format])  # type: ignore[arg-type]
            jobs.setdefault(reader.tools, []).extend(map(str, (folder, rows, folder.with_suffix(".npy"))))
    for name, arguments in jobs.items():
        (compressed_tools() if name == "compressed" else torchao_tools()).run(packed.PROGRAM, *arguments)
    found: dict[Cell, float] = {}
    for cell, subject in cells.items():
        logits = torch.from_numpy(np.load(subject.artifacts / f"{cell[0]}.npy"))
        tuned_logits, base = subject.logits("trained")
        one = measure(tuned_logits, base, logits, rows=2, rows_of="training", required=0, reader="")
        assert one.retention is not None, cell
        found[cell] = one.retention
    return found
