"""What is installed beside torch and decides what a GPU computes: read from files, nothing is imported."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import Distribution
from pathlib import Path

LIBRARIES = re.compile(
    r"^(triton|triton-rocm|pytorch-triton(-rocm)?|torchao|flash-attn.*|aiter|amd-aiter|amd-torch.*|rocm.*|nvidia-.*|cuda-.*)$"
)
"""Packages beside torch whose version a result may depend on. ROCm comes as wheels of its own (`rocm-sdk-core`,
`rocm-sdk-libraries-gfx110x-all`, `amd-torch-device-gfx1100` …), CUDA as `nvidia-cublas` and its like: both are renewed
without torch."""


def libraries() -> dict[str, str]:
    """Those of LIBRARIES that are installed, by name."""
    found: dict[str, str] = {}
    # Chosen by the names of their folders: reading the metadata of all packages takes 50 ms. An egg-info is what
    # `setup.py develop` leaves, by which AITER's README installs it.
    for place in map(Path, sys.path):
        for folder in (*place.glob("*.dist-info"), *place.glob("*.egg-info")):
            name = folder.stem.partition("-")[0].lower().replace("_", "-")
            if LIBRARIES.match(name) and name not in found:
                found[name] = Distribution.at(folder).version
    return dict(sorted(found.items()))


def torch_version_file() -> str | None:
    """torch's version.py: version, commit, and the HIP, ROCm or CUDA that it was built with. None: no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return (Path(spec.origin).parent / "version.py").read_text()


def torch_build() -> str | None:
    """`ROCm 7.2`, `CUDA 13.0` or `CPU`; None when torch is not installed."""
    text = torch_version_file()
    return None if text is None else build_of(text)


def build_of(version_file: str) -> str:
    """What a torch with this version.py is built for."""
    for name, words in (("hip", "ROCm"), ("cuda", "CUDA")):
        match = re.search(rf"^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", version_file, re.MULTILINE)
        if match:
            return f"{words} {'.'.join(match[1].split('.')[:2])}"
    return "CPU"
