"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): a linear layer in a few numbers, such that its outputs change least.

Columns are rounded one after the other, those of the largest inputs first, and what a column loses is made up for by
those that are still to come. Scales are chosen before, one for each group of neighbouring inputs, so that the order
does not show in the files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.train.export.packed.layout import Grid

DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal."""
BLOCK = 128
"""Columns whose errors are gathered before the rest is corrected."""


def quantise(weight: Tensor, hessian: Tensor, group: int, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a float32 weight [outputs, inputs]: numbers of the grid [outputs, inputs] and float32 scales
    [outputs, groups], which `dtype` holds exactly. `hessian`: mean of the products of inputs, [inputs, inputs]
    float32."""
    weight, hessian = weight.clone(), hessian.clone()
    silent = hessian.diagonal() == 0
    hessian.diagonal()[silent] = 1
    weight[:, silent] = 0  # whatever they are, no input of the calibration rows tells
    scales = scales_of(weight, hessian.diagonal(), group, grid, dtype)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    spread = scales.repeat_interleave(group, 1)[:, order]
    ordered = _in_order(weight[:, order], spread, _inverse_factor(hessian[order][:, order]), grid)
    return ordered[:, order.argsort()], scales


def scales_of(weight: Tensor, importance: Tensor, group: int, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The scale of each group with the least error of its weights, each counted by the mean square of its input."""
    grouped = weight.view(weight.shape[0], -1, group)
    counted = importance.view(1, -1, group)
    widest = grouped.abs().amax(-1)
    widest = torch.where(widest > 0, widest, torch.ones_like(widest))
    best, least = widest, torch.full_like(widest, torch.inf)
    for scale in grid.scales(widest, dtype):
        rounded = grid.nearest(grouped / scale.unsqueeze(-1)) * scale.unsqueeze(-1)
        error = ((rounded - grouped).square() * counted).sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse. The damping grows where the calibration rows leave the matrix singular."""
    mean = hessian.diagonal().mean()
    damping = DAMPING
    while True:
        damped = hessian + torch.eye(len(hessian)) * (damping * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed:
            found: Tensor = inverse
            return found
        damping *= 10


def _in_order(weight: Tensor, scales: Tensor, inverse: Tensor, grid: Grid) -> Tensor:
    """Numbers for the columns of `weight`, which is used up, from left to right."""
    found = torch.empty_like(weight)
    count = weight.shape[1]
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        here, part = weight[:, begin:end], inverse[begin:end, begin:end]
        errors = torch.empty_like(here)
        for column in range(end - begin):
            value, scale = here[:, column], scales[:, begin + column]
            q = grid.nearest(value / scale)
            found[:, begin + column] = q
            error = (value - q * scale) / part[column, column]
            here[:, column:] -= error.unsqueeze(1) * part[column, column:].unsqueeze(0)
            errors[:, column] = error
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    return found
