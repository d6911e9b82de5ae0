"""Messages of other libraries that are known and harmless, each silenced where it comes from; all others pass."""

from __future__ import annotations

import logging
import re
import warnings

HARMLESS = (
    # torchao brings kernels for GPUs and Python versions that are not here, and tries to load them all.
    ("torchao", r"^Failed to load \S*torchao/_C_\w+\S*\.so: "),
    # Two of its enums are registered with torch in a way that torch no longer needs.
    ("torch.utils._pytree", r"^<enum '(KernelPreference|ScaleCalculationMode)'> is an Enum subclass"),
    # bitsandbytes offers a kernel from a package that eft does not use.
    ("bitsandbytes.backends.cpu.ops", r"^Failed to load CPU gemm_4bit_forward from kernels-community"),
)
"""(name of the logger, beginning of the message)"""
WARNINGS = (
    # PEFT asks transformers under the old name.
    (FutureWarning, r"`is_gradient_checkpointing` is deprecated and will be removed"),
)


class _Known(logging.Filter):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.pattern == self.pattern

    def __hash__(self) -> int:
        return hash(self.pattern)


def hush() -> None:
    """Silence them in this process; calling it again changes nothing."""
    for name, pattern in HARMLESS:
        logging.getLogger(name).addFilter(_Known(pattern))
    for category, pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern, category=category)
