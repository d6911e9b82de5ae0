"""Where a run's blocks are to lie: the plan of the job, from the headers of the model's files, against what is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from core.plan.device import Device
from core.plan.memory.plan import need
from core.plan.models.shape import ScorerShape, Shape
from core.plan.stream import Decision, Free, decide
from core.spec.axes.runtime import AutoStream
from core.spec.job import JobSpec
from core.spec.run.orders import RewardModelFolder
from core.train.kernels.interface import backend_for
from core.train.memory.available import available_bytes
from core.train.model.placement import Placement


def choose_stream(
    spec: JobSpec,
    folder: Path,
    placement: Placement,
    longest: int,
    memory_bytes: int | None = None,
    reward_models: Sequence[RewardModelFolder] = (),
) -> Decision:
    """How this run holds its blocks, settled before anything is loaded. `longest`: tokens of its longest row.
    `memory_bytes`: what it may count on where device and host are one memory; None: what is free. `reward_models`:
    what is loaded beside the model."""
    here = _device(placement, memory_bytes)
    wanted = None
    if isinstance(spec.memory.stream, AutoStream):
        scorers = [ScorerShape(one.reward, Shape.of_folder(Path(one.model_dir)), one.spec) for one in reward_models]
        shape = replace(Shape.of_folder(folder), scorers=tuple(scorers))
        wanted = need(spec, shape, longest=longest, device=here)
    return decide(spec.memory.stream, wanted, Free(device=here.memory, host=here.host, one_memory=here.one_memory))


def _device(placement: Placement, most: int | None) -> Device:
    """With what is free on it now."""
    host = available_bytes()
    if placement.device.type == "cuda":
        free = torch.cuda.mem_get_info(placement.device)[0]
        parts = backend_for(placement.device, "block") != "portable"
        return Device("gpu", placement.arch, memory=free, host=host, products=placement.precision, parts=parts)
    known = [count for count in (host, most) if count is not None]
    return Device("cpu", memory=min(known, default=None), host=host, products=placement.precision)
