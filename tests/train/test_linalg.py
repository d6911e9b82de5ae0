"""Norms and singular vectors where torch's own are inexact, or not the same in every process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.train.linalg.norm import LONG, total_norm
from core.train.linalg.singular import by_eigenvectors, largest_singular


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_norm_of_a_long_tensor_is_that_of_float64() -> None:
    gradients = [numbers(2048, 2049) * 1e-3, numbers(7), numbers(1025, 4096)]
    wanted = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
    assert float(total_norm(gradients)) == pytest.approx(float(wanted), rel=1e-6)
    assert float(torch.nn.utils.get_total_norm(gradients)) != pytest.approx(float(wanted), rel=2e-5), "torch's is exact"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_long_tensor_with_one_number_that_is_none_has_no_finite_norm(bad: float) -> None:
    gradient = torch.zeros(LONG + 3)
    gradient[-1] = bad
    assert not total_norm([numbers(3), gradient]).isfinite()


def test_short_tensors_have_the_norm_that_torch_gives_them() -> None:
    gradients = [numbers(64, 96), numbers(96)]
    assert torch.equal(total_norm(gradients), torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_eigenvectors_give_the_singular_ones(shape: tuple[int, int]) -> None:
    matrix = numbers(*shape)
    u, s, vh = by_eigenvectors(matrix, 5)
    whole_u, whole_s, whole_vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    wanted_u, wanted_s, wanted_vh = whole_u[:, :5], whole_s[:5], whole_vh[:5]
    assert [each.shape for each in largest_singular(matrix, 5)] == [u.shape, s.shape, vh.shape]
    assert u.dtype == s.dtype == vh.dtype == torch.float32
    torch.testing.assert_close(s, wanted_s.float())
    torch.testing.assert_close(u * s @ vh, (wanted_u * wanted_s @ wanted_vh).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(u.t() @ u, torch.eye(5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vh @ vh.t(), torch.eye(5), rtol=1e-5, atol=1e-5)


def test_a_matrix_of_lower_rank_has_no_number_that_is_none() -> None:
    matrix = numbers(12, 1) @ numbers(1, 8)
    u, s, vh = by_eigenvectors(matrix, 3)
    assert all(bool(each.isfinite().all()) for each in (u, s, vh))
    torch.testing.assert_close(u * s @ vh, matrix, rtol=1e-5, atol=1e-5)
