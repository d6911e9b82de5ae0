"""The CPU backend in C (native.c, few_rows.c): compiled by the machine's own compiler at first use, and tried before it
is used.

The object is kept under a hash of source, compiler, flags and processor in `~/.cache/eft/kernels` (the trainer's home
lies on the data root, so it outlives a job). Without a compiler, or when a result differs from torch's, the portable
backend does the work: said in the log and in the run record. `EFT_KERNELS=portable` asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from core.base.files import sync
from core.train.kernels.adamw import AdamNumbers, QuantisedMeans, bounds_of, quantised_step

log = logging.getLogger("eft.train.kernels")

SOURCES = [Path(__file__).with_name(name) for name in ("native.c", "few_rows.c")]
HEADER = Path(__file__).with_suffix(".h")
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-std=gnu11"]
DTYPES = (torch.bfloat16, torch.float32)
NAMES = (
    *("eft_nf4", "eft_int8", "eft_softmax_stats", "eft_softmax_scale", "eft_adamw"),
    *("eft_norm", "eft_norm_grad", "eft_gate", "eft_gate_grad", "eft_turn"),
    *("eft_few_dense", "eft_few_nf4", "eft_few_int8"),
)
LANES = 16
"""Floats of an AVX-512 register (few_rows.c)."""


class NativeUnavailable(Exception):
    """Why the C kernels are not used."""


@cache
def library() -> ctypes.CDLL | str:
    """The loaded kernels, or why there are none. Compiles, loads and tries them once a process."""
    try:
        loaded = _load()
        _try_out(loaded)
    except NativeUnavailable as reason:
        log.warning("CPU kernels run in portable torch, more slowly: %s", reason)
        return str(reason)
    return loaded


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernels are there and compute in this dtype."""
    return dtype in DTYPES and not isinstance(library(), str)


# --- what they compute -----------------------------------------------------------------------------


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int) -> None:
    """See `core.train.kernels.interface`; to bfloat16 or float32, the same as the portable backend to the bit."""
    match format:
        case "nf4":
            _nf4(_ready(), out, packed, scales, block)
        case "int8":
            _int8(_ready(), out, packed, scales, block)
        case _:
            raise ValueError(f"unknown format {format}")


def softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and Σ exp(z - maximum) of each row of bfloat16 logits [c, V], float32 [c]."""
    top = torch.empty(logits.shape[0], dtype=torch.float32)
    total = torch.empty_like(top)
    _ready().eft_softmax_stats(_at(top), _at(total), _at(logits), *_size(logits), torch.get_num_threads())
    return top, total


def softmax_scale_(logits: Tensor, top: Tensor, factor: Tensor) -> None:
    """Bfloat16 logits [c, V] become factor · exp(z - top), in place; `top` and `factor` float32 [c]."""
    _ready().eft_softmax_scale(_at(logits), _at(top), _at(factor), *_size(logits), torch.get_num_threads())


def adamw_step(parameter: Tensor, gradient: Tensor, means: QuantisedMeans, numbers: AdamNumbers) -> None:
    """`core.train.kernels.adamw.quantised_step` to the bit, of contiguous float32 values on the CPU."""
    _adamw(_ready(), parameter, gradient, means, numbers)


def norm(out: Tensor, scale: Tensor, x: Tensor, weight: Tensor, eps: float, from_one: bool) -> None:
    """Fill `out` with the rows of x [..., n] over the root of their mean square, times the weight [n] or 1 + weight,
    and `scale` [...], float32, with what `norm_grad` needs. Here and below: contiguous, of one dtype of DTYPES."""
    _norm(_ready(), out, scale, x, weight, eps, from_one)


def norm_grad(grad_x: Tensor, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, from_one: bool) -> None:
    """Fill `grad_x` with the gradient of x in `norm`."""
    _norm_grad(_ready(), grad_x, grad, x, weight, scale, from_one)


def gate(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `out` with silu(gate) · up."""
    _gate(_ready(), out, gate, up)


def gate_grad(grad_gate: Tensor, grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `grad_gate` and `grad_up` with the gradients of `gate`."""
    _gate_grad(_ready(), grad_gate, grad_up, grad, gate, up)


def turn(out: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    """Fill `out` with the rotary embedding of x [lines, tokens, heads, width] by the angles' cosines and sines, [one or
    `lines`, tokens, width]; the width is even. `back`: with the gradient of x, for the gradient x of the result."""
    _turn(_ready(), out, x, cosine, sine, back)


def multiplies_few_rows(width: int, block: int = LANES) -> bool:
    """Whether `wide_product` serves weights of this width, and with a `block` of 32 or more `few_rows`."""
    loaded = library()
    if isinstance(loaded, str) or not loaded.eft_few_rows():
        return False
    return width % block == 0 and block % LANES == 0


def reads_once(weight: Tensor) -> bool:
    """Whether `wide_product` takes this weight [n, k] as it lies in memory."""
    here = weight.device.type == "cpu" and weight.dtype in DTYPES and weight.is_contiguous()
    return here and multiplies_few_rows(weight.shape[1])


def few_rows(x: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int) -> Tensor:
    """x [m, k] of one of DTYPES, m at most FEW_ROWS, times a packed weight [n, k]; float32. The weight is rounded to
    the dtype of x first, as a dense copy is."""
    return _few_rows(_ready(), x, packed, scales, format, block, n)


@dataclass(frozen=True, slots=True)
class LoRAFactors:
    """An adapter beside a weight [n, k]: its product is scale · (x · aᵀ) · bᵀ."""

    a: Tensor
    """[r, k], float32, contiguous; r is a multiple of LANES."""
    b: Tensor
    """[n, r], float32, contiguous."""
    scale: float
    narrow: bool
    """Each of its three products is rounded to bfloat16, and a and b have been."""


def wide_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: LoRAFactors | None = None,
    narrow: bool = False,
) -> None:
    """out [m, n] = x [m, k] · weight [n, k]ᵀ + bias [n], and an adapter's product: `weight` contiguous, bfloat16 or
    float32, `out` contiguous and float32. `narrow`: without the adapter's it is rounded to bfloat16."""
    _wide_product(_ready(), x, weight, out, bias, adapter, narrow)


def _few_rows(
    kernels: ctypes.CDLL, x: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int
) -> Tensor:
    from core.train.quant.layout import nf4_map

    rows, width = x.shape
    wide, packed = x.float().contiguous(), packed.contiguous()
    out, scales = torch.empty(rows, n), [tensor.contiguous() for tensor in scales]
    sizes = [ctypes.c_int64(size) for size in (rows, n, width, block)]
    ends = _narrow(x), torch.get_num_threads()
    if format == "int8":
        kernels.eft_few_int8(_at(out), _at(wide), _at(packed), *sizes, _at(scales[0]), *ends)
        return out
    double = scales if len(scales) == 4 else [None] * 4
    aside = torch.empty_like(wide)
    kernels.eft_few_nf4(
        _at(out), _at(wide), _at(aside), _at(packed), *sizes, _at(nf4_map(out.device)),
        *map(_at, double), _at(scales[0] if len(scales) == 1 else None), *ends,
    )  # fmt: skip
    return out


def _wide_product(
    kernels: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    adapter: LoRAFactors | None,
    narrow: bool,
) -> None:
    wide, added = x.float().contiguous(), None if bias is None else bias.float().contiguous()
    a, b, low, rank = None, None, None, 0
    if adapter is not None:
        a, b, rank = adapter.a, adapter.b, len(adapter.a)
        low = torch.empty(len(x), rank)
    scale = ctypes.c_float(1.0 if adapter is None else adapter.scale)
    sizes = [ctypes.c_int64(size) for size in (*out.shape, weight.shape[1], rank)]
    rounding = _narrow(weight), int(narrow), int(adapter is not None and adapter.narrow)
    tensors = map(_at, (out, wide, weight, added, a, b, low))
    kernels.eft_few_dense(*tensors, scale, *sizes, *rounding, torch.get_num_threads())


def _norm(
    kernels: ctypes.CDLL, out: Tensor, scale: Tensor, x: Tensor, weight: Tensor, eps: float, from_one: bool
) -> None:
    kernels.eft_norm(
        _at(out), _at(scale), _at(x), _at(weight), ctypes.c_float(eps), _narrow(x), int(from_one),
        *_size(x.view(-1, x.shape[-1])), torch.get_num_threads(),
    )  # fmt: skip


def _norm_grad(
    kernels: ctypes.CDLL, grad_x: Tensor, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, from_one: bool
) -> None:
    kernels.eft_norm_grad(
        _at(grad_x), _at(grad), _at(x), _at(weight), _at(scale), _narrow(x), int(from_one),
        *_size(x.view(-1, x.shape[-1])), torch.get_num_threads(),
    )  # fmt: skip


def _gate(kernels: ctypes.CDLL, out: Tensor, gate: Tensor, up: Tensor) -> None:
    count = ctypes.c_int64(out.numel())
    kernels.eft_gate(_at(out), _at(gate), _at(up), _narrow(out), count, torch.get_num_threads())


def _gate_grad(
    kernels: ctypes.CDLL, grad_gate: Tensor, grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor
) -> None:
    kernels.eft_gate_grad(
        _at(grad_gate), _at(grad_up), _at(grad), _at(gate), _at(up), _narrow(gate), ctypes.c_int64(gate.numel()),
        torch.get_num_threads(),
    )  # fmt: skip


def _turn(kernels: ctypes.CDLL, out: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    lines, tokens, heads, width = x.shape
    kernels.eft_turn(
        _at(out), _at(x), _at(cosine), _at(sine), int(back), _narrow(x),
        *map(ctypes.c_int64, (lines, len(cosine), tokens, heads, width)), torch.get_num_threads(),
    )  # fmt: skip


def _adamw(
    kernels: ctypes.CDLL, parameter: Tensor, gradient: Tensor, means: QuantisedMeans, numbers: AdamNumbers
) -> None:
    n = numbers
    factors = (n.keep, n.first, 1.0 - n.first, n.second, 1.0 - n.second, n.root, n.eps, n.rate)
    bounds = [bounds_of(table) for table in means.maps]
    kernels.eft_adamw(
        _at(parameter), _at(gradient), _at(means.mean), _at(means.mean_scale), _at(means.root),
        _at(means.root_scale), _at(means.maps[0]), _at(means.maps[1]), _at(bounds[0]), _at(bounds[1]),
        ctypes.c_int64(parameter.numel()), ctypes.c_int64(means.block), means.bits, (ctypes.c_float * 8)(*factors),
        torch.get_num_threads(),
    )  # fmt: skip


def _nf4(kernels: ctypes.CDLL, out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    from core.train.quant.layout import nf4_map

    scales = [tensor.contiguous() for tensor in scales]
    absmax8, nested, table, offset = scales if len(scales) == 4 else [None] * 4
    kernels.eft_nf4(
        _at(out), int(out.dtype == torch.bfloat16), _at(packed.contiguous()), ctypes.c_int64(out.numel()),
        ctypes.c_int64(block), _at(nf4_map(out.device)), _at(absmax8), _at(nested), _at(table), _at(offset),
        _at(scales[0] if len(scales) == 1 else None), torch.get_num_threads(),
    )  # fmt: skip


def _int8(kernels: ctypes.CDLL, out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    absmax = scales[0].contiguous()
    kernels.eft_int8(
        _at(out), int(out.dtype == torch.bfloat16), _at(packed.contiguous()), ctypes.c_int64(out.numel()),
        ctypes.c_int64(block), _at(absmax), torch.get_num_threads(),
    )  # fmt: skip


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _narrow(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _size(tensor: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    rows, width = tensor.shape
    return ctypes.c_int64(rows), ctypes.c_int64(width)


def _ready() -> ctypes.CDLL:
    loaded = library()
    if isinstance(loaded, str):
        raise RuntimeError(f"there are no C kernels: {loaded}")
    return loaded


# --- compile, load, try ----------------------------------------------------------------------------


def _load() -> ctypes.CDLL:
    if os.environ.get("EFT_KERNELS") == "portable":
        raise NativeUnavailable("EFT_KERNELS=portable asks for it")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeUnavailable("there is no C compiler (cc, gcc or clang) on the PATH")
    kept = _cache_folder()
    with tempfile.TemporaryDirectory(prefix="eft-kernels-") as aside:
        target = (kept or Path(aside)) / f"native-{_key(compiler)}.so"
        try:
            if not target.is_file():
                _compile(compiler, Path(aside) / "made.so", target)
            loaded = ctypes.CDLL(str(target))  # stays loaded when the file goes
            for name in NAMES:
                getattr(loaded, name).restype = None
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            if kept is not None:
                target.unlink(missing_ok=True)  # damaged: the next process makes it anew
            raise NativeUnavailable(f"{target.name} cannot be made or loaded: {error}") from error
    return loaded


def _cache_folder() -> Path | None:
    """Private to this user: what lies there is run as code."""
    try:
        folder = Path.home() / ".cache" / "eft" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
        mine = about.st_uid == os.getuid() and not about.st_mode & 0o022
        return folder if mine and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # no home, or one that cannot be written: compiled anew in every process
        return None


def processor() -> str:
    """What tells this processor from others: its model and the instructions that it has."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    source = b"\0".join(path.read_bytes() for path in (*SOURCES, HEADER))
    parts = [source, version, " ".join(FLAGS).encode(), processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _compile(compiler: str, aside: Path, target: Path) -> None:
    done = subprocess.run(
        [compiler, *FLAGS, *map(str, SOURCES), "-o", str(aside)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode != 0:
        raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-500:]}")
    near = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(aside, near)
    sync(near)  # a truncated file would crash the process that loads it
    near.rename(target)


def _try_out(kernels: ctypes.CDLL) -> None:
    """Every kernel against torch on a small case with a short last block."""
    from core.train.quant.int8 import dequantize_int8_into, quantize_int8
    from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4

    values = torch.randn(300 * 64 + 37, generator=torch.Generator().manual_seed(0))
    values[64:128] = 0.0
    values[5] = 80.0
    for dtype in DTYPES:
        for double in (True, False):
            nf4 = quantize_nf4(values, double=double)
            ours, wanted = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
            _nf4(kernels, ours, nf4.packed, nf4.scales, 64)
            dequantize_nf4_into(wanted, nf4.packed, nf4.scales, 64)
            if not torch.equal(ours, wanted):
                raise NativeUnavailable(f"their NF4 in {dtype} differs from torch's on this processor")
        int8 = quantize_int8(values)
        _int8(kernels, ours, int8.packed, int8.scales, 64)
        dequantize_int8_into(wanted, int8.packed, int8.scales, 64)
        if not torch.equal(ours, wanted):
            raise NativeUnavailable(f"their int8 in {dtype} differs from torch's on this processor")
    _try_adamw(kernels, values)
    for dtype in DTYPES:
        _try_turn(kernels, values[: 2 * 5 * 3 * 14].view(2, 5, 3, 14).to(dtype), values[600 : 600 + 70].view(1, 5, 14))
    _try_softmax(kernels, values[:19200].view(6, 3200).to(torch.bfloat16))
    for dtype in DTYPES:
        _try_parts(kernels, values[:7000].view(7, 1000).to(dtype))
    if kernels.eft_few_rows():
        with torch.autocast("cpu", enabled=False):  # this may be the first call of a pass under autocast
            _try_few_rows(kernels, values[: 96 * 192].view(96, 192) / 80)


def _try_few_rows(kernels: ctypes.CDLL, values: Tensor) -> None:
    from core.train.quant.int8 import dequantize_int8_into, quantize_int8
    from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4

    n, width = values.shape
    found: list[tuple[Tensor, Tensor]] = []
    for dtype in DTYPES:
        x, dense = values[:7].to(dtype), torch.empty(n * width, dtype=dtype)
        for double in (True, False):
            nf4 = quantize_nf4(values, double=double)
            dequantize_nf4_into(dense, nf4.packed, nf4.scales, 64)
            ours = _few_rows(kernels, x, nf4.packed, nf4.scales, "nf4", 64, n)
            found.append((ours, x.float() @ dense.float().view(n, width).t()))
        int8 = quantize_int8(values)
        dequantize_int8_into(dense, int8.packed, int8.scales, 64)
        ours = _few_rows(kernels, x, int8.packed, int8.scales, "int8", 64, n)
        found.append((ours, x.float() @ dense.float().view(n, width).t()))
    a, b, bias = values[64:96], values.view(-1)[: 95 * 32].view(95, 32), values[1, :95].contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, out = values[:7].to(dtype), values[:95].to(dtype), torch.empty(7, 95)
        _wide_product(kernels, x, weight, out, bias, LoRAFactors(a, b, 2.0, narrow=False), False)
        found.append((out, x.float() @ weight.float().t() + bias + 2.0 * (x.float() @ a.t() @ b.t())))
    if not all(torch.allclose(ours, right, rtol=1e-5, atol=1e-6) for ours, right in found):
        raise NativeUnavailable("their products of few rows differ from torch's on this processor")


def _try_adamw(kernels: ctypes.CDLL, values: Tensor) -> None:
    for bits, block in ((8, 256), (4, 128)):
        rising = torch.linspace(-1, 1, 1 << bits), torch.linspace(0, 1, 1 << bits)
        results = []
        for step in (partial(_adamw, kernels), quantised_step):
            parameter = values.clone()
            codes = (torch.zeros(-(-values.numel() * bits // 8), dtype=torch.uint8) for _ in range(2))
            scales = (torch.zeros(-(-values.numel() // block)) for _ in range(2))
            (mean, root), (of_mean, of_root) = codes, scales
            means = QuantisedMeans(mean, of_mean, root, of_root, rising, block, bits)
            for turn in (1, 2):
                numbers = AdamNumbers(0.99, 0.9, 0.999, (1.0 - 0.999**turn) ** -0.5, 1e-8, 1e-2)
                step(parameter, values / turn, means, numbers)
            results.append((parameter, mean, root, of_mean, of_root))
        if not all(map(torch.equal, *results)):
            raise NativeUnavailable(f"their AdamW of {bits} bits differs from torch's on this processor")


def _try_softmax(kernels: ctypes.CDLL, logits: Tensor) -> None:
    top, total = torch.empty(6), torch.empty(6)
    kernels.eft_softmax_stats(_at(top), _at(total), _at(logits), *_size(logits), torch.get_num_threads())
    wide = logits.float()
    wanted = (wide - wide.amax(1, keepdim=True)).exp()
    if not (torch.equal(top, wide.amax(1)) and torch.allclose(total, wanted.sum(1), rtol=1e-5)):
        raise NativeUnavailable("their softmax differs from torch's on this processor")
    factor, scaled = 1 / total, logits.clone()
    kernels.eft_softmax_scale(_at(scaled), _at(top), _at(factor), *_size(logits), torch.get_num_threads())
    if not torch.allclose(scaled.float(), wanted * factor.unsqueeze(1), rtol=2**-7, atol=1e-30):
        raise NativeUnavailable("their softmax differs from torch's on this processor")


def _try_turn(kernels: ctypes.CDLL, x: Tensor, angles: Tensor) -> None:
    cosine, sine, out = angles.cos().to(x.dtype), angles.sin().to(x.dtype), torch.empty_like(x)
    c, s = (each.unsqueeze(2).chunk(2, -1) for each in (cosine, sine))
    low, high = x.chunk(2, -1)
    for back in (False, True):
        _turn(kernels, out, x, cosine, sine, back)
        first, second = high * s[int(back)], low * s[int(not back)]
        wanted = (low * c[0] + first, high * c[1] - second) if back else (low * c[0] - first, high * c[1] + second)
        if not torch.equal(out, torch.cat(wanted, -1)):
            raise NativeUnavailable(f"their rotary embedding in {x.dtype} differs from torch's on this processor")


def _try_parts(kernels: ctypes.CDLL, x: Tensor) -> None:
    """Gradients by their formulas: this may run below autograd, where a packed weight is dequantised first."""
    grad, weight, wide = x.roll(3, 1), x[2] * 0.1, x.float()
    up = grad.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    found: list[tuple[Tensor, Tensor]] = []
    for from_one, by in {False: weight.float(), True: 1.0 + weight.float()}.items():
        out, grad_x, scale = torch.empty_like(x), torch.empty_like(x), torch.empty(x.shape[0])
        _norm(kernels, out, scale, x, weight, 1e-6, from_one)
        _norm_grad(kernels, grad_x, grad, x, weight, scale, from_one)
        above = up * by
        wanted = root * above - wide * root.pow(3) * (above * wide).mean(-1, keepdim=True)
        found += [(out, wide * root * by), (grad_x, wanted)]
    opened = torch.sigmoid(wide)
    out, grad_gate, grad_up = (torch.empty_like(x) for _ in range(3))
    _gate(kernels, out, x, grad)
    _gate_grad(kernels, grad_gate, grad_up, grad, x, grad)
    found += [
        (out, wide * opened * up),
        (grad_gate, up * up * opened * (1.0 + wide * (1.0 - opened))),
        (grad_up, up * wide * opened),
    ]
    tolerance = 2.0**-6 if x.dtype == torch.bfloat16 else 1e-5
    for each, right in found:
        if not float((each.float() - right).abs().max()) <= tolerance * float(right.abs().max()):
            raise NativeUnavailable(f"their norm or gate in {x.dtype} differs from torch's on this processor")
