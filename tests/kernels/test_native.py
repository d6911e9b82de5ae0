"""The compiled CPU backend: the same bits as torch and bitsandbytes, and what happens where it cannot be had."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch.nn import functional

from core.train.kernels import interface, native, portable
from core.train.kernels.c_code import build
from core.train.kernels.c_code.calls import LoRAFactors
from core.train.loss.linear_cross_entropy import linear_cross_entropy
from core.train.quant.int8 import quantize_int8
from core.train.quant.linear import QuantLinear
from core.train.quant.nf4 import quantize_nf4
from tests.support.selection import pairwise
from tests.support.trainer import Forked, log


def test_a_machine_with_a_compiler_uses_it() -> None:
    assert interface.describe(torch.device("cpu")) == {"backend": "native"}


@pytest.mark.parametrize(
    ("quantise", "dtype", "n"),
    pairwise(
        ["nf4", "nf4-single", "nf4-256", "int8"],
        [torch.bfloat16, torch.float32, torch.float16],
        [64 * 300, 64 * 257 + 37, 1, 33],
    ),
)
def test_same_bits_as_portable_and_bitsandbytes(quantise: str, dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).pow(8)
    values[: n // 4] = 0.0
    if quantise == "int8":
        weight: Any = quantize_int8(values)
    else:
        block = 256 if quantise == "nf4-256" else 64
        weight = quantize_nf4(values, block, double=quantise != "nf4-single")
    format: Any = "int8" if quantise == "int8" else "nf4"
    ours, wanted = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    interface.dequantize_into(ours, weight.packed, weight.scales, format, weight.block)
    portable.dequantize_into(wanted, weight.packed, weight.scales, format, weight.block)
    assert torch.equal(ours, wanted)
    if quantise == "nf4" and n % 64 == 0:
        packed, state = bnb.quantize_4bit(values.to(dtype), compress_statistics=True, quant_type="nf4")
        again = quantize_nf4(values.to(dtype))
        interface.dequantize_into(ours, again.packed, again.scales, "nf4", 64)
        assert torch.equal(ours, bnb.dequantize_4bit(packed, state).view(-1))


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_the_loss_is_that_of_torch(z_loss: float) -> None:
    """Stated tolerance: 1e-5 of the loss; the gradient within 1 % of the norm (bfloat16's rounding of d logits)."""
    from core.train.loss.linear_cross_entropy import HeadOptions

    torch.manual_seed(0)
    hidden, head = torch.randn(70, 48).bfloat16().requires_grad_(), torch.randn(1003, 48).bfloat16()
    labels = torch.randint(0, 1003, (70,))
    labels[::9] = -100
    ours = linear_cross_entropy(hidden, head, labels, options=HeadOptions(z_loss=z_loss), chunk_rows=32)
    logits = (hidden @ head.t()).float()
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    wanted = wanted + z_loss * logits.logsumexp(1)[labels != -100].square().sum()
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)
    a, b = torch.autograd.grad(ours, hidden)[0], torch.autograd.grad(wanted, hidden)[0]
    assert (a - b).float().norm() / b.float().norm() < 0.01
    assert (a[::9] == 0).all()


def test_logits_that_are_no_numbers_stay_so() -> None:
    for bad in (float("nan"), float("inf")):
        hidden = torch.randn(5, 8).bfloat16()
        hidden[2, 0] = bad
        assert not linear_cross_entropy(hidden, torch.ones(33, 8).bfloat16(), torch.arange(5)).isfinite()


def _describe(folder: Path, **environment: str) -> str:
    """What a process with these variables, which has loaded no kernels yet from their home, says of its backend after a
    product by it."""
    folder.mkdir()

    def program() -> int:
        logging.basicConfig(force=True)
        os.environ.update(environment)
        build.FLAGS[0] = "-O0"  # what is tested is how an object is made and kept
        native.library.cache_clear()
        interface.backend_for.cache_clear()
        layer = QuantLinear(quantize_nf4(torch.ones(8, 64)))
        assert torch.equal(layer(torch.eye(64)), torch.ones(64, 8))
        print(interface.describe(torch.device("cpu")))
        return 0

    assert Forked(folder, program=program).wait() == 0, log(folder)
    return log(folder)


def test_without_it_the_portable_one_computes_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    for number, (environment, words) in enumerate(
        (
            ({"PATH": str(tmp_path / "empty")}, "no C compiler"),
            ({"PATH": str(tmp_path), "HOME": str(tmp_path / "home")}, "no such header"),
            ({"EFT_KERNELS": "portable"}, "asks for it"),
        )
    ):
        said = _describe(tmp_path / f"{number}", **environment)
        assert "'backend': 'portable'" in said and "more slowly" in said
        assert said.count(words) == 2, "in the log and in the record"


def test_a_damaged_object_is_made_anew(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "'native'" in _describe(tmp_path / "first", HOME=str(home))
    (made,) = (home / ".cache/eft/kernels").iterdir()
    size = made.stat().st_size
    made.write_bytes(b"not an object")
    assert "cannot be made or loaded" in _describe(tmp_path / "damaged", HOME=str(home))
    assert "'native'" in _describe(tmp_path / "anew", HOME=str(home)) and made.stat().st_size == size
    made.parent.chmod(0o777)  # anybody could put code there: not read, compiled for this process alone
    made.write_bytes(b"not an object")
    assert "'native'" in _describe(tmp_path / "open", HOME=str(home)) and made.read_bytes() == b"not an object"
    assert all(path.is_file() for path in build.SOURCES)


# --- few rows ----------------------------------------------------------------------------------------------

few_rows_here = pytest.mark.skipif(
    not native.multiplies_few_rows(64), reason="the C kernels of few rows need AVX-512 (few_rows.c)"
)


@few_rows_here
@pytest.mark.parametrize(
    ("form", "rows", "shape", "dtype"),
    pairwise(
        ["nf4", "nf4-single", "nf4-256", "int8"],
        [1, 3, 8],
        [(5, 512), (130, 1024)],
        [torch.bfloat16, torch.float32],
    ),
)
def test_few_rows_are_the_product_of_the_dense_weight(
    form: str, rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Stated tolerance: 1e-6 of the norm in float32, and the rounding of bfloat16."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    values.view(-1)[:64] = 0.0
    if form == "int8":
        weight: Any = quantize_int8(values)
    else:
        weight = quantize_nf4(values, 256 if form == "nf4-256" else 64, double=form != "nf4-single")
    format: Any = form.partition("-")[0]
    n, k = shape
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.linspace(-1, 1, n).to(dtype)
    dense = torch.empty(n * k, dtype=dtype)
    portable.dequantize_into(dense, weight.packed, weight.scales, format, weight.block)
    y = interface.few_rows(x, weight.packed, weight.scales, format, weight.block, n, bias)
    assert y is not None and y.dtype == dtype
    wanted = x.double() @ dense.view(n, k).double().t() + bias.double()
    assert float((y.double() - wanted).norm() / wanted.norm()) < (1e-6 if dtype is torch.float32 else 3e-3)
    alone = interface.few_rows(x[-1:], weight.packed, weight.scales, format, weight.block, n, bias)
    assert alone is not None and torch.equal(alone[0], y[-1]), "rows beside it change no bit of a row"


@few_rows_here
@pytest.mark.parametrize(
    ("rows", "n", "rank", "dtype"),
    pairwise([1, 3, 7, 9, 18], [1, 4, 95], [0, 16, 48], [torch.bfloat16, torch.float32]),
)
def test_a_dense_weight_is_multiplied_as_it_is(rows: int, n: int, rank: int, dtype: torch.dtype) -> None:
    """With an adapter beside it or none. Float32 sums, within 1e-6 of the sum of magnitudes; and those of a row do not
    depend on the others."""
    source = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, 96, generator=source).to(dtype) for size in (rows, n))
    a, b = torch.randn(rank, 96, generator=source), torch.randn(n, rank, generator=source)
    adapter = LoRAFactors(a, b, 0.7, narrow=False) if rank else None
    bias = torch.randn(n, generator=source)
    out, alone = torch.empty(rows, n), torch.empty(1, n)
    native.wide_product(x, weight, out, bias=bias, adapter=adapter)
    x64, low = x.double(), 0.7 * (b.double() @ a.double())
    magnitude = x64.abs() @ (weight.double().abs() + 0.7 * b.double().abs() @ a.double().abs()).t() + bias.abs()
    assert bool(((out - x64 @ (weight.double() + low).t() - bias).abs() <= 1e-6 * magnitude).all())
    native.wide_product(x[-1:], weight, alone, bias=bias, adapter=adapter)
    assert torch.equal(alone[0], out[-1])


@few_rows_here
def test_narrow_products_are_rounded_where_bfloat16s_are() -> None:
    """At most one rounding apart: sums in float32 are added up in another order."""
    source = torch.Generator().manual_seed(0)
    x, weight, a, b = (
        torch.randn(*shape, generator=source).bfloat16() for shape in ((5, 96), (64, 96), (16, 96), (64, 16))
    )
    out, bias = torch.empty(5, 64), torch.randn(64, generator=source).bfloat16()
    adapter = LoRAFactors(a.float(), b.float(), 0.7, narrow=True)
    native.wide_product(x, weight, out, bias=bias, adapter=adapter, narrow=True)
    wanted = functional.linear(x, weight, bias) + functional.linear(functional.linear(x, a), b) * 0.7
    assert float((out.bfloat16() == wanted).float().mean()) > 0.98
    torch.testing.assert_close(out.bfloat16(), wanted, rtol=2**-7, atol=0.1)


def test_what_the_kernels_of_few_rows_do_not_serve_is_left_to_others() -> None:
    weight = quantize_nf4(torch.randn(8, 64))
    for rows, dtype in ((9, torch.bfloat16), (2, torch.float16)):
        x = torch.randn(rows, 64).to(dtype)
        assert interface.few_rows(x, weight.packed, weight.scales, "nf4", weight.block, 8, None) is None
    odd = quantize_nf4(torch.randn(8, 96))  # rows that begin inside a block
    assert interface.few_rows(torch.randn(2, 96), odd.packed, odd.scales, "nf4", odd.block, 8, None) is None
