"""Launches of every Triton kernel that are small enough to execute, and what they have to compute.

A launch under the name of a case of `record.cases()` compiles to the very code of that case: same kernel, types,
constants, alignment and options (`same_form`). The others are forms that the table does not have: ragged ends, a bias,
rows that begin within a block, numbers that are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.train.kernels import portable
from core.train.kernels.triton import block, gemv, int8, loss, nf4
from core.train.kernels.triton.case import Case
from core.train.kernels.triton.compiled import record
from core.train.loss.linear_cross_entropy import HeadOptions
from core.train.quant.int8 import quantize_int8
from core.train.quant.nf4 import quantize_nf4
from tests.support.machine.driver import Launches, on
from tests.support.whole_logits import row_losses

EPS = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""One rounding to the dtype, relative; float32: what some thousand float32 operations lose."""


@dataclass
class Run:
    launch: Callable[[], Tensor]
    """Calls the kernel's public function; what it wrote."""
    check: Callable[[Tensor], object]
    """Raises AssertionError where that is wrong."""
    programs: Callable[[int], list[int]] = lambda grid: list(range(grid))


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def unpack(format: str, dtype: torch.dtype, n: int, double: bool = True, block: int = 64) -> Run:
    """The bits of the portable backend."""
    values = _random(n) * _random(n, seed=2).abs().pow(8)
    values[: n // 4] = 0.0
    weight: Any = quantize_nf4(values, block=block, double=double) if format == "nf4" else quantize_int8(values)
    wanted = torch.empty(n, dtype=dtype)
    portable.dequantize_into(wanted, weight.packed, weight.scales, format, block)

    def launch() -> Tensor:
        out = torch.empty(n, dtype=dtype)
        (nf4 if format == "nf4" else int8).dequantize_into(out, weight.packed, weight.scales, block)
        return out

    return Run(launch, lambda out: _same(out, wanted))


def past_two_gibibytes(n: int) -> Run:
    """The first and the last program of a weight whose unpacked form has more than 2 GiB. The system gives its memory
    when it is written."""
    packed, scales = nf4.meta(n, 1)
    packed, scales = torch.empty_like(packed, device="cpu"), [torch.empty_like(scale, device="cpu") for scale in scales]
    tile = nf4.THREADS * nf4.STORE // 2
    small: Any = quantize_nf4(_random(2 * tile))
    bytes_of = small.packed.flatten()[: tile // 2]
    for place in (slice(0, tile // 2), slice(packed.numel() - tile // 2, packed.numel())):
        packed[place] = bytes_of
    scales[0][: tile // 64], scales[0][-(tile // 64) :] = 17, 200
    scales[1][0], scales[1][-1] = 0.5, 3.0
    scales[2][:], scales[3][:] = small.scales[2], small.scales[3]

    def wanted(code: int, group: float) -> Tensor:
        out = torch.empty(tile, dtype=torch.bfloat16)
        of = [torch.full((tile // 64,), code, dtype=torch.uint8), torch.tensor([group]), scales[2], scales[3]]
        portable.dequantize_into(out, bytes_of, of, "nf4", 64)
        return out

    def launch() -> Tensor:
        out = torch.empty(n, dtype=torch.bfloat16)
        nf4.dequantize_into(out, packed, scales, 64)
        return out

    def check(out: Tensor) -> None:
        _same(out[:tile], wanted(17, 0.5))
        _same(out[-tile:], wanted(200, 3.0))

    return Run(launch, check, lambda grid: [0, grid - 1])


def product(format: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> Run:
    """y = x·Wᵀ + bias within one rounding to y's dtype, and 2e-6 of the sum of the terms' sizes."""
    weight: Any = quantize_nf4(_random(n, k) * 0.05) if format == "nf4" else quantize_int8(_random(n, k) * 0.05)
    dense = torch.empty(n * k)
    portable.dequantize_into(dense, weight.packed, weight.scales, format, 64)
    x, offset = _random(m, k, seed=3).to(dtype), _random(n, seed=4).to(dtype) if bias else None
    exact, sizes = x.double() @ dense.view(n, k).double().T, x.double().abs() @ dense.view(n, k).double().abs().T
    wanted = exact if offset is None else exact + offset.double()

    def check(y: Tensor) -> None:
        assert ((y.double() - wanted).abs() <= EPS[dtype] * wanted.abs() + 2e-6 * sizes).all()

    return Run(lambda: gemv.multiply(x, weight.packed, weight.scales, format, 64, n, offset), check)


def losses(
    dtype: torch.dtype, vocabulary: int = 4161, gradient: bool = True, options: HeadOptions | None = None,
    bias: bool = False, spoilt: bool = False,
) -> Run:  # fmt: skip
    """Losses within 1e-5, a gradient within one rounding of its dtype; of float64. `spoilt`: some rows hold numbers
    that are none, or labels that are in no vocabulary."""
    rows, width = 4, loss.padded(vocabulary)
    plain = HeadOptions() if options is None else options
    logits = torch.full((rows, width), float("nan"), dtype=dtype)
    logits[:, :vocabulary] = 3 * _random(rows, vocabulary)
    labels = torch.tensor([0, vocabulary - 1, -100, min(17, vocabulary - 1)])
    if spoilt:
        logits[0, 3], logits[1, vocabulary - 1], labels[3] = float("nan"), float("inf"), vocabulary
    extra = _random(vocabulary, seed=5).to(dtype) if bias else None
    weight = torch.linspace(-0.5, 1.5, rows) if bias else None
    exact = logits[:, :vocabulary].double().requires_grad_()
    known = {name: getattr(plain, name) for name in ("softcap", "scale", "label_smoothing", "z_loss")}
    before = logits.clone()

    def launch() -> Tensor:
        out = torch.empty(rows)
        loss.loss_rows_(logits, vocabulary, labels, out, bias=extra, weight=weight, gradient=gradient, **known)
        return out

    def check(out: Tensor) -> None:
        after = logits[:, :vocabulary]
        if spoilt:
            assert not out[[0, 1, 3]].isfinite().any() and out[2] == 0 and (after[2] == 0).all()
            assert not after[[0, 1, 3]].isfinite().all(dim=1).any()
            return
        wanted = row_losses(exact, labels, None if extra is None else extra.double(), plain)
        torch.testing.assert_close(out.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
        if gradient:
            of = torch.ones(rows, dtype=torch.float64) if weight is None else weight.double()
            (slope,) = torch.autograd.grad(wanted, exact, of)
            torch.testing.assert_close(after.double(), slope, rtol=EPS[dtype], atol=1e-6)
        else:
            _same(logits, before)

    return Run(launch, check)


def norm(dtype: torch.dtype, width: int, rows: int, gradient: bool = False, from_one: bool = False) -> Run:
    """An RMS norm, or its gradient, within two roundings of the largest value; of float64."""
    x, above = (3 * _random(rows, width, seed=seed) for seed in (1, 2))
    x, above, weight = x.to(dtype), above.to(dtype), _random(width, seed=3).to(dtype)
    exact = x.double().requires_grad_()
    root = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = exact * root * (weight.double() + (1.0 if from_one else 0.0))
    out, scale = torch.empty_like(x), torch.empty(rows)

    def launch() -> Tensor:
        if gradient:
            block.norm_grad(out, above, x, weight, root.detach().float().flatten(), from_one)
        else:
            block.norm(out, scale, x, weight, 1e-6, from_one)
        return out

    def check(out: Tensor) -> None:
        right = torch.autograd.grad(wanted, exact, above.double())[0] if gradient else wanted.detach()
        assert (out.double() - right).abs().max() <= 2 * EPS[dtype] * right.abs().max()
        if not gradient:
            torch.testing.assert_close(scale, root.detach().float().flatten(), rtol=2e-6, atol=0)

    return Run(launch, check)


def gate(dtype: torch.dtype, count: int, gradient: bool = False) -> Run:
    """silu(gate) · up, or both of its gradients, within two roundings of the largest value; of float64."""
    x, y, above = (3 * _random(count, seed=seed) for seed in (1, 2, 3))
    x, y, above = x.to(dtype), y.to(dtype), above.to(dtype)
    exact, up = x.double().requires_grad_(), y.double().requires_grad_()
    wanted = torch.nn.functional.silu(exact) * up
    outs = [torch.empty_like(x) for _ in range(2 if gradient else 1)]

    def launch() -> Tensor:
        block.gate_grad(*outs, above, x, y) if gradient else block.gate(*outs, x, y)
        return torch.stack(outs)

    def check(out: Tensor) -> None:
        rights = torch.autograd.grad(wanted, [exact, up], above.double()) if gradient else [wanted.detach()]
        for found, right in zip(out, rights, strict=True):
            assert (found.double() - right).abs().max() <= 2 * EPS[dtype] * right.abs().max()

    return Run(launch, check)


def turn(dtype: torch.dtype, width: int, heads: int = 32, lines_of_angles: int = 1, back: bool = False) -> Run:
    """Rotary embedding, or its gradient; the bits of the eager formula."""
    lines, tokens = 2, 3
    angles = _random(lines_of_angles, tokens, width, seed=2)
    x, cosine, sine = _random(lines, tokens, heads, width).to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)
    out = torch.empty_like(x)

    def launch() -> Tensor:
        block.turn(out, x, cosine, sine, back)
        return out

    def check(out: Tensor) -> None:
        cos, sin = cosine.unsqueeze(2), sine.unsqueeze(2)
        low, high = (x * sin if back else x).chunk(2, -1)
        _same(out, x * cos + (torch.cat([high, -low], -1) if back else torch.cat([-high, low], -1) * sin))

    return Run(launch, check)


EVERY = HeadOptions(softcap=30.0, label_smoothing=0.1)
_TILE = 2048
TABLED: dict[str, Callable[[], Run]] = {
    "nf4 to bfloat16": lambda: unpack("nf4", torch.bfloat16, 2 * _TILE + 96),
    "nf4 to float16": lambda: unpack("nf4", torch.float16, 2 * _TILE + 96),
    "nf4 to float32": lambda: unpack("nf4", torch.float32, 2 * _TILE + 96),
    "nf4 single to bfloat16": lambda: unpack("nf4", torch.bfloat16, 2 * _TILE + 96, double=False),
    "nf4 to bfloat16, past 2 GiB": lambda: past_two_gibibytes(151_936 * 14336),
    "int8 to bfloat16": lambda: unpack("int8", torch.bfloat16, 2 * _TILE + 96),
    "int8 to float16": lambda: unpack("int8", torch.float16, 2 * _TILE + 96),
    "gemv nf4, 1 row": lambda: product("nf4", 1, 16, 2112),
    "gemv nf4, 8 rows": lambda: product("nf4", 8, 16, 2112),
    "gemv int8, 1 row": lambda: product("int8", 1, 16, 2112),
    "gemv int8, 8 rows": lambda: product("int8", 8, 16, 2112),
    "loss bfloat16": lambda: losses(torch.bfloat16),
    "loss bfloat16, no gradient": lambda: losses(torch.bfloat16, gradient=False),
    "loss bfloat16, every option": lambda: losses(torch.bfloat16, options=EVERY, bias=True),
    "loss float16": lambda: losses(torch.float16),
    "loss float32": lambda: losses(torch.float32),
    "norm bfloat16": lambda: norm(torch.bfloat16, 4096, 2),
    "norm bfloat16, gradient": lambda: norm(torch.bfloat16, 4096, 2, gradient=True),
    "norm bfloat16, of heads": lambda: norm(torch.bfloat16, 128, 19),
    "norm bfloat16, of heads, gradient": lambda: norm(torch.bfloat16, 128, 19, gradient=True),
    "norm bfloat16, from one, wide": lambda: norm(torch.bfloat16, 16384, 1, from_one=True),
    "norm bfloat16, from one, wide, gradient": lambda: norm(torch.bfloat16, 16384, 1, gradient=True, from_one=True),
    "norm float32": lambda: norm(torch.float32, 4096, 2),
    "norm float32, gradient": lambda: norm(torch.float32, 4096, 2, gradient=True),
    "gate bfloat16": lambda: gate(torch.bfloat16, 2 * _TILE + 96),
    "gate bfloat16, gradient": lambda: gate(torch.bfloat16, 2 * _TILE + 96, gradient=True),
    "gate float32": lambda: gate(torch.float32, _TILE + 96),
    "gate float32, gradient": lambda: gate(torch.float32, _TILE + 96, gradient=True),
    "turn bfloat16": lambda: turn(torch.bfloat16, 128),
    "turn bfloat16, gradient": lambda: turn(torch.bfloat16, 128, back=True),
    "turn float32": lambda: turn(torch.float32, 64),
    "turn float32, gradient": lambda: turn(torch.float32, 64, back=True),
}
"""By the names of `record.cases()`."""
MORE: dict[str, Callable[[], Run]] = {
    "nf4, one number": lambda: unpack("nf4", torch.bfloat16, 1),
    "nf4, ragged by 37": lambda: unpack("nf4", torch.bfloat16, 2 * _TILE + 37),
    "nf4 in blocks of 32": lambda: unpack("nf4", torch.float16, _TILE + 33, block=32),
    "int8 to float32, ragged by 1": lambda: unpack("int8", torch.float32, 1024 + 1),
    "gemv nf4, 5 rows of 9 columns, bias": lambda: product("nf4", 5, 9, 320, torch.float16, bias=True),
    "gemv nf4, rows that begin within a block": lambda: product("nf4", 2, 7, 330),
    "gemv int8, 3 rows of 7 columns, ragged": lambda: product("int8", 3, 7, 333, torch.float32, bias=True),
    "loss, a small vocabulary": lambda: losses(torch.bfloat16, vocabulary=65),
    "loss float32, every option": lambda: losses(
        torch.float32, 1001, options=HeadOptions(softcap=20.0, scale=0.5, label_smoothing=0.2, z_loss=1e-3), bias=True
    ),
    "loss, numbers that are none": lambda: losses(torch.float16, 300, spoilt=True),
    "norm, rows of 63": lambda: norm(torch.bfloat16, 63, 35),
    "norm float32, rows of 577, gradient": lambda: norm(torch.float32, 577, 3, gradient=True),
    "gate float32, ragged by 1": lambda: gate(torch.float32, _TILE + 1),
    "gate, 33 numbers, gradient": lambda: gate(torch.bfloat16, 33, gradient=True),
    "turn, 3 heads of 14, angles of each line": lambda: turn(torch.bfloat16, 14, 3, 2),
    "turn float32, 5 heads of 6, gradient": lambda: turn(torch.float32, 6, 5, 2, back=True),
}


def execute(
    target: str, names: list[str], change: tuple[str, str] | None = None, preload: bool = True
) -> tuple[dict[str, str], dict[str, int]]:
    """In the child: run these cases on the machine as a GPU of this target. What is wrong by case, and how often each
    instruction was executed. `change`: two pieces of assembly, of which the second takes the place of the first."""
    wrong = {}
    launches = Launches(target, preload=preload)
    if change is not None:
        launches.change = lambda text: _changed(text, *change)
    for name in names:
        run = (TABLED | MORE)[name]()
        launches.programs = run.programs
        try:
            with on(launches):
                found = run.launch()
            run.check(found)
        except Exception as error:  # a report of all cases is worth more than the first failure
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong, dict(launches.executed)


def _changed(text: str, old: str, new: str) -> str:
    assert old in text, f"no {old!r} in the assembly"
    return text.replace(old, new, 1)


def other_forms(target: str) -> list[str]:
    """In the child: the cases of the table of compiled kernels whose launch here is another form, or missing."""
    found = []
    for case in record.cases():
        small = TABLED.get(case.name)
        if small is None:
            found.append(case.name)
            continue
        ours, theirs = (_forms(target, Case(case.name, launch)) for launch in (small().launch, case.launch))
        if ours != theirs:
            found.append(f"{case.name}: {ours} is not {theirs}")
    return found


def _forms(target: str, case: Case) -> list[Any]:
    return [
        (form.kernel, form.signature, form.constants, form.attributes, form.options)
        for form in record.forms(target, [case])
    ]
