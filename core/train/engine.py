"""The engine: the primitives every stage is a recipe over.

    forward → backward → (forward → backward …) → step        generate, logprobs

It holds model (with adapters), optimizer, schedule and whatever else is registered as a stateful part (the data cursor,
the counters of a run). All of it can be saved after any `backward` and restored in another process to the bit
(core/train/checkpoint/engine_state.py).

It knows nothing of files of rows, events or workers: SFT, preference stages and step sessions call the same verbs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from core.errors import EftError
from core.plan.constants import PROMPT_TOKENS
from core.spec.axes.optimizer import Optimizer
from core.train.attention.exact import exact_operators
from core.train.batch import Batch
from core.train.generation import fallback
from core.train.generation.generator import SlotGenerator
from core.train.generation.products import few_rows
from core.train.generation.sampling import Completion, Key, SamplingParams, Stops
from core.train.generation.trial import SlotTrial, try_slots
from core.train.linalg.norm import total_norm
from core.train.model.load import count_parameters
from core.train.model.scaler import LossScaler
from core.train.optim import state as optimizer_state
from core.train.optim.groups import ParameterGroup, decay_groups
from core.train.optim.optimizers import build_optimizer
from core.train.optim.updates import DeviceUpdates, UpdateStrategy
from core.train.policy import PolicyModel
from core.train.ranks.group import SINGLE_PROCESS, ProcessGroup
from core.train.stage import Loss, LossFunction, Totals, nothing


class Diverged(EftError):
    """Loss or gradient is no longer a finite number."""

    code = "diverged"
    status = 422


T = TypeVar("T")
REMEDY = "lower optimizer.learning_rate, raise schedule.warmup_ratio or set training.precision to fp32"


Schedule = Callable[[int], float]
"""Factor on the peak learning rate at a 0-based optimizer step."""


class Stateful(Protocol):
    """A part of a run that is saved and restored with the engine, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    grad_norm: Tensor
    """Global L2 norm before clipping: a scalar on the device, not waited for."""
    learning_rate: float
    skipped: bool = False
    """fp16 overflowed: no weight has changed, the norm is no finite number, and the schedule waits."""


class Engine:
    """See the module. `autocast` is the compute dtype of matrix products, or None to compute in the weights' own.

    `max_grad_norm` clips the global norm; None does not clip. Parts registered in `parts` are saved and loaded too.
    `scaler` scales the loss of a run in fp16: gradients that wait for their step are scaled by it. `updates`: where
    what is trained is kept and updated; None: in the model itself. The optimizer is one over `updates.parameters`.

    Of several `ranks` each has an engine like this one; `step`, saving and loading are what they do together. Between
    two steps gradients are a rank's own: nothing is sent after a `backward`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = 1.0,
        pad_token_id: int = 0,
        parts: Mapping[str, Stateful] | None = None,
        scaler: LossScaler | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        updates: UpdateStrategy | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.device = device
        self.autocast = autocast
        self.max_grad_norm = max_grad_norm
        self.pad_token_id = pad_token_id
        self.parts: dict[str, Stateful] = dict(parts or {})
        self.scaler = scaler
        self.ranks = ranks
        self.steps = 0
        """Optimizer steps done."""
        self.micro_steps = 0
        """Backward passes since the last optimizer step."""
        self.updates: UpdateStrategy = DeviceUpdates(model) if updates is None else updates
        self._trained = self.updates.parameters
        inference = WeakMethod(self.inference)  # no reference back: a dropped engine frees its model at once

        def infer() -> AbstractContextManager[nn.Module]:
            found = inference()
            assert found is not None, "the engine of this policy is gone"
            return found()

        self.policy = PolicyModel(model, infer, autocast=autocast, scaler=scaler)
        """The model as stages see it."""
        self._base_learning_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._peak = float(optimizer.defaults.get("lr", self._base_learning_rates[0]))
        """Learning rate of parameters without a factor of their own."""
        self._slot_trial: SlotTrial | None = None
        self._broken = torch.zeros((), dtype=torch.int64, device=device)
        """The first step whose loss or gradient was no finite number; 0: none. On the device, which decides by it."""

    @property
    def trained_parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer steps, by its name in the model: parameters of the model, or those kept for them."""
        return self._trained

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        trained = sum(parameter.numel() for parameter in self._trained.values())
        return {"parameters": {"total": count_parameters(self.model), "trained": trained}}

    # --- the primitives ------------------------------------------------------------------------------

    def forward(self, batch: Batch, loss_function: LossFunction, totals: Totals) -> Loss:
        """Compute the loss of a batch of a step with these totals, in training mode (dropout draws from the torch
        generator). A batch without labels (a rank's that has no rows left) weighs nothing."""
        with self.training_pass():
            loss = loss_function(self.policy, batch.to(self.device), totals)
        if batch.label_tokens:
            return loss
        return Loss(loss.total * 0.0, {name: value * 0.0 + nothing(name) for name, value in loss.sums.items()})

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """The model in training mode, in the precision of the run."""
        self.policy.head()
        self.model.train()
        self.updates.before_pass()
        with self._compute():
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar to those already there."""
        scaled = loss if self.scaler is None else loss * self.scaler.scale
        scaled.backward()  # type: ignore[no-untyped-call]
        self.micro_steps += 1

    def step(self, watch: Tensor | None = None) -> StepResult:
        """Sum the gradients over the ranks, clip, update, advance the schedule, drop the gradients; the device is not
        waited for.

        When the gradient, or `watch` (a scalar, such as the loss, the same on all ranks), is not finite, the weights
        stay as they are, in this step and in all that follow, and `check` raises Diverged from then on. An update
        that cannot be skipped on the device by itself (that of torch's fused optimizers can) is checked here.

        With a loss scaler the norm is waited for, since an overflow changes what comes next: the step is skipped and
        counts, its rows are not seen again, and the schedule stays where it is (as accelerate does it for
        `transformers.Trainer`).
        """
        self.updates.synchronize()
        self.ranks.sum_gradients(self._trained)
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale_(gradients)
        norm = total_norm(gradients)
        factor = self.schedule(self.steps - (0 if self.scaler is None else self.scaler.skipped))
        if self.scaler is not None and self._overflowed(norm, watch, self.scaler):
            self.zero_grad()
            self.steps += 1
            return StepResult(norm, self._peak * factor, skipped=True)
        self._note(norm if watch is None else norm + watch.detach())
        for group, base in zip(self.optimizer.param_groups, self._base_learning_rates, strict=True):
            optimizer_state.set_learning_rate(group, base * factor)
        self.updates.update(self.optimizer, norm, self.max_grad_norm)
        self.micro_steps = 0
        self.steps += 1
        return StepResult(norm, self._peak * factor)

    def _overflowed(self, norm: Tensor, watch: Tensor | None, scaler: LossScaler) -> bool:
        """Whether this step is to be skipped, and tell the scaler how it went. With a scale as low as it goes, or one
        loss after the other that is no number, it is no overflow any more: the run has diverged."""
        if math.isfinite(float(norm if watch is None else norm + watch.detach())):
            scaler.update(overflowed=False)
            return False
        loss_is_finite = watch is None or math.isfinite(float(watch.detach()))
        if not scaler.helps(loss_is_finite=loss_is_finite):
            return False
        scaler.update(overflowed=True, loss_is_finite=loss_is_finite)
        return True

    def _note(self, sentinel: Tensor) -> None:
        """Let the optimizer skip its update from the first `sentinel` on that is no finite number."""
        self._broken = torch.where((self._broken == 0) & ~sentinel.isfinite(), self.steps + 1, self._broken)
        if not self.updates.supports_found_inf(self.optimizer, self._broken):
            self.check()

    def check(self) -> None:
        """Raises Diverged, with its number, when a step was not finite. Waits for the device."""
        if broken := int(self._broken):
            raise Diverged(
                f"loss or gradient were no finite numbers any more at step {broken}; {REMEDY}",
                field="optimizer.learning_rate",
            )

    def zero_grad(self) -> None:
        """Drop the gradients: the accumulation window starts anew."""
        self.updates.zero_grad(self.optimizer)
        self.micro_steps = 0

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The model without gradients and dropout; leaves mode and random numbers as they were."""
        training = self.model.training
        devices = [self.device] if self.device.type == "cuda" else []
        self.updates.before_pass()
        self.model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad(), self._compute():
                yield self.model
        finally:
            self.model.train(training)

    def evaluate(self, batch: Batch, function: Callable[[PolicyModel, Batch], T]) -> T:
        """Call a function with the model and a batch, without gradients and dropout."""
        self.policy.head()
        with self.inference():
            return function(self.policy, batch.to(self.device))

    def logprobs(self, batch: Batch) -> list[Tensor]:
        """Log-probability of every label under the model: one float32 vector a row, of its labelled tokens in order."""
        values = self.evaluate(batch, PolicyModel.logprobs)
        return list(torch.split(values, batch.label_counts()))

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Sequence[Key]],
        params: SamplingParams,
        *,
        slots: int,
        prompt_tokens: int = PROMPT_TOKENS,
        decode: Callable[[Sequence[int]], str] | None = None,
        between: Callable[[], None] = lambda: None,
        most: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Answer each prompt (token ids, not empty) once for each of its keys, `slots` answers at a time.

        An answer is a function of the weights, the prompt and its key; the model's own generation_config is ignored, be
        it a repetition penalty, a minimum length or forced tokens. `prompt_tokens`: tokens of one pass over prompts at
        most, padding counted. `decode` makes text of tokens, for stop strings. `between` runs before each pass and may
        raise to stop. `most`: tokens of an answer to each prompt at most, where that is less than the parameters say.
        """
        stops = Stops(params, decode)
        limits = [params.max_new_tokens] * len(prompts) if most is None else most
        why = self.without_slots(max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)))
        with self.inference() as model, few_rows(model, self.device) if self.policy.exact is None else nullcontext():
            if why is None:
                generator = SlotGenerator(
                    model,
                    self.policy.head(),
                    params,
                    stops,
                    slots=slots,
                    prompt_tokens=prompt_tokens,
                    device=self.device,
                    exact=self.policy.exact,
                )
                return generator.complete(prompts, keys, between, limits)
            found = fallback.complete(
                model,
                prompts,
                keys,
                params,
                stops,
                slots=slots,
                pad_token_id=self.pad_token_id,
                device=self.device,
                between=between,
            )
            return [[one.cut(limit) for one in mine] for mine, limit in zip(found, limits, strict=True)]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        stop_token_ids: Sequence[int] = (),
        between: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Continue each prompt once, all at a time; greedy at temperature 0. The stop token is left out. `numbers`:
        what tells the draws of the prompts apart under one seed; default: their places."""
        params = SamplingParams(max_new_tokens, temperature, top_p, stop_token_ids=tuple(stop_token_ids))
        keys = [[(seed, number)] for number in (range(len(prompts)) if numbers is None else numbers)]
        found = self.complete(prompts, keys, params, slots=len(prompts), between=between)
        stops = set(stop_token_ids)
        return [[token for token in answer.tokens if token not in stops] for (answer,) in found]

    def without_slots(self, room: int) -> str | None:
        """Why answers that take up to `room` tokens with their prompts are generated by transformers' own loop, in
        batches padded on the left; None: they are generated in slots. Found by trying, at the first call."""
        if self._slot_trial is None:
            head = self.policy.head()
            with self.inference() as model:
                computed = self.autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
                self._slot_trial = try_slots(model, head, computed, self.device)
        return self._slot_trial.why_not(room)

    @contextmanager
    def _compute(self) -> Iterator[None]:
        auto = nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)
        with auto, nullcontext() if self.policy.exact is None else exact_operators(self.device):
            yield

    def continue_at(self, steps: int, micro_steps: int) -> None:
        """Count on from there, after a state was restored in which nothing had diverged."""
        self.steps, self.micro_steps = steps, micro_steps
        self._broken.zero_()


def build_engine(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule = lambda step: 1.0,
    *,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    max_grad_norm: float | None = 1.0,
    pad_token_id: int = 0,
    parts: Mapping[str, Stateful] | None = None,
    scaler: LossScaler | None = None,
    ranks: ProcessGroup = SINGLE_PROCESS,
    updates: UpdateStrategy | None = None,
    groups: Sequence[ParameterGroup] | None = None,
) -> Engine:
    """An engine over all of `model` that requires a gradient, with the optimizer of the spec. The model is built and on
    `device` (default: the CPU; a GPU without a number: the current one); `groups` are those of its method, the rest is
    as `Engine` takes it."""
    updates = DeviceUpdates(model) if updates is None else updates
    return Engine(
        model,
        build_optimizer(optimizer, decay_groups(model) if groups is None else groups, updates.parameters),
        schedule,
        device=torch.empty(0, device=device).device,  # with its number, as tensors have it
        autocast=autocast,
        max_grad_norm=max_grad_norm,
        pad_token_id=pad_token_id,
        parts=parts,
        scaler=scaler,
        ranks=ranks,
        updates=updates,
    )
