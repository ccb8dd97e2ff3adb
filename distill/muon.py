"""Muon (Jordan et al. 2024), as ``torch.optim.Muon`` but for its products, which are in float32.

PyTorch's are in bfloat16 and nothing else, which processors without AVX-512 emulate: a step took seconds there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTUM = 0.95
_STEPS = 5  # of Newton-Schulz
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5: takes singular values from 0 up to near 1 fastest
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices ``[outputs, inputs]``; with Nesterov's momentum and decoupled weight decay.

    Args:
        groups: as of any optimizer of PyTorch's.
        lr: for square and wide matrices; tall ones move by sqrt(outputs / inputs) times as much.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, group["lr"], group["weight_decay"])

    def _move(self, matrix: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - _MOMENTUM)
        direction = orthogonal(gradient.lerp(mean, _MOMENTUM))
        outputs, inputs = matrix.shape
        matrix.mul_(1 - lr * weight_decay)
        matrix.sub_(direction, alpha=lr * max(1.0, outputs / inputs) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U V of ``matrix`` = U S V: its singular values end up between 0.7 and 1.2, but for those near 0."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    a, b, c = _POLYNOMIAL
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
