"""What a self-test's verdict holds for: a ROCm that was renewed beside torch is another machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from core.hardware.device_mask import Gpu
from worker.gpus.selftest_runner import SelfTestDevice, key_of

CARD = Gpu(0, "amd", "GPU-00c0ffee", "0000:03:00.0", "made up", "gfx1100", 1 << 30)
TORCH = "__version__ = '2.13.0+rocm7.2'\nhip = '7.2.26015'\nrocm = '7.2.0'\n"


@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        "rocm_sdk_core-7.2.1.dist-info",
        "rocm_sdk_libraries_gfx110x_all-7.2.1.dist-info",
        "nvidia_cublas-13.1.0.dist-info",
        "amd_aiter-0.1.5.egg-info",
        TORCH.replace("26015", "26043"),
    ],
    ids=["nothing", "runtime", "libraries", "cublas", "developed", "torch"],
)
def test_a_verdict_ends_with_the_libraries_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Real packages' metadata and a real version.py, in a folder where this interpreter finds them first."""

    def install(name: str) -> None:
        stem, _, kind = name.rpartition(".")
        package, _, number = stem.rpartition("-")
        (tmp_path / name).mkdir()
        (tmp_path / name / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n"
        )

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # as in a worker, which has none imported
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(TORCH)
    for name in (
        "rocm_sdk_core-7.2.0.dist-info",
        "rocm_sdk_libraries_gfx110x_all-7.2.0.dist-info",
        "click-9.dist-info",
    ):
        install(name)
    card = SelfTestDevice("0", CARD, {})
    before = key_of(card)
    assert before == key_of(SelfTestDevice("1", CARD, {})), "of two workers"
    assert before == key_of(SelfTestDevice("0", CARD, {"TORCHINDUCTOR_CACHE_DIR": "/tmp/x"})), (
        "no part is compiled by it"
    )
    assert before != key_of(SelfTestDevice("0", CARD, {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}))
    if change == "nothing":
        install("somebody_else-2.0.dist-info")
        assert key_of(card) == before
        return
    if change.startswith("__version__"):
        (tmp_path / "torch" / "version.py").write_text(change)
    else:
        old = tmp_path / change.replace("7.2.1", "7.2.0")
        if old.exists():
            shutil.rmtree(old)
        install(change)
    assert key_of(card) != before
