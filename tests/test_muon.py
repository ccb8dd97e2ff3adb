"""The optimizer of the layers' matrices against PyTorch's, whose products have the precision of bfloat16."""

from __future__ import annotations

import pytest
import torch

from outrider.distill.muon import Muon, orthogonal

SHAPES = [(24, 24), (48, 16), (16, 48)]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_moves_as_pytorchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(5, *shape)
    found = []
    for kind in (Muon, torch.optim.Muon):
        matrix = start.clone().requires_grad_()
        optimizer = kind([{"params": [matrix]}], lr=0.02, weight_decay=0.05)
        for matrix.grad in gradients:
            optimizer.step()
        found.append(matrix.detach() - start)
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_a_gradient_of_zeros_only_decays() -> None:
    matrix = torch.ones(4, 4, requires_grad=True)
    optimizer = Muon([{"params": [matrix]}], lr=0.1, weight_decay=0.5)
    matrix.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.allclose(matrix.detach(), torch.full((4, 4), 0.95))
