"""What a run computes with: its device, precision and attention, and the ranks beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.hardware import selftest
from core.hardware.selftest import Choice, Verdict, choose
from core.spec.settled import method_of
from core.train.model.load import quiet
from core.train.model.placement import Placement, place
from core.train.model.record import Environment
from core.train.model.scaler import LossScaler
from core.train.ranks.group import join
from core.train.ranks.meet import meet
from core.train.run import Run
from core.train.selftest.apply import apply_selftest


@dataclass(frozen=True, slots=True)
class Compute:
    placement: Placement
    choice: Choice
    """What the device's self-test leaves to choose from."""
    scaler: LossScaler | None
    """Scales the loss where products are made in fp16."""
    environment: Environment
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
    local_rank = 0 if run.seat is None else run.seat.local_rank
    placement = place(spec.resources, spec.training, method_of(spec), choice, local_rank=local_rank)
    run.ranks = join(run.seat, placement.device)
    ranks = meet(run.ranks, run.order, placement)
    if placement.notice:
        run.notice("precision_fallback", placement.notice)
    for code, message in [*placement.notices, *apply_selftest(choice, spec, placement.precision)]:
        run.notice(code, message)
    if run.order.settled is not None:
        run.notice("method", run.order.settled["words"])
    environment, scaler = Environment(placement), LossScaler() if placement.precision == "fp16" else None
    about = {
        "environment": environment.here,
        "selftest": selftest.record(tried),
        "ranks": ranks,
        "precision": {
            "wanted": spec.training.precision,
            "compute": placement.precision,
            "weights": str(placement.weights).removeprefix("torch."),
            "trained": "float32",
            "notice": placement.notice,
            "loss_scaler": None if scaler is None else scaler.about(),
        },
    }
    return Compute(placement, choice, scaler, environment, about)
