"""Launches of ``Scale`` and ``Sort``."""

from __future__ import annotations

import torch
from torch import Tensor

from headmux.backends.common.labels import Labels
from headmux.backends.common.residual import scaled as plain
from headmux.backends.cutedsl.build import SCALED, Scaling, Sorting, kernel
from headmux.contract import Upstream

_BLOCKS = 132 * 16


def admit(
    states: Tensor, target: Tensor, ignore_index: int | None, classes: int, dtype: torch.dtype
) -> tuple[Labels, Tensor]:
    """Labels in one launch, and the states as they are: kernels pass over what does not count. dtype is fp32."""
    target = target.contiguous()
    index, counts = torch.empty_like(target), torch.empty_like(target, dtype=dtype)
    valid = None if ignore_index is None else torch.empty_like(target, dtype=torch.bool)
    with torch.cuda.device(target.device):
        kernel(Sorting(valid is not None))(target, index, valid, counts, ignore_index or 0, classes)
    return Labels(index, valid, counts), states


def scale_rows(states: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, H] states times [n] factors, rounded once, in ``out`` or a new tensor; 0 where the factor is."""
    out = torch.empty_like(states) if out is None else out
    if states.dtype not in SCALED:
        return out.copy_(torch.where(factors[:, None] == 0.0, 0.0, states * factors[:, None]))
    if states.shape[0]:
        with torch.cuda.device(states.device):
            kernel(Scaling(states.dtype, True))(states, factors, out, min(_BLOCKS, states.shape[0]))
    return out


def scaled(
    gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...], upstream: Upstream
) -> tuple[Tensor | None, ...]:
    """Gradients that a forward formed, times a scalar that the host never sees."""
    wanted = tuple(g if need else None for g, need in zip(gradients, needs, strict=True))
    if any(g is not None and g.dtype not in SCALED for g in wanted):
        return plain(gradients, needs, upstream)
    assert upstream.scalar is not None
    scalar = upstream.scalar.reshape(1).to(torch.float32)
    with torch.cuda.device(scalar.device):
        for g in wanted:
            if g is not None and g.dim() == 1:  # of a bias
                g.mul_(upstream.scalar)
            elif g is not None and g.shape[0]:
                kernel(Scaling(g.dtype, False))(g, scalar, g, min(_BLOCKS, g.shape[0]))
    return wanted
