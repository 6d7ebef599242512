"""The correctness gate: errors against a wide chunked reference, measured before any time is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headmux.bench.problem import BETA, IGNORE, Problem

ERRORS = ("err_loss", "err_input", "err_weight", "err_weight_untargeted")

# Norm of the error over the norm of the truth. Plain PyTorch is at 2e-3 in 16 bits and at 1e-6 in fp32 on random data;
# the bounds leave room for peers that round more often (worst seen without a filter: 1.3e-2), not for wrong ones.
# TF32 inside a peer's kernels is 5e-4.
_BOUNDS = {
    torch.float64: (1e-9, 1e-8, 1e-8, 1e-8),
    torch.float32: (1e-4, 2e-3, 2e-3, 5e-3),
    torch.bfloat16: (3e-2, 5e-2, 5e-2, 1e-1),
    torch.float16: (3e-2, 5e-2, 5e-2, 1e-1),
}


@dataclass(frozen=True)
class Reference:
    """The truth, computed in fp32 for 16-bit inputs and in float64 otherwise.

    Attributes:
        loss: 0-dim, or [N] per token.
        grad_input: [N, H], or None without gradients.
        grad_weight: [V, H], or None without gradients.
    """

    loss: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference(p: Problem) -> Reference:
    """The truth for all tokens of a problem, chunk by chunk; products of two 16-bit numbers are exact in fp32."""
    wide = torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else torch.float64
    n, v = p.shape.n, p.shape.v
    elements = (2**27 if p.device.type == "cuda" else 2**23) // (4 if p.op == "jsd" else 1)
    rows = max(1, min(n, elements // v))
    valid = p.target != IGNORE
    scale = valid.to(wide) if p.per_token else valid.to(wide) / valid.sum()
    upstream = scale if p.upstream is None else scale * p.upstream.to(wide)
    gradients = p.variant.gradients
    weight = p.weight.detach().to(wide).requires_grad_(gradients)
    teacher = p.teacher_weight.to(wide) if p.op == "jsd" else None
    losses, inputs = [], []
    with _full_precision(), torch.set_grad_enabled(gradients):
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            x = p.input[part].detach().to(wide).requires_grad_(gradients)
            z = _cap(x @ weight.t(), p.shape.softcap)
            if teacher is not None:
                with torch.no_grad():
                    t = torch.log_softmax(_cap(p.teacher_input[part].to(wide) @ teacher.t(), p.shape.softcap), 1)
                found = _jsd(torch.log_softmax(z, 1), t)
            else:
                label = p.target[part].clamp(min=0)
                found = torch.logsumexp(z, 1) - z.gather(1, label[:, None])[:, 0]
                found = -found if p.op == "linear_logp" else found
            if gradients:
                torch.autograd.backward((found * upstream[part]).sum())
                assert x.grad is not None
                inputs.append(x.grad)
            losses.append(torch.where(valid[part], found.detach(), 0.0))
    loss = torch.cat(losses)
    return Reference(
        loss if p.per_token else (loss * scale).sum(),
        torch.cat(inputs) if gradients else None,
        weight.grad if gradients else None,
    )


def _cap(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _jsd(q: Tensor, p: Tensor) -> Tensor:
    m = torch.logsumexp(torch.stack([q + math.log(1 - BETA), p + math.log(BETA)]), 0)
    return BETA * (p.exp() * (p - m)).sum(1) + (1 - BETA) * (q.exp() * (q - m)).sum(1)


def errors(p: Problem, truth: Reference, loss: Tensor) -> dict[str, float | None]:
    """Relative errors of a loss and of the gradients that stand in the problem's leaves; None where there is none."""
    found: dict[str, float | None] = dict.fromkeys(ERRORS)
    lost = _square_error(loss.detach().reshape(-1), truth.loss.reshape(-1))
    found["err_loss"] = _relative(*lost)
    if truth.grad_input is None or truth.grad_weight is None:
        return found
    if p.input.grad is not None:
        found["err_input"] = _relative(*_square_error(p.input.grad, truth.grad_input))
    if p.weight.grad is not None:
        wrong, size = _square_error(p.weight.grad, truth.grad_weight)
        found["err_weight"] = _relative(wrong, size)
        free = torch.ones(p.shape.v, dtype=torch.bool, device=p.device)
        free[p.target[p.target != IGNORE]] = False
        found["err_weight_untargeted"] = _relative(wrong[free], size[free])
    return found


def _square_error(value: Tensor, truth: Tensor, block: int = 2**24) -> tuple[Tensor, Tensor]:
    """Per row, the squared error and the squared size of the truth, in float64."""
    rows = max(1, block // max(1, truth[0].numel())) if truth.dim() > 1 else len(truth)
    wrong, size = [], []
    for start in range(0, len(truth), rows):
        t = truth[start : start + rows].double()
        d = value[start : start + rows].double() - t
        dims = tuple(range(1, t.dim()))
        wrong.append(d.square().sum(dims) if dims else d.square())
        size.append(t.square().sum(dims) if dims else t.square())
    return torch.cat(wrong), torch.cat(size)


def _relative(wrong: Tensor, size: Tensor) -> float:
    top, bottom = float(wrong.sum()), float(size.sum())
    if bottom == 0.0:
        return 0.0 if top == 0.0 else math.inf
    return math.sqrt(top / bottom)


def verdict(p: Problem, found: dict[str, float | None], exempt: tuple[str, ...] = ()) -> str | None:
    """Why a provider may not be timed, or None if it is right enough. NaN is never right.

    Args:
        p: The problem, with the provider's gradients in its leaves.
        found: Its errors.
        exempt: Errors that may be of any size.
    """
    bounds = dict(zip(ERRORS, _BOUNDS[p.dtype], strict=True))
    wanted = ERRORS if p.variant.gradients else ERRORS[:1]
    reasons = []
    for name in wanted:
        value = found[name]
        if value is None:
            reasons.append(f"{name}: no gradient")
        elif not (value <= bounds[name]) and not (name in exempt and math.isfinite(value)):
            reasons.append(f"{name} {value:.1e} is not within {bounds[name]:.0e}")
    if p.variant.half and p.input.grad is not None and bool(p.input.grad[p.target == IGNORE].ne(0).any()):
        reasons.append("the gradient of ignored tokens is not exactly 0")
    return "gate: " + "; ".join(reasons) if reasons else None
