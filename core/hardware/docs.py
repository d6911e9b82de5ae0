"""docs/hardware.md, from the tables of architectures and of known faults."""

from __future__ import annotations

from core.hardware.arch import ROWS, ArchRow, Attention
from core.hardware.faults import FAULTS, READ, KnownFault

ATTENTION: dict[Attention, str] = {
    "flash": "flash",
    "opt_in": "flash, switched on",
    "efficient": "memory-efficient",
    "math": "math",
}


def render() -> str:
    lines = [
        "# Hardware",
        "",
        "Generated from `core/hardware/arch.py` and `core/hardware/faults.py` by `make docs`. No AMD card was at hand",
        "when these tables were written: they are from the sources they name, and what has been run is said in",
        "[performance.md](performance.md).",
        "",
        "## Architectures",
        "",
        "bf16 is used where it stands here; elsewhere a job runs in fp32 and its events say so. An architecture that",
        "is not in the table is served too, in fp32, with a note in the worker's log.",
        "Attention is the best of PyTorch's kernels to expect (2.13, AOTriton 0.12): *flash, switched on* needs a",
        "variable, which the trainer gets; *math* makes the whole matrix of scores, so long rows cost memory there.",
        "",
        "| architecture | products | bf16 | matrix cores | fp8 | lanes | local memory | attention | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_arch(row) for row in ROWS),
        "",
        "## Known faults, and the way around each",
        "",
        f"Sources as of {READ}. A variable is set for the trainer alone, and only while the worker's own environment",
        "does not have it: set it there yourself if your versions are free of the fault. The worker's log names every",
        "change, and the run record of a job has the faults of its card with the variables that stood against them.",
        "",
        "| fault | seen on | what happens | way around | sources |",
        "|---|---|---|---|---|",
        *(_row(fault) for fault in FAULTS),
        "",
    ]
    return "\n".join(lines)


def _arch(row: ArchRow) -> str:
    memory = f"{row.lds_kib} KiB" if row.lds_kib else ""
    cells = [
        f"`{row.arch}`",
        row.examples,
        "yes" if row.bf16 else "no",
        row.matrix,
        row.fp8,
        str(row.wave_size),
        memory,
        ATTENTION[row.attention],
    ]
    return f"| {' | '.join(cells)} | {'integrated' if row.integrated else ''} |"


def _row(fault: KnownFault) -> str:
    arches = ", ".join("every AMD GPU" if arch == "amd" else f"`{arch}`" for arch in fault.arches)
    variables = " ".join(f"`{name}={value}`" for name, value in fault.set.items())
    sources = ", ".join(f"[{'#'.join((url.split('/')[-3], url.split('/')[-1]))}]({url})" for url in fault.sources)
    way = f"{fault.route} ({variables})" if variables else fault.route
    return f"| `{fault.key}` ({fault.kind}) | {arches} | {fault.what} | {way} | {sources} |"
