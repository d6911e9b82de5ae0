"""What a run computes with: its device, precision and attention, and the ranks beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from core.errors import SpecError
from core.hardware import selftest
from core.hardware.selftest import Choice, Verdict, choose
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.run.orders import RunOrder, SessionOrder
from core.spec.settled import method_of
from core.train.kernels.float32 import Route, quickest
from core.train.model.load import quiet
from core.train.model.placement import Placement, place
from core.train.model.record import Environment
from core.train.model.scaler import LossScaler
from core.train.ranks.group import ProcessGroup, join
from core.train.run import Run
from core.train.selftest.apply import apply_selftest

ALIKE = ("device", "arch", "precision", "weights_dtype", "attention", "tf32", "threads")
"""Entries of a placement that all ranks must share: else they would not compute the same sums."""


@dataclass(frozen=True, slots=True)
class Compute:
    placement: Placement
    choice: Choice
    """What the device's self-test leaves to choose from."""
    scaler: LossScaler | None
    """Scales the loss where products are made in fp16."""
    environment: Environment
    products: Route
    """What of a 16-bit run is computed through float32."""
    _about: dict[str, Any]

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        return self._about


def prepare_compute(run: Run) -> Compute:
    """Choose device, precision, attention and threads for this process, and bring the ranks together. SpecError when
    the job cannot be computed here."""
    quiet()
    spec = run.spec
    tried = None if run.order.selftest is None else Verdict.model_validate(run.order.selftest)
    choice = choose(tried)
    local_rank = 0 if run.rank_env is None else run.rank_env.local_rank
    placement = place(spec.resources, spec.training, method_of(spec), choice, local_rank=local_rank)
    run.ranks = join(run.rank_env, placement.device)
    ranks = check_ranks_match(run.ranks, run.order, placement)
    if placement.notice:
        run.notice("precision_fallback", placement.notice)
    for code, message in [*placement.notices, *apply_selftest(choice, spec, placement.precision)]:
        run.notice(code, message)
    if run.order.settled is not None:
        run.notice("method", run.order.settled["words"])
    environment, scaler = Environment(placement), LossScaler() if placement.precision == "fp16" else None
    samples = isinstance(spec.stage, RolloutStage) or isinstance(run.order, SessionOrder)
    products = route_of_products(placement, samples)
    environment.here["products"] = products.value
    about = {
        "environment": environment.here,
        "selftest": selftest.record(tried),
        "ranks": ranks,
        "precision": {
            "wanted": spec.training.precision,
            "compute": placement.precision,
            "weights": str(placement.weights).removeprefix("torch."),
            "trained": "float32",
            "products": environment.here["products"],
            "notice": placement.notice,
            "loss_scaler": None if scaler is None else scaler.about(),
        },
    }
    return Compute(placement, choice, scaler, environment, products, about)


def route_of_products(placement: Placement, samples: bool) -> Route:
    """What this processor computes quicker through float32. `samples`: forward passes stay as they are, so that sampled
    answers are scored by the kernels that sampled them. EFT_KERNELS=portable leaves torch's kernels as they are."""
    if os.environ.get("EFT_KERNELS") == "portable" or placement.device.type != "cpu" or placement.autocast is None:
        return Route.NOTHING
    route = quickest()
    return Route.GRADIENTS if samples and route is not Route.NOTHING else route


def check_ranks_match(ranks: ProcessGroup, order: RunOrder, placement: Placement) -> dict[str, Any] | None:
    """Describe for the run record how many ranks there are and what each computes on; None for a run of one. SpecError
    when they are not as many as the order says, or not alike."""
    if ranks.world != order.world_size:
        raise SpecError(
            f"this run is one of {order.world_size} ranks, and {ranks.world} were started; start it by "
            "`python -m core.train`, or with as many under torchrun",
            field="resources.gpus",
        )
    if ranks.world == 1:
        return None
    found = ranks.all_gather(placement.as_dict())
    for name in ALIKE:
        if any(one[name] != found[0][name] for one in found):
            values = ", ".join(str(one[name]) for one in found)
            raise SpecError(f"the GPUs of this job differ in {name} ({values})", field="resources.gpus")
    return {
        "world_size": ranks.world,
        "backend": getattr(ranks, "backend", None),
        "devices": [one["device_name"] for one in found],
    }
