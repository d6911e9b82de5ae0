"""Which backend computes: what is asked for, what can run, what a self-test has taken away; and that a CPU has no need
of Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.train.kernels import interface, native, ops
from core.train.kernels.triton import probe
from core.train.quant.nf4 import quantize_nf4
from tests.support.interpreted import step_and_rows
from tests.support.interpreter import Run

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FEW_ROWS = "native" if native.multiplies_few_rows(64) else "portable"
"""What multiplies few rows: the C kernels need AVX-512."""


@pytest.fixture
def no_vetoes() -> Iterator[None]:
    interface.unveto()
    yield
    interface.unveto()


@pytest.mark.usefixtures("no_vetoes")
def test_a_vetoed_backend_computes_no_more_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert interface.available(CPU) == ("native", "portable")
    assert interface.available(CPU, "gemv")[0] == FEW_ROWS
    interface.veto("native", "differs by 3", "loss")
    assert interface.backend_for(CPU, "loss") == "portable" and interface.backend_for(CPU) == "native"
    assert interface.describe(CPU) == {"backend": "native", "vetoed": {"native:loss": "differs by 3"}}
    interface.veto("native", "differs by 4")
    assert interface.backend_for(CPU) == "portable" and "differs by 4" in caplog.text
    assert interface.vetoed() == {"native": "differs by 4"}
    assert interface.available(CPU) == ("native", "portable")  # what a self-test tries next time
    weight = quantize_nf4(torch.randn(4, 64))
    dense = ops.dequantize(weight.packed, weight.scales, "nf4", 64, [4, 64], torch.float32)
    assert torch.isfinite(dense).all()
    interface.unveto()
    assert interface.describe(CPU) == {"backend": "native"}


def test_the_last_one_cannot_be_vetoed() -> None:
    with pytest.raises(ValueError, match="what is left"):
        interface.veto("portable", "differs")


def test_a_cpu_has_it_interpreted_or_not_at_all(interpreted: Run) -> None:
    assert "TRITON_INTERPRET=1" in str(probe.unavailable(CPU))
    described, _ = interpreted("core.train.kernels.interface:describe", CPU)
    assert described["backend"] == "triton" and described["triton"][0].isdigit()


BROKEN = {
    "raise ImportError('libcuda.so.1 is missing')": "libcuda.so.1 is missing",
    "raise OSError('undefined symbol')": "undefined symbol",
    "__version__ = '2.1.0'": "2.1.0 is older than 3.2",
    "__version__ = '3.2.0+rocm'\ndef jit(f): raise RuntimeError('no C compiler')": "first kernel failed.*no C compiler",
}


def _child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, inherited = [sys.executable, "-c", code], os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_a_triton_that_does_not_work_is_not_used_and_told(tmp_path: Path) -> None:
    """Builds of Triton that break in the ways that are known, as real modules, each imported anew by one process."""
    for at, module in enumerate(BROKEN):
        (tmp_path / str(at) / "triton").mkdir(parents=True)
        (tmp_path / str(at) / "triton" / "__init__.py").write_text(module + "\n")
        (tmp_path / str(at) / "triton" / "language.py").write_text("constexpr = None\n")
    done = _child(
        f"""
import logging, re, sys, torch
from core.train.kernels import interface
from core.train.kernels.triton import probe
logging.basicConfig()
cpu = torch.device("cpu")
for at, words in enumerate({list(BROKEN.values())!r}):
    sys.path.insert(0, f"{tmp_path}/{{at}}")
    for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
        del sys.modules[name]
    probe.unavailable.cache_clear(), interface.unveto()
    assert interface.backend_for(cpu) == interface.backend_for(cpu, "loss") == "portable"
    assert re.search(words, probe.unavailable(cpu)), (words, probe.unavailable(cpu))
""",
        EFT_KERNELS="triton",
        TRITON_INTERPRET="1",
    )
    assert done.stderr.count("Triton is not used on cpu") == len(BROKEN)


def test_training_on_a_cpu_does_without_it(tmp_path: Path) -> None:
    """A step of QLoRA with checkpointing, and the loss, where Triton cannot be imported (torch itself tries)."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('not here')\n")
    done = _child(
        """
import sys, torch
from torch.utils.checkpoint import checkpoint
from core.train.kernels.autograd import Member, lora_linear
from core.train.kernels.interface import describe
from core.train.loss.linear_cross_entropy import linear_cross_entropy
from core.train.quant.nf4 import quantize_nf4
packed, a, b = quantize_nf4(torch.randn(32, 64)), torch.randn(4, 64), torch.randn(32, 4)
member = Member(packed.packed, packed.scales, "nf4", 64, None, a.requires_grad_(), b.requires_grad_(), 1.0)
x = torch.randn(3, 64, requires_grad=True)
y = checkpoint(lambda x: lora_linear(x, member), x, use_reentrant=False)
linear_cross_entropy(y.bfloat16(), torch.randn(50, 32).bfloat16(), torch.tensor([1, 2, 3])).backward()
assert a.grad is not None and describe(torch.device("cpu")) == {"backend": "native"}
print({name for name in sys.modules if name.startswith("core.train.kernels.triton.")})
""",
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout.strip() == "{'core.train.kernels.triton.probe'}"


def test_a_step_is_the_same_and_few_rows_need_no_dense_weight(interpreted: Run) -> None:
    """Linears with LoRA in the child, with Triton, and here without: the bits of a step, since the unpacked weights
    are; for two rows without gradients, the stated 1e-6 of y's norm."""
    theirs, _ = interpreted("tests.support.interpreted:step_and_rows")
    ours = step_and_rows()
    assert theirs.backends == {"dequantize": "triton", "gemv": "triton", "loss": "triton"}
    assert ours.backends == {"dequantize": "native", "gemv": FEW_ROWS, "loss": "native"}
    for found, wanted in zip(theirs.trained, ours.trained, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(theirs.generated, ours.generated, strict=True):
        assert found.shape == wanted.shape and (found - wanted).norm() < 1e-6 * wanted.norm()
    assert theirs.unpacked == 0 and ours.unpacked == 3, "rows of 96 begin inside blocks of 64"
