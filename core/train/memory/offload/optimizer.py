"""Optimizer offload: what is trained has its float32 weights, gradients and optimizer state in host memory, and is
updated there by torch's own CPU kernel (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840; here every step is exact).

    backward   each gradient leaves the device as soon as it is whole (a post-accumulate hook), and is added up in
               float32 on the host
    step       norm and clipping over the host's gradients; then unit after unit, in the order in which the next forward
               needs them, a thread steps the host's weights and copies them to the device in the device's dtype
    forward    each block waits for its own update, and for no other

A unit is a block of the model; what is outside of the blocks is updated first, the output head last. The norm needs all
gradients and the first block the norm, so that much of a step no exact update can hide.

The engine works on the host's parameters (`parameters`): a checkpoint holds what the one of a resident run holds, and
each can be gone on with as the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import ModelError
from core.plan.constants import PIECE_BYTES
from core.plan.optimizers import TrainedTensor, state_of
from core.spec.axes.optimizer import AdamW, Optimizer
from core.train.base.out_of_memory import is_out_of_memory
from core.train.memory.available import available_bytes
from core.train.memory.narrow_dtypes import narrow_parameters
from core.train.memory.offload.units import HEAD, OUTSIDE, Unit, block_name, blocks_of, output_head, units_of
from core.train.memory.transfer.transfer import Event, StagedTransfer
from core.train.optim.groups import hidden_matrices

FIELD = "memory.offload_optimizer"
_ADAMW = AdamW()


class OptimizerOffload:
    """See the module; `core.train.optim.updates.UpdateStrategy` says what the engine asks of it.

    It works on the model that it is given, which may still be on the host: what is trained goes to `device`, all else
    stays where it is. Hooks lie on the model until `hand_back` or `close`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        optimizer: Optimizer = _ADAMW,
        narrow: torch.dtype | None = None,
        pinned: bool = True,
        beside: bool | None = None,
    ) -> None:
        """`narrow`: dtype of the weights of linear layers on the device, where the result is the same
        (narrow_dtypes.py); None: float32. `beside`: update in a thread while the device goes on; None: on a GPU alone,
        since a CPU has no cores free for it.

        ModelError when the host has no memory for it, PinnedRefused when the system refuses to lock it.
        """
        if device.type == "cuda" and device.index is None:  # the thread would not know which
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._model = model
        self._pinned = pinned and device.type == "cuda"
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden = hidden_matrices(model)
        self._host_bytes = state_of(optimizer).trained(
            TrainedTensor(tuple(p.shape), name in hidden) for name, p in trained.items()
        )
        blocks = blocks_of(model)
        narrowed = set() if narrow is None else narrow_parameters(model, blocks)
        self.narrow = None if narrow is None else str(narrow).removeprefix("torch.")
        self._check_room(list(trained.values()))
        self._failed: BaseException | None = None
        self._lock = threading.Condition()
        self._under_way = 0
        """Gradients that the device holds until they are copied, bytes."""
        self._spare: dict[nn.Parameter, Tensor] = {}
        """Gradient buffers between two windows: fresh ones would cost page faults."""
        self._leaving: list[Future[None]] = []
        with self._in_words():
            masters = {p: _master(p) for p in trained.values()}
            for p in trained.values():
                p.data = masters[p].detach().to(device, narrow if p in narrowed else torch.float32, copy=True)
        self.parameters: Mapping[str, nn.Parameter] = {name: masters[p] for name, p in trained.items()}
        self.narrowed = sum(p.numel() for p in trained.values() if p in narrowed)
        self.units = units_of(model, blocks, masters)
        self._at_once = max((unit.nbytes for unit in self.units if unit.name not in (OUTSIDE, HEAD)), default=0)
        with self._in_words():
            self._transfer = StagedTransfer(device, PIECE_BYTES, pinned=pinned, field=f"{FIELD}.pinned")
        if beside is None:
            beside = device.type == "cuda"
        threads = torch.get_num_threads()  # the bits of a step depend on it: those of the thread that trains
        self._thread = ThreadPoolExecutor(1, "eft-offload", partial(_begin, device, threads))
        if beside or device.type == "cuda":
            self._thread.submit(int).result()  # fails here if the thread cannot start: a backward would wait for it
        self._beside = beside
        self._hooks = [*self._gradient_hooks(masters), *self._waiting_hooks(model, blocks)]

    # --- gradients leave ---------------------------------------------------------------------------------

    def _gradient_hooks(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[Any]:
        for parameter, master in masters.items():
            hook = partial(self._leave, master)
            yield parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _leave(self, master: nn.Parameter, parameter: Tensor) -> None:
        """The gradient of a parameter is whole: it is the host's from here on."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # a function without a gradient for this input
            return
        if self.device.type != "cuda":
            with self._in_words():
                self._add(master, gradient, None)
            return
        gradient = gradient.contiguous()  # before the event: the thread's copy would not be behind it
        nbytes, after = gradient.nbytes, self._transfer.computed()
        with self._lock:  # more than a block's would be the memory that is to be saved
            self._lock.wait_for(lambda: not self._under_way or self._under_way + nbytes <= self._at_once)
            self._under_way += nbytes
        held = [gradient]
        del gradient
        self._leaving.append(self._thread.submit(self._take, master, held, after))

    def _take(self, master: nn.Parameter, held: list[Tensor], after: Event) -> None:
        nbytes = held[0].nbytes
        try:
            with self._in_words():
                self._add(master, held[0], after)
        finally:
            held.clear()  # copied: the device's memory may be used again
            with self._lock:
                self._under_way -= nbytes
                self._lock.notify()

    @torch.no_grad()
    def _add(self, master: nn.Parameter, gradient: Tensor, after: Event) -> None:
        if master.grad is None and gradient.device == master.device and gradient.dtype == master.dtype:
            master.grad = gradient
            return
        first = master.grad is None
        if first:
            spare = self._spare.pop(master, None)
            master.grad = torch.empty_like(master) if spare is None else spare
        total = master.grad.view(-1)  # type: ignore[union-attr]
        for where, what in self._transfer.fetch(gradient.reshape(-1), after=after):
            if first:
                total[where].copy_(what)
            else:
                total[where].add_(what)

    # --- updates -----------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        leaving, self._leaving = self._leaving, []
        wait(leaving)  # all, before the first error is raised: no gradient may arrive in the next window
        for one in leaving:
            one.result()
        for unit in self.units:
            self._wait(unit)
        if self._failed is not None:
            raise self._failed

    def supports_found_inf(self, optimizer: torch.optim.Optimizer, broken: Tensor) -> bool:
        return False

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
        self.synchronize()
        gradients = {master: master.grad for master in self.parameters.values() if master.grad is not None}
        for master in gradients:
            master.grad = None  # each unit gets its own back: an optimizer steps what has a gradient
        after = self._transfer.computed()
        for unit in self.units:
            step = partial(self._update, unit, optimizer, gradients, norm, max_norm, after)
            if self._beside:
                unit.update = self._thread.submit(step)
            else:
                step()

    def _update(
        self,
        unit: Unit,
        optimizer: torch.optim.Optimizer,
        gradients: dict[nn.Parameter, Tensor],
        norm: Tensor,
        max_norm: float | None,
        after: Event,
    ) -> None:
        if self._failed is not None:
            raise self._failed
        mine = [(p, master) for p, master in unit.members if master in gradients]
        try:
            with self._in_words():
                for _, master in mine:
                    master.grad = gradients.pop(master)
                if max_norm is not None:
                    torch.nn.utils.clip_grads_with_norm_([master for _, master in mine], max_norm, norm)
                optimizer.step()
                for parameter, master in mine:
                    self._put_by(parameter, master)
                    self._send(parameter, master, after)
            unit.sent = self._transfer.copied()
        except BaseException as error:
            self._failed = error
            raise

    def _put_by(self, parameter: nn.Parameter, master: nn.Parameter) -> None:
        """Keep the buffer of its gradient, unless the next backward brings one that can be taken as it is."""
        if master.grad is not None and (parameter.device, parameter.dtype) != (master.device, master.dtype):
            self._spare[master] = master.grad
        master.grad = None

    def _send(self, parameter: nn.Parameter, master: nn.Parameter, after: Event) -> None:
        self._transfer.send(master.detach().view(-1), parameter.detach().view(-1), after=after)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Also what an error in a hook has left behind: the next window starts from the same weights."""
        for one in self._leaving:
            one.exception()
        self._leaving = []
        self.synchronize()
        for unit in self.units:
            for parameter, master in unit.members:
                parameter.grad = None
                self._put_by(parameter, master)

    def refresh_weights(self) -> None:
        self.synchronize()
        after = self._transfer.computed()
        with torch.no_grad():
            for unit in self.units:
                for parameter, master in unit.members:
                    self._send(parameter, master, after)
                unit.sent = self._transfer.copied()
                self._transfer.wait(unit.sent)

    # --- the next pass -----------------------------------------------------------------------------------

    def before_pass(self) -> None:
        self._wait(self.units[0])

    def _waiting_hooks(self, model: nn.Module, blocks: list[nn.Module]) -> Iterator[Any]:
        yield model.register_forward_pre_hook(lambda *_: self.before_pass())
        by_name = {unit.name: unit for unit in self.units}
        for number, block in enumerate(blocks):
            if (unit := by_name.get(block_name(number))) is not None:
                yield block.register_forward_pre_hook(partial(_waits, self._wait, unit))
        if (head := by_name.get(HEAD)) is not None:
            # Not every loss calls the head: some read its weight, once the last block has computed.
            yield blocks[-1].register_forward_hook(partial(_waits, self._wait, head))
            yield output_head(model).register_forward_pre_hook(partial(_waits, self._wait, head))

    def _wait(self, unit: Unit) -> None:
        if unit.update is None:
            return
        unit.update.result()
        unit.update = None
        self._transfer.wait(unit.sent)

    # --- the end -----------------------------------------------------------------------------------------

    def hand_back(self) -> None:
        """The model's trained parameters are the host's, in float32, and nothing of this is left on it. A model of
        which the device held less than that is on the host from then on."""
        self.synchronize()
        self.close()
        if self.narrowed:
            for unit in self.units:
                for parameter, master in unit.members:
                    parameter.data = master.detach()
            self._model.to("cpu")

    def close(self) -> None:
        """Waits for what is under way. Afterwards the model is an ordinary one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._thread.shutdown(wait=True)
        self._transfer.close()
        self._spare = {}

    def about(self) -> dict[str, Any]:
        """For the run record."""
        trained = sum(master.numel() for master in self.parameters.values())
        return {
            "where": "host",
            "pinned": self._pinned,
            "units": len(self.units),
            "beside": self._beside,
            "trained": trained,
            "narrowed": self.narrowed,
            "narrow_dtype": self.narrow if self.narrowed else None,
            "host_bytes": self._host_bytes,
        }

    def _check_room(self, trained: list[nn.Parameter]) -> None:
        self._bytes_each = round(self._host_bytes / max(1, sum(p.numel() for p in trained)))
        new = self._host_bytes - sum(4 * p.numel() for p in trained if _serves(p))
        if self.device.type == "cpu":
            new += sum(p.nbytes for p in trained)  # what the device is to hold lies there, too
        if (free := available_bytes()) is not None and free < new:
            raise self._no_room(f"{-(-new >> 20)} MiB are needed, and {free >> 20} are free")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Raise ModelError where the host runs out of memory: smaller batches would leave none of this free."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
                raise
            raise self._no_room("it was refused more") from error

    def _no_room(self, why: str) -> ModelError:
        return ModelError(
            f"this box has no memory left for what the optimizer keeps in it, {self._bytes_each} bytes for every "
            f"trained parameter ({why}): leave `{FIELD}` out if the device has room, or train adapters "
            "(`method: lora`)",
            field=FIELD,
            code="offload_does_not_fit",
        )


def _waits(wait: Callable[[Unit], None], unit: Unit, *_: Any) -> None:
    wait(unit)


# --- host memory -----------------------------------------------------------------------------------------


def _serves(parameter: Tensor) -> bool:
    """Whether the host's weight can be the tensor that is there."""
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if _serves(parameter):
        return nn.Parameter(parameter.detach())
    return nn.Parameter(parameter.detach().to("cpu", torch.float32, memory_format=torch.contiguous_format))


def _begin(device: torch.device, threads: int) -> None:
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
