"""Compile every form on all cores, or take its row from the cache.

A row is kept under a hash of the kernel's source (and of all that it calls), signature, constants, attributes, options,
target, compiler and of the code that reads rows; so a second run compiles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import triton
from triton import knobs
from triton.compiler import ASTSource

from core.train.kernels.triton.case import Case
from core.train.kernels.triton.compiled import measure, record, table
from core.train.kernels.triton.compiled.record import Form
from core.train.kernels.triton.compiled.table import TARGETS, KernelRow

_forms: list[Form] = []
"""The children of a fork have it too: functions of Triton cannot be sent."""


def rows(
    cache: Path | None, processes: int, targets: Sequence[str] = TARGETS, chosen: list[Case] | None = None
) -> tuple[list[KernelRow], int]:
    """Rows of these cases (default: all there are), by kernel, case and target, and how many had to be compiled.
    `cache`: a folder, or none."""
    chosen = record.cases() if chosen is None else chosen
    found = [form for target in targets for form in record.forms(target, chosen)]
    place = {case.name: i for i, case in enumerate(chosen)}
    found.sort(key=lambda form: (form.kernel, place[form.case], targets.index(form.target)))
    kept = [None if cache is None else _read(cache / f"{_key(form)}.json", form) for form in found]
    missing = [form for form, row in zip(found, kept, strict=True) if row is None]
    made = iter(_compile_all(missing, processes))
    complete = [row or next(made) for row in kept]
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        for form, row, before in zip(found, complete, kept, strict=True):
            if before is None:
                _write(cache / f"{_key(form)}.json", row)
    return complete, len(missing)


def compile_form(form: Form) -> KernelRow:
    """Compile one form, and read the result."""
    source = ASTSource(form.function, form.signature, form.constants, form.attributes)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):  # ptxas's words
        compiled = triton.compile(source, target=record.gpu_target(form.target), options=form.options)
    return measure.row(form, compiled, report.getvalue())


def _compile_all(forms: Sequence[Form], processes: int) -> list[KernelRow]:
    if not forms:
        return []
    with _fresh_compiler():
        if processes == 1:
            return [compile_form(form) for form in forms]
        _forms[:] = forms
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(min(processes, len(forms)), context) as pool:
            return list(pool.map(_compile_at, range(len(forms))))


def _compile_at(at: int) -> KernelRow:
    return compile_form(_forms[at])


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Triton with a cache of its own, never read and thrown away, and ptxas telling what it did."""
    with contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="eft-triton-"))
        knobs.compilation.always_compile = True  # for what is taken from a cache ptxas tells nothing
        knobs.nvidia.dump_ptxas_log = True
        yield


# --- the cache -------------------------------------------------------------------------------------


def _key(form: Form) -> str:
    options = {name: value for name, value in form.options.items() if name != "extern_libs"}  # paths
    parts = [
        triton.__version__, form.function.cache_key, form.kernel, form.case, form.target, _readers(),
        repr(sorted(form.signature.items())), repr(sorted(form.constants.items())),
        repr(sorted(form.attributes.items())), repr(sorted(options.items())),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _readers() -> str:
    sources = (Path(module.__file__).read_bytes() for module in (measure, table) if module.__file__)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def _read(path: Path, form: Form) -> KernelRow | None:
    try:
        found = KernelRow(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or not whole
        return None
    return found if found.key == (form.kernel, form.case, form.target) else None


def _write(path: Path, row: KernelRow) -> None:
    near = path.with_name(f".{path.name}.{os.getpid()}")
    near.write_text(json.dumps(asdict(row)), encoding="utf-8")
    near.replace(path)
