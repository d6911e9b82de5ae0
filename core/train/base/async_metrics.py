"""Figures of optimizer steps on their way from the device to the host, without the device being waited for.

A GPU works through a queue. A program that reads a figure (`float(tensor)`) stands still until the queue is empty, and
then the GPU stands still until the program has queued more. Here figures are copied behind their step, into pinned
memory, with an event behind the copy; they are read once that event has passed. A loop that goes on while one step is
still on its way always has work queued, and is never more than that one step ahead of the device.

On a CPU whatever was put is there at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

About = TypeVar("About")
Timestamp = float | torch.cuda.Event
"""A moment of a device's work."""


def timestamp(device: torch.device) -> Timestamp:
    """The moment at which the device has done what is queued so far; on a CPU: now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(earlier: Timestamp, later: Timestamp) -> float:
    """Waits for the later one, if it has not passed yet."""
    if isinstance(earlier, torch.cuda.Event):
        assert isinstance(later, torch.cuda.Event)
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1000.0
    assert isinstance(later, float)
    return later - earlier


@dataclass(frozen=True, slots=True)
class _Sent(Generic[About]):
    about: About
    names: tuple[str, ...]
    values: Tensor
    """float64 on the host, once `there` has passed"""
    there: torch.cuda.Event | None


class AsyncMetrics(Generic[About]):
    """First in, first out. `behind`: how many steps may be on their way after `ready`."""

    def __init__(self, device: torch.device, behind: int = 1) -> None:
        self.device = device
        self.behind = behind
        self._sent: deque[_Sent[About]] = deque()

    def put(self, about: About, figures: Mapping[str, Tensor]) -> None:
        """Scalars on the device, to be read later; `about` is handed back with them."""
        values = torch.stack([figure.detach().to(self.device, torch.float64) for figure in figures.values()])
        there = None
        if self.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values = host
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(torch.cuda.current_stream(self.device))
        self._sent.append(_Sent(about, tuple(figures), values, there))

    def ready(self) -> Iterator[tuple[About, dict[str, float]]]:
        """What has arrived, oldest first. Waits for the oldest while more than `behind` are on their way."""
        while self._sent:
            there = self._sent[0].there
            if there is not None and not there.query():  # type: ignore[no-untyped-call]
                if len(self._sent) <= self.behind:
                    return
                there.synchronize()
            yield self._take()

    def all(self) -> Iterator[tuple[About, dict[str, float]]]:
        """Everything that was put, oldest first; waits for it."""
        while self._sent:
            there = self._sent[0].there
            if there is not None:
                there.synchronize()
            yield self._take()

    def _take(self) -> tuple[About, dict[str, float]]:
        sent = self._sent.popleft()
        return sent.about, dict(zip(sent.names, sent.values.tolist(), strict=True))
