"""One reading of a GGUF file for one conversion.

transformers opens the file anew for the configuration, the tokenizer and the weights. gguf's reader takes each of its
values, a vocabulary's texts among them, as a slice of a numpy.memmap, which costs ten times a slice of an array. And
the table of tensor names, which depends on architecture and number of blocks alone, is made once for each module.
Together they were three quarters of a small model's conversion. What they answer stays the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def read_once() -> Iterator[None]:
    """Within, gguf answers the same question once. For the process's one conversion: what others ask meanwhile is
    answered from the same memory."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Holds the mapped file as a plain array."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    gguf.GGUFReader = functools.cache(Reader)  # type: ignore[misc, assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(gguf, name, value)
