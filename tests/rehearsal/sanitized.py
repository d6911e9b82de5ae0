"""`python -m tests.rehearsal.sanitized`: what torch's CUDA sanitizer says of the transfer layer, as one line of JSON.

The sanitizer keeps track of which stream last touched a tensor's address, and of what each stream has waited for. It
finds a race by the order that a program asks for, whatever order it runs in. Each piece of the layer is run as it is,
without the waits before its copies, and without the waits for them. After an error the sanitizer's process is in no
state to go on, so each run has a child of its own.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False  # what asks for devices cannot be forked
import torch.cuda._sanitizer as sanitizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from core.train.memory.offload.activations import ActivationOffload  # noqa: E402
from core.train.memory.streaming.block_source import HostBlocks  # noqa: E402
from core.train.memory.streaming.blocks import lay_out  # noqa: E402
from core.train.memory.streaming.prefetch_cache import CacheSlot, PrefetchCache, SlotFiller  # noqa: E402
from core.train.memory.transfer.transfer import Event, StagedTransfer, Transfer  # noqa: E402

torch.cuda.is_available = is_available
GPU = torch.device("cuda", 0)
ENDS = ("clean", "race", "broken")
"""By exit code of a child; broken: another error."""


def optimizer(changed: bool = False) -> None:
    """A gradient goes out, and a weight comes back. `changed`: the gradient is written into behind its event."""
    transfer = StagedTransfer(GPU, 1 << 16, pinned=True, field="x")
    gradient, weight, host = torch.ones(5000, device=GPU) * 2, torch.zeros(5000, device=GPU), torch.empty(5000)
    after = transfer.computed()
    if changed:
        gradient.mul_(3)
    for place, piece in transfer.fetch(gradient, after=after):
        host[place] = piece
    transfer.send(host, weight, after=transfer.computed())
    transfer.wait(transfer.copied())
    weight.sum()
    transfer.close()


def blocks() -> None:
    """Five blocks pass through three slots, forward and back."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2
    )  # fmt: skip
    found = lay_out(LlamaForCausalLM(config).requires_grad_(False))
    sizes = [block.nbytes for block in found]
    source = HostBlocks(found, pinned=True)
    slots = [CacheSlot(torch.zeros(max(sizes), dtype=torch.uint8, device=GPU)) for _ in range(3)]
    cache = PrefetchCache(slots, sizes, SlotFiller(GPU, source, max(sizes), pinned=True))
    for block in [*range(5), *reversed(range(5))]:
        slot = cache.take(block)
        cache.ahead([block + 1, block + 2] if block < 3 else [block - 1])
        slot.buffer.float().sum()
    cache.close()
    source.close()


def activations() -> None:
    """Six inputs of blocks go out, and come back in reverse order."""
    store = ActivationOffload(GPU)
    x, kept = torch.ones(64, 256, device=GPU), []
    for _ in range(6):
        x = x * 2
        kept.append(store.put(x))
    del x
    for each in reversed(kept):
        store.get(each).sum()
    kept.clear()
    store.close()


def verdict(what: Callable[[], None], **changed: Any) -> str:
    """How a child ends that runs this with other methods of Transfer."""
    if not (child := os.fork()):
        for name, method in changed.items():
            setattr(Transfer, name, method)
        end = "clean"
        try:
            what()
            torch.cuda.synchronize()
        except sanitizer.CUDASanitizerErrors:
            end = "race"
        except BaseException:
            traceback.print_exc()
            end = "broken"
        os._exit(ENDS.index(end))
    return ENDS[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def main() -> None:
    sanitizer.enable_cuda_sanitizer()
    copy = Transfer.copy

    def at_once(self: Transfer, source: torch.Tensor, target: torch.Tensor, *, after: Event) -> Event:
        return copy(self, source, target, after=None)

    found = {"gradient changed behind its event": [verdict(partial(optimizer, changed=True))]}
    for what in (optimizer, blocks, activations):
        found[what.__name__] = [
            verdict(what), verdict(what, copy=at_once), verdict(what, wait=lambda self, event: None)
        ]  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
