"""Singular vectors that are the same in every process."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_singular(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(U [rows, rank], S [rank], Vh [rank, columns]) of a matrix's `rank` largest singular values, in float32.

    On a GPU, torch's SVD is not the same in every process: of four that decomposed the same 14 weights on an H200
    (torch 2.11, cuSOLVER's Jacobi method), one came to other bits. The vectors are therefore those of the symmetric
    product with its transpose, in float64. They came to the same bits in both runs that were made there, and take an
    eighth of the time (2,048 x 2,048). Squaring halves the digits, so that float64 leaves those of float32.
    """
    if matrix.device.type != "cuda":
        u, s, vh = torch.linalg.svd(matrix.float(), full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank]
    return by_eigenvectors(matrix, rank)


def by_eigenvectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the eigenvectors of the smaller of the two products with the transpose."""
    wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.double().t() if wide else matrix.double()
    values, vectors = torch.linalg.eigh(tall.t() @ tall)
    right = vectors[:, -rank:].flip(1)
    scaled = tall @ right  # each column is a left vector times its singular value
    s = values[-rank:].flip(0).clamp(min=0).sqrt()
    left = scaled / s.clamp(min=torch.finfo(torch.float32).tiny)
    u, v = (right, left) if wide else (left, right)
    return u.float(), s.float(), v.t().float()
