"""The environment of a child: an allow-list, made in this one function. No secret but its job's own reaches a child."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from core import HOME
from core.hardware.discover import Gpu, visible_env
from core.hardware.tables import faults
from core.jobs.kinds import CHILDREN, Kind
from core.spec.run.standby import NETWORK, OFFLINE

ALLOWED = frozenset({"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"})
ALLOWED_DEVICE = re.compile(
    r"^(HSA|MIOPEN|HIPBLASLT|ROCBLAS|ROCM|AMD_LOG|NCCL|RCCL|TORCHINDUCTOR|TRITON|MALLOC)_[A-Z0-9_]+$"
)
"""Tuning of the drivers, of torch's compilers and of the C library's allocator (mallopt(3))."""
ALLOWED_MORE = frozenset(
    {"CUDA_HOME", *faults.ALLOCATOR_VARIABLES} | {name for fault in faults.FAULTS for name in fault.set}
)
ALLOWED_TO_TRACK = re.compile(r"^(MLFLOW_TRACKING|WANDB)_[A-Z0-9_]+$")
"""Where trackers are, and keys of the service for them."""
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|DATABASE_URL", re.IGNORECASE)


def child_environment(
    kind: Kind,
    *,
    gpu: Gpu | None,
    beside: Sequence[Gpu] = (),
    threads: int,
    root: Path,
    arch: str | None = None,
    cure: Mapping[str, str] | None = None,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables for one child, which sees `gpu` alone (None: no GPU), or with it the GPUs `beside` it of a job of
    several ranks: rank 0 computes on `gpu`, the others on those, in their order.

    Known faults of the GPU's architecture are routed around (core/hardware/tables/faults.py); `arch` names it for a
    spare, which sees no GPU yet. `cure`: variables without which the self-test of the device found a fault.

    `threads` is how many CPU threads it, or each of its ranks, may use, always set, because the order of floating point
    sums, and with it a resume to the bit, depends on their number.
    """
    source = os.environ if inherited is None else inherited
    allowed = ALLOWED | ALLOWED_MORE | (NETWORK if CHILDREN[kind].network else frozenset())
    environment = {
        name: value
        for name, value in source.items()
        if (name in allowed) or (ALLOWED_DEVICE.match(name) and not SECRET.search(name))
    }
    environment |= {
        "HOME": str(root / "home"),  # caches of compiled kernels outlive an attempt
        "HF_HOME": str(root / "home" / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if not CHILDREN[kind].network:
        environment |= dict.fromkeys(OFFLINE, "1")
    routed = faults.route(environment, arch or (gpu.arch if gpu is not None else "cpu"))
    return visible_env(routed.environment | dict(cure or {}), gpu, *beside)


def tracker_environment(tools: Path, root: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for the process of a tracker, whose library lies in `tools`. It needs the network, and sees no GPU."""
    source = os.environ if inherited is None else inherited
    proxies = {name for name in NETWORK if name.upper().endswith("_PROXY")}
    return {
        **{name: source[name] for name in source if name in ALLOWED | proxies or ALLOWED_TO_TRACK.match(name)},
        "HOME": str(root / "home"),
        "PYTHONPATH": os.pathsep.join((str(tools), str(HOME))),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }
