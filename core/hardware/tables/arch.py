"""What a GPU architecture can do, as data. One row an architecture; a test holds every row.

Names: gfx… as `gcnArchName` says (https://llvm.org/docs/AMDGPUUsage.html#processors), sm_… for NVIDIA's compute
capability (https://developer.nvidia.com/cuda-gpus), and "cpu". bf16 means instructions for it, which is what decides
speed: AMD's from https://rocm.docs.amd.com/en/latest/reference/precision-support.html and the MFMA and WMMA chapters
of the ISA guides (https://gpuopen.com/amd-gpu-architecture-programming-documentation/), NVIDIA's from the arithmetic
table of the CUDA programming guide (from compute capability 8.0). torch cannot be asked: on ROCm it answers
`get_device_capability()` with numbers that mean something else, and this must be known before torch is imported.
Matrix instructions, fp8 dialects and LDS sizes: the same precision page and ISA guides, and the table of technical
specifications in the CUDA programming guide (maximum shared memory of a thread block).

Attention is what PyTorch's scaled_dot_product_attention takes at best, see `Attention` for the sources. The table says
what to expect; the self-test says what is so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Vendor = Literal["amd", "nvidia", "cpu"]
Fp8 = Literal["none", "fnuz", "ocp"]
"""Dialect of the 8-bit floats that the matrix cores take: AMD's own first one (no infinities, no negative zero, a bias
one higher), or the Open Compute Project's. Numbers of one are not numbers of the other."""
Matrix = Literal["none", "mfma", "wmma", "tensor"]
"""Matrix instructions: CDNA's, RDNA's, NVIDIA's tensor cores."""
Attention = Literal["flash", "opt_in", "efficient", "math"]
"""The best of PyTorch's attention kernels, as of PyTorch 2.13 with AOTriton 0.12.

- `flash`: as it comes. NVIDIA from sm_80 to sm_121 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); AMD where
  AOTriton has left its experimental state: gfx90a and gfx942 from the start, gfx950 (ROCm/pytorch#2074), gfx1201
  (AOTriton 0.10), gfx1100 and gfx1151 (AOTriton 0.12, ROCm/pytorch#3313).
- `opt_in`: AOTriton has flash kernels, and PyTorch takes them only with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1
  (read once, before the first call): gfx1101, gfx1102, gfx1103 (ROCm/aotriton#138), gfx115x (pytorch/pytorch#174105),
  gfx1200 (measured: unslothai/unsloth#8821). Older builds of PyTorch ask for it on the promoted ones too.
- `efficient`: no flash, but not the whole matrix of scores either (CUTLASS, sm_50 to sm_75).
- `math`: the whole matrix of scores. gfx908 (ROCm/aotriton#27), RDNA 2 (ROCm/aotriton#118), and all that is older.
"""
Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class ArchRow:
    """One architecture."""

    arch: str
    vendor: Vendor
    bf16: bool
    wave_size: int
    """Lanes that run in step (wavefront, warp); 1 for a CPU."""
    matrix: Matrix
    fp8: Fp8
    lds_kib: int
    """Local memory (LDS, shared memory) that one workgroup may use, in KiB; 0 for a CPU."""
    attention: Attention
    examples: str
    """Products, so that a person recognises the box."""
    integrated: bool = False
    """Shares the processor's package and memory."""

    @property
    def precision(self) -> Precision:
        """What `auto` computes in: bf16 where there are instructions for it; else fp16, whose narrow range a loss
        scaler makes up for and which every GPU of this table has at twice the rate of fp32 or better; fp32 otherwise.
        A CPU has the last word itself (its instruction set, asked at run time)."""
        if self.bf16:
            return "bf16"
        return "fp32" if self.vendor == "cpu" else "fp16"


ROWS = (
    # GCN 5 and CDNA: 64 lanes. Matrix cores with bf16 came with CDNA 1 (gfx908).
    ArchRow("gfx900", "amd", False, 64, "none", "none", 64, "math", "Radeon RX Vega 64, Instinct MI25"),
    ArchRow("gfx902", "amd", False, 64, "none", "none", 64, "math", "Ryzen 2000, 3000 APU (Vega)", integrated=True),
    ArchRow("gfx906", "amd", False, 64, "none", "none", 64, "math", "Instinct MI50, MI60, Radeon VII"),
    ArchRow("gfx908", "amd", True, 64, "mfma", "none", 64, "math", "Instinct MI100"),
    ArchRow("gfx90a", "amd", True, 64, "mfma", "none", 64, "flash", "Instinct MI210, MI250, MI250X"),
    ArchRow("gfx90c", "amd", False, 64, "none", "none", 64, "math", "Ryzen 4000, 5000 APU (Vega)", integrated=True),
    ArchRow("gfx942", "amd", True, 64, "mfma", "fnuz", 64, "flash", "Instinct MI300X, MI300A, MI325X"),
    ArchRow("gfx950", "amd", True, 64, "mfma", "ocp", 160, "flash", "Instinct MI350X, MI355X"),
    # RDNA 1 and 2: 32 lanes, packed fp16 but no bf16.
    ArchRow("gfx1010", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 5700 XT"),
    ArchRow("gfx1011", "amd", False, 32, "none", "none", 64, "math", "Radeon Pro V520"),
    ArchRow("gfx1012", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 5500 XT"),
    ArchRow("gfx1030", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 6800 XT, 6900 XT, PRO W6800"),
    ArchRow("gfx1031", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 6700 XT"),
    ArchRow("gfx1032", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 6600 XT"),
    ArchRow("gfx1033", "amd", False, 32, "none", "none", 64, "math", "Steam Deck (Van Gogh)", integrated=True),
    ArchRow("gfx1034", "amd", False, 32, "none", "none", 64, "math", "Radeon RX 6500 XT"),
    ArchRow("gfx1035", "amd", False, 32, "none", "none", 64, "math", "Ryzen 6000 APU (Radeon 680M)", integrated=True),
    ArchRow("gfx1036", "amd", False, 32, "none", "none", 64, "math", "Ryzen 7000, 9000 (2 CUs)", integrated=True),
    # RDNA 3 and 3.5: WMMA with bf16.
    ArchRow("gfx1100", "amd", True, 32, "wmma", "none", 64, "flash", "Radeon RX 7900 XTX, 7900 XT, PRO W7900"),
    ArchRow("gfx1101", "amd", True, 32, "wmma", "none", 64, "opt_in", "Radeon RX 7800 XT, 7700 XT, PRO W7700"),
    ArchRow("gfx1102", "amd", True, 32, "wmma", "none", 64, "opt_in", "Radeon RX 7600"),
    ArchRow(
        "gfx1103", "amd", True, 32, "wmma", "none", 64, "opt_in", "Ryzen 7040, 8040 (Radeon 780M)", integrated=True
    ),
    ArchRow(
        "gfx1150", "amd", True, 32, "wmma", "none", 64, "opt_in", "Ryzen AI 300 (Strix Point, 890M)", integrated=True
    ),
    ArchRow(
        "gfx1151", "amd", True, 32, "wmma", "none", 64, "flash", "Ryzen AI Max (Strix Halo, 8060S)", integrated=True
    ),
    ArchRow("gfx1152", "amd", True, 32, "wmma", "none", 64, "opt_in", "Ryzen AI 300 (Krackan Point)", integrated=True),
    ArchRow("gfx1153", "amd", True, 32, "wmma", "none", 64, "opt_in", "RDNA 3.5 APU", integrated=True),
    # RDNA 4
    ArchRow("gfx1200", "amd", True, 32, "wmma", "ocp", 64, "opt_in", "Radeon RX 9060 XT"),
    ArchRow("gfx1201", "amd", True, 32, "wmma", "ocp", 64, "flash", "Radeon RX 9070 XT, AI PRO R9700"),
    # NVIDIA: bf16 from Ampere on.
    ArchRow("sm_70", "nvidia", False, 32, "tensor", "none", 96, "efficient", "V100"),
    ArchRow("sm_75", "nvidia", False, 32, "tensor", "none", 64, "efficient", "T4, RTX 2080 Ti"),
    ArchRow("sm_80", "nvidia", True, 32, "tensor", "none", 163, "flash", "A100, A30"),
    ArchRow("sm_86", "nvidia", True, 32, "tensor", "none", 99, "flash", "RTX 3090, A10, A40"),
    ArchRow("sm_87", "nvidia", True, 32, "tensor", "none", 163, "flash", "Jetson Orin", integrated=True),
    ArchRow("sm_89", "nvidia", True, 32, "tensor", "ocp", 99, "flash", "RTX 4090, L4, L40S"),
    ArchRow("sm_90", "nvidia", True, 32, "tensor", "ocp", 227, "flash", "H100, H200, GH200"),
    ArchRow("sm_100", "nvidia", True, 32, "tensor", "ocp", 227, "flash", "B200, GB200"),
    ArchRow("sm_103", "nvidia", True, 32, "tensor", "ocp", 227, "flash", "B300, GB300"),
    ArchRow("sm_120", "nvidia", True, 32, "tensor", "ocp", 99, "flash", "RTX 5090, RTX PRO 6000"),
    ArchRow("sm_121", "nvidia", True, 32, "tensor", "ocp", 99, "flash", "GB10 (DGX Spark)", integrated=True),
    # torch computes in bf16 on every CPU; with AVX512_BF16 or AMX it is also the fastest.
    ArchRow("cpu", "cpu", True, 1, "none", "none", 0, "flash", "any"),
)

_BY_ARCH = {row.arch: row for row in ROWS}


def lookup(arch: str) -> ArchRow | None:
    """The row of `arch`, None for an architecture without one. Feature suffixes (`gfx90a:sramecc+:xnack-`) are
    ignored."""
    return _BY_ARCH.get(arch.partition(":")[0])


def supports_bf16(arch: str) -> bool:
    """Whether `arch` computes in bf16. False when it is unknown: the caller says so and uses fp32 or fp16."""
    row = lookup(arch)
    return row is not None and row.bf16


def precision(arch: str) -> Precision:
    """What `auto` computes in on `arch`; fp32 on an unknown architecture, since nothing is known of it."""
    row = lookup(arch)
    return "fp32" if row is None else row.precision


def gfx_name(gfx_target_version: int) -> str:
    """KFD's number as a name: 90402 → gfx942, 90010 → gfx90a, 110000 → gfx1100 (major, minor, stepping; the last two
    as hexadecimal digits)."""
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"
