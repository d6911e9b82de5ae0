"""docs/hardware.md, from the tables of architectures, builds of PyTorch, known faults and determinism."""

from __future__ import annotations

from core.docs import selftest
from core.hardware.tables import determinism, wheels
from core.hardware.tables.arch import ROWS, ArchRow, Attention
from core.hardware.tables.attention import CUDNN, LIBRARIES
from core.hardware.tables.faults import FAULTS, NO_LIMITS, READ, KnownFault, Limits
from core.hardware.tables.wheels import BUILDS, Build

ATTENTION: dict[Attention, str] = {
    "flash": "flash",
    "opt_in": "flash, switched on",
    "efficient": "memory-efficient",
    "math": "math",
}


def render() -> str:
    parts = (_head, _arches, _libraries, _found, selftest.section, _builds, _faults, _determinism, _recording)
    return "\n".join(line for part in parts for line in part())


def _head() -> list[str]:
    return [
        "# Hardware",
        "",
        "Generated from `core/hardware` by `make docs`. No AMD GPU was available when these tables were written: they",
        "follow the sources that they name. [performance.md](performance.md) says what has been run. `eft doctor`",
        "shows what applies to your box.",
        "",
        "GPU code is tested without a GPU: every branch that asks for a GPU or for HIP is taken in a",
        "[rehearsal](rehearsal.md), and the Triton kernels are executed from their AMD machine code",
        "([kernels](kernels.md)). Only a card can show speed, overlap of copies and computation, the numerics of the",
        "vendors' libraries, drivers, and RCCL or NCCL;",
        "[the tests to run first on one](rehearsal.md#what-only-a-gpu-can-show).",
        "",
    ]


def _arches() -> list[str]:
    return [
        "## Architectures",
        "",
        "A job computes in bf16 if this table says yes, otherwise in fp16 with a loss scaler; its events say which.",
        "An architecture that is not in the table works too, in fp32, with a note in the worker's log. Attention is",
        "the best of PyTorch's kernels to expect (2.13, AOTriton 0.12). *flash, switched on* needs a variable, which",
        "the trainer gets. *math* computes the whole matrix of scores, so long rows cost memory. The self-test at",
        "worker start decides what a GPU really can do.",
        "",
        "| architecture | products | bf16 | matrix cores | fp8 | lanes | local memory | attention | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_arch(row) for row in ROWS),
        "",
    ]


def _libraries() -> list[str]:
    return [
        "## Attention libraries",
        "",
        "A library that is installed beside torch on the node computes attention of packed and of padded rows",
        "in 16 bits, if its part of the self-test (`library.NAME`) passed on this card. The uppermost that passed is",
        "taken, and PyTorch's own kernels if none did. A run compares it once more, at the head width of its model,",
        "and padded rows also by the model's logits; the run record names it (`packing.attention` or",
        "`padding.attention`). Layers that need a mask, such as a window shorter than a row, dropout in attention, and",
        "compiled blocks keep PyTorch's kernels. A library that is installed and fails is reported. eft installs none",
        "of them. No row has been run on a card yet.",
        "",
        "| library | module | architectures | to install | source |",
        "|---|---|---|---|---|",
        *(
            f"| {row.title} (`{row.name}`) | `{row.module}` | {', '.join(f'`{arch}`' for arch in row.arches)} "
            f"| {row.install} | <{row.source}> |"
            for row in LIBRARIES
        ),
        "",
        f"cuDNN's attention is part of PyTorch on {', '.join(f'`{arch}`' for arch in sorted(CUDNN, key=_number))}. Its",
        "backward pass has no fixed order of sums, so that a resumed run may differ in the last bits. Only",
        "`training.attention: cudnn` takes it, and only where `library.cudnn` passed. Otherwise a notice says what is",
        "used.",
        "",
    ]


def _number(arch: str) -> int:
    return int(arch.partition("_")[2])


def _found() -> list[str]:
    return [
        "## How GPUs are found",
        "",
        "eft finds GPUs without torch and without a driver's library. AMD GPUs come from the kernel's list",
        "(`/sys/class/kfd`), which HIP itself reads. `amd-smi` or `rocm-smi` supplies names and confirms the order,",
        "and replaces the list if `/sys` is not accessible. NVIDIA GPUs come from `nvidia-smi`. If one of these",
        "programs hangs, fails or prints something unexpected, that becomes a note. Never install `amdsmi` from PyPI",
        "beside a ROCm build of torch: torch then finds no GPUs",
        "([pytorch#186516](https://github.com/pytorch/pytorch/issues/186516)).",
        "",
        "- **Order** is HIP's. A trainer gets one visibility variable, HIP_VISIBLE_DEVICES by number or",
        "  CUDA_VISIBLE_DEVICES by UUID, relative to the whole box. Variables that a worker inherited (ROCR_ filters",
        "  first and renumbers, HIP_ or CUDA_ counts among the rest) are read once at its start.",
        "- **Partitions** (MI300 and later in DPX, QPX, CPX) and **MIG** slices are separate GPUs, each a slot. A",
        "  card in MIG mode without slices is not used. Whether a partition's memory was released after a job cannot",
        "  be determined.",
        "- **Integrated GPUs** are not used, except Strix Halo if there is no other GPU. `--gpus` selects any of",
        "  them.",
        "- **No driver**, nouveau, or a driver that lists no card: `/sys/bus/pci` still shows the card. A note names",
        "  it and the driver to install, or says that it is reserved for a virtual machine.",
        "- **No permission** for `/dev/kfd` or `/dev/dri/renderD*`: the note names the missing group and the remedy,",
        "  `sudo usermod -aG …` on a bare machine, `--group-add <number>` for a container. If no GPU is left,",
        "  `eft doctor` reports a problem, because jobs would silently train on the CPU.",
        "",
    ]


def _builds() -> list[str]:
    return [
        "## Builds of PyTorch",
        "",
        f"Sources as of {wheels.READ}. A build without kernels for a card installs, finds the card and fails at its",
        "first operation. `make … TORCH=rocm` (or `cuda`, `cpu`) selects the build for this machine's cards, and",
        "`ARCH=gfx1100` the build for that architecture. `TORCH=torch==2.13.0 TORCH_INDEX=…` selects any build.",
        "",
        "| architectures | index | image | | sources |",
        "|---|---|---|---|---|",
        *(_build(build) for build in BUILDS),
        "",
    ]


def _faults() -> list[str]:
    return [
        "## Known faults and workarounds",
        "",
        f"Sources as of {READ}. A variable is set only for the trainer, and only if the worker's own environment does",
        "not have it: set it there if your versions are free of the fault. The worker's log names every change. The",
        "run record of a job lists the faults of its GPU, the variables set against them, and the limits of its",
        "matrix products.",
        "",
        "**ROCm 10.0** was branched in July 2026 ([TheRock#7000](https://github.com/ROCm/TheRock/issues/7000)). No",
        "report of a fault that is new in it was found, and no report that one of these is gone: all rows apply to it.",
        "",
        "| fault | seen on | effect | workaround | sources |",
        "|---|---|---|---|---|",
        *(_fault(fault) for fault in FAULTS),
        "",
    ]


def _determinism() -> list[str]:
    return [
        "## Determinism",
        "",
        "Each box has one class, which `eft doctor` shows with its reasons: CPUs are *exact*, NVIDIA GPUs of one",
        "architecture *repeatable*, AMD GPUs and mixed boxes *best effort*.",
        "",
        "| class | meaning |",
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
        "This command writes what eft finds on a machine: the kernel's list of GPUs, the mode and group of device",
        "files, the output of the drivers' programs, and environment variables about GPUs. Serial numbers and UUIDs",
        "are replaced by hashes with a random salt that is discarded; the hashes are consistent within the file, so",
        "that the sources can be compared. The host name and paths are replaced. Processes, users and jobs are not",
        "included. The file is text: read it, add to its second line what the machine is and whether eft finds it",
        "correctly, and attach it to an issue. As a file in `tests/unit/fixtures/machines`, with the expected result",
        "at its end, it becomes a test. The files there now were written from the formats' documentation, as their",
        "`source:` says.",
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
