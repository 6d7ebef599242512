"""The floor: an op's own matrix products, through the vendor's library, into tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headmux.bench.problem import Problem


def gemms(problem: Problem) -> int:
    """How many products of 2 * N * H * V operations the op needs: its logits, and two for the gradients."""
    forward = 2 if problem.op == "jsd" else 1
    return forward + (2 if problem.variant.gradients else 0)


def floor(problem: Problem) -> Callable[[], None]:
    """A step that makes just these products. It honours PyTorch's setting for fp32 products, as the op does."""
    x, w = problem.input.detach(), problem.weight.detach()
    # rows of an odd V are not aligned, and products with them are several times slower: then the token index is last
    across = problem.shape.v % 8 != 0
    logits = x.new_empty((problem.shape.v, problem.shape.n) if across else (problem.shape.n, problem.shape.v))
    by_token = logits.t() if across else logits
    jsd = problem.op == "jsd"
    gradients = problem.variant.gradients
    grad_input = torch.empty_like(x) if gradients else x
    grad_weight = torch.empty_like(w) if gradients else w

    def products(states: Tensor, weight: Tensor) -> None:
        if across:
            torch.mm(weight, states.t(), out=logits)
        else:
            torch.mm(states, weight.t(), out=logits)

    def step() -> None:
        if jsd:
            products(problem.teacher_input, problem.teacher_weight)
        products(x, w)
        if gradients:
            torch.mm(by_token, w, out=grad_input)
            torch.mm(by_token.t(), x, out=grad_weight)

    return step
