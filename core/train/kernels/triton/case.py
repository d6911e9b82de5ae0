"""What the ahead-of-time compiler is given of each kernel module: launches at the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    """Unique among all cases; names the rows in the table of compiled kernels."""
    launch: Callable[[], object]
    """Calls a module's public function on tensors of the meta device, so that what is compiled is what a run would
    compile: signature, alignment and launch settings are those that the launch itself arrives at."""
