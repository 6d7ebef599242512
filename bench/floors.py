"""The floor: an op's own matrix products, through the vendor's library, into tensors that are there already."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headmux.bench.problem import Problem


def gemms(problem: Problem) -> int:
    """How many products of 2 * N * H * V operations the op needs: its logits, and two for the gradients."""
    forward = 2 if problem.op == "jsd" else 1
    return forward + (2 if problem.variant.gradients else 0)


def floor(problem: Problem) -> Callable[[], None]:
    """A step that makes just these products. It honours PyTorch's setting for fp32 products, as the op does."""
    x, w = problem.input.detach(), problem.weight.detach()
    logits = x.new_empty((problem.shape.n, problem.shape.v))
    jsd = problem.op == "jsd"
    gradients = problem.variant.gradients
    grad_input = torch.empty_like(x) if gradients else x
    grad_weight = torch.empty_like(w) if gradients else w

    def step() -> None:
        if jsd:
            torch.mm(problem.teacher_input, problem.teacher_weight.t(), out=logits)
        torch.mm(x, w.t(), out=logits)
        if gradients:
            torch.mm(logits, w, out=grad_input)
            torch.mm(logits.t(), x, out=grad_weight)

    return step
