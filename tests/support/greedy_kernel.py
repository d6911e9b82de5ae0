"""A kernel that needs more registers than there are, and what the ahead-of-time compiler has to say of it.

`python -m tests.support.greedy_kernel FOLDER` prints findings as JSON: Triton is imported here, never by the tests'
own process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".venv" / "aot"))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from core.train.kernels.triton.case import Case  # noqa: E402
from core.train.kernels.triton.compiled import build, record, table  # noqa: E402
from core.train.kernels.triton.loss import loss_rows_  # noqa: E402
from core.train.kernels.triton.nf4 import dequantize_into, meta  # noqa: E402


@triton.jit
def _greedy(out, x, size: tl.constexpr, share: tl.constexpr):  # type: ignore[no-untyped-def]
    """All of `size` values are at hand until their sum is known."""
    at = tl.arange(0, size)
    value = tl.load(x + at)
    tl.store(out + at, value / tl.sum(value, axis=0) * share)


def _launch(size: int, share: int = 1) -> None:
    x = torch.empty(size, device="meta")
    _greedy[(1,)](x, x, size=size, share=share, num_warps=1, enable_fp_fusion=False)


def _form(form: record.Form) -> Any:
    return [form.signature, sorted(form.constants.items()), sorted(form.attributes.items()), form.options["num_warps"]]


def _nf4_form(target: str, n: int, k: int, device: str) -> Any:
    packed, scales = meta(n, k)
    out = torch.empty(n * k, dtype=torch.bfloat16, device="meta")
    if device != "meta":
        out, packed, scales = (
            torch.empty_like(out, device=device),
            torch.empty_like(packed, device=device),
            [torch.empty_like(scale, device=device) for scale in scales],
        )
    (form,) = record.forms(target, [Case("nf4", lambda: dequantize_into(out, packed, scales, 64))])
    return _form(form)


def _loss_form(target: str, device: str) -> Any:
    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    logits, labels, out = make(9, 1024, dtype=torch.bfloat16), make(9, dtype=torch.int64), make(9)
    (form,) = record.forms(target, [Case("loss", lambda: loss_rows_(logits, 1001, labels, out, gradient=True))])
    return _form(form)


def main() -> None:
    cache = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for target in ("gfx1100", "sm_90"):
        rows, _ = build.rows(None, 1, [target], [Case("too much", lambda: _launch(8_192))])
        found[f"greedy.{target}"] = {"rows": [asdict(row) for row in rows], "faults": table.faults(rows[0])}

    twice = [Case(name, lambda: _launch(64)) for name in ("one form", "the same form")]
    rows, made = build.rows(None, 1, ["sm_90"], twice)
    found["twice"] = {"compiled": made, "registers": [row.vgprs for row in rows]}

    modest = [Case("modest", lambda: _launch(256))]
    first, made = build.rows(cache, 1, ["gfx942"], modest)
    second, again = build.rows(cache, 1, ["gfx942"], modest)
    for path in cache.iterdir():
        path.write_text(path.read_text()[:20])
    third, damaged = build.rows(cache, 1, ["gfx942"], modest)
    _, changed = build.rows(cache, 1, ["gfx942"], [Case("modest", lambda: _launch(256, share=2))])
    found["cache"] = {
        "compiled": [made, again, damaged, changed],
        "equal": first == second == third,
        "row": asdict(first[0]),
    }

    found["forms"] = {
        target: {
            "nf4": [_nf4_form(target, 64, 128, device) for device in ("meta", "cpu")],
            "loss": [_loss_form(target, device) for device in ("meta", "cpu")],
            "large": _nf4_form(target, 32_768, 65_536, "meta"),
        }
        for target in ("gfx942", "sm_90")
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
