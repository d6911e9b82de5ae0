"""Packed formats, and the number of rows up to which a product reads a packed weight as it is."""

from __future__ import annotations

from typing import Literal

Format = Literal["nf4", "int8"]
FEW_ROWS = 8
"""Largest number of rows of x that are multiplied with the packed weight itself: their sums fit into registers. With
more, the matrix units of a BLAS are faster."""
