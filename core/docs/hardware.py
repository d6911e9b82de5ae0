"""docs/hardware.md, from the tables of architectures, builds of PyTorch, known faults and determinism."""

from __future__ import annotations

from core.docs import selftest
from core.hardware.tables import determinism, wheels
from core.hardware.tables.arch import ROWS, ArchRow, Attention
from core.hardware.tables.faults import FAULTS, NO_LIMITS, READ, KnownFault, Limits
from core.hardware.tables.wheels import BUILDS, Build

ATTENTION: dict[Attention, str] = {
    "flash": "flash",
    "opt_in": "flash, switched on",
    "efficient": "memory-efficient",
    "math": "math",
}


def render() -> str:
    parts = (_head, _arches, _found, selftest.section, _builds, _faults, _determinism, _recording)
    return "\n".join(line for part in parts for line in part())


def _head() -> list[str]:
    return [
        "# Hardware",
        "",
        "Generated from `core/hardware` by `make docs`. No AMD card was at hand when these tables were written: they",
        "are from the sources they name, and what has been run is said in [performance.md](performance.md).",
        "`eft doctor` shows what of it concerns your box.",
        "",
    ]


def _arches() -> list[str]:
    return [
        "## Architectures",
        "",
        "A job computes in bf16 where it stands here, elsewhere in fp16 with a loss scaler, and its events say so.",
        "An architecture that is not in the table is served too, in fp32, with a note in the worker's log. Attention",
        "is the best of PyTorch's kernels to expect (2.13, AOTriton 0.12): *flash, switched on* needs a variable,",
        "which the trainer gets; *math* makes the whole matrix of scores, so long rows cost memory there. What a card",
        "really can do is tried when a worker starts, and the self-test has the last word.",
        "",
        "| architecture | products | bf16 | matrix cores | fp8 | lanes | local memory | attention | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_arch(row) for row in ROWS),
        "",
    ]


def _found() -> list[str]:
    return [
        "## How GPUs are found",
        "",
        "Without torch and without a driver's library: AMD's in the kernel's list (`/sys/class/kfd`), which HIP",
        "itself reads, with `amd-smi` or `rocm-smi` for names, as a second opinion on the order, and in its place",
        "where `/sys` is out of reach; NVIDIA's from `nvidia-smi`. A program that hangs, fails or prints something",
        "else is a note.",
        "Never install `amdsmi` from PyPI beside a ROCm build of torch: torch then counts no GPUs",
        "([pytorch#186516](https://github.com/pytorch/pytorch/issues/186516)).",
        "",
        "- **Order** is HIP's. A trainer gets one visibility variable, HIP_VISIBLE_DEVICES by number or",
        "  CUDA_VISIBLE_DEVICES by UUID, counted from the whole box; what a worker inherited (ROCR_ filters first and",
        "  renumbers, HIP_ or CUDA_ counts among the rest) is read once at its start.",
        "- **Partitions** (MI300 and later in DPX, QPX, CPX) and **MIG** slices are GPUs of their own, each a slot. A",
        "  card in MIG mode without slices is left out. Whether memory came back after a job cannot be told of a part.",
        "- **Integrated GPUs** are left out, but for Strix Halo where there is no other; `--gpus` takes any.",
        "- **No driver**, nouveau, or one that lists no card: `/sys/bus/pci` shows it all the same. A note",
        "  names the card and says what to install; a card that is kept for a virtual machine is said to be.",
        "- **No permission** for `/dev/kfd` or `/dev/dri/renderD*`: the note says which group is missing and what to",
        "  do, `sudo usermod -aG …` on a bare machine, `--group-add <number>` for a container. Where no GPU is left",
        "  over, `eft doctor` calls it a problem: jobs would train on the CPU, and nobody know why.",
        "",
    ]


def _builds() -> list[str]:
    return [
        "## Builds of PyTorch",
        "",
        f"Sources as of {wheels.READ}. A build without kernels for a card installs, finds the card and fails at its",
        "first operation. `make … TORCH=rocm` (or `cuda`, `cpu`) takes the one for this box's cards, `ARCH=gfx1100`",
        "the one for that; `TORCH=torch==2.13.0 TORCH_INDEX=…` what you say.",
        "",
        "| architectures | index | image | | sources |",
        "|---|---|---|---|---|",
        *(_build(build) for build in BUILDS),
        "",
    ]


def _faults() -> list[str]:
    return [
        "## Known faults, and the way around each",
        "",
        f"Sources as of {READ}. A variable is set for the trainer alone, and only while the worker's own environment",
        "does not have it: set it there yourself if your versions are free of the fault. The worker's log names every",
        "change, and the run record of a job has the faults of its card with the variables that stood against them,",
        "and the limits that its matrix products were held to.",
        "",
        "| fault | seen on | what happens | way around | sources |",
        "|---|---|---|---|---|",
        *(_fault(fault) for fault in FAULTS),
        "",
    ]


def _determinism() -> list[str]:
    return [
        "## Determinism",
        "",
        "A box has one class, which `eft doctor` shows with its reasons: CPUs are *exact*, NVIDIA cards of one",
        "architecture *repeatable*, AMD cards and mixed boxes *best effort*.",
        "",
        "| class | what it means |",
        "|---|---|",
        *(f"| {kind.name} | {kind.meaning} |" for kind in determinism.CLASSES),
        "",
    ]


def _recording() -> list[str]:
    return [
        "## Send in your machine",
        "",
        "```bash",
        "eft doctor --record machine.txt",
        "```",
        "",
        "writes what is found of a machine: the kernel's list of GPUs, the mode and group of device files, what the",
        "drivers' programs answered, and variables about GPUs. Serial numbers and UUIDs are replaced by hashes with a",
        "salt that is thrown away, the same one everywhere in the file, so that the sources still agree; the host's",
        "name and paths are replaced; processes, users and jobs are not in it. It is text: read it, write into its",
        "second line what the machine is and whether eft finds it right, and attach it to an issue. As a file in",
        "`tests/unit/fixtures/machines`, with what should be found at its end, it is a test from then on; those there",
        "now were written from the formats' documentation, as their `source:` says.",
        "",
    ]


def _arch(row: ArchRow) -> str:
    cells = [
        f"`{row.arch}`",
        row.examples,
        "yes" if row.bf16 else "no",
        row.matrix,
        row.fp8,
        str(row.wave_size),
        f"{row.lds_kib} KiB" if row.lds_kib else "",
        ATTENTION[row.attention],
    ]
    return f"| {' | '.join(cells)} | {'integrated' if row.integrated else ''} |"


def _build(build: Build) -> str:
    arches = ", ".join(f"`{arch}`" for arch in build.arches)
    package = "" if build.package == "torch" else f", `{build.package.format(arch='gfx…')}`"
    index = f"<{build.index}>{package}" if build.index else "none known"
    image = f"`{build.image}`" if build.image else ""
    return f"| {arches} | {index} | {image} | {build.note} | {_sources(build.sources)} |"


def _fault(fault: KnownFault) -> str:
    arches = ", ".join("every AMD GPU" if arch == "amd" else f"`{arch}`" for arch in fault.arches)
    variables = " ".join(f"`{name}={value}`" for name, value in fault.set.items())
    way = f"{fault.route} ({variables})" if variables else fault.route
    if fault.limits != NO_LIMITS:
        way += f" ({_limits(fault.limits)})"
    return f"| `{fault.key}` ({fault.kind}) | {arches} | {fault.what} | {way} | {_sources(fault.sources)} |"


def _limits(limits: Limits) -> str:
    words = [
        f"at most {limits.fp32_rows:,} rows in fp32" if limits.fp32_rows is not None else "",
        f"outputs below {limits.output_bytes >> 30} GiB" if limits.output_bytes is not None else "",
        f"ranks in multiples of {limits.rank_multiple}" if limits.rank_multiple > 1 else "",
    ]
    return ", ".join(word for word in words if word)


def _sources(urls: tuple[str, ...]) -> str:
    return ", ".join(f"[{_short(url)}]({url})" for url in urls)


def _short(url: str) -> str:
    """`pytorch#186516` for an issue, else the last part."""
    parts = url.rstrip("/").split("/")
    return f"{parts[-3]}#{parts[-1]}" if parts[-1].isdecimal() else parts[-1]
