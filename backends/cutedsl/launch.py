"""Launches of ``Scale``, ``Sort`` and ``Accumulate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headmux.backends.common import gemm
from headmux.backends.common.labels import Labels
from headmux.backends.common.residual import scaled as plain
from headmux.backends.common.storage import apart
from headmux.backends.cutedsl.build import SCALED, Adding, Scaling, Sorting, kernel
from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, RING, TOKENS
from headmux.backends.cutedsl.statistics import aligned
from headmux.contract import Upstream
from headmux.devices import multiprocessors

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


def accumulate(
    total: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, *, first: bool, inside: bool = False,
    **others: Any,
) -> None:  # fmt: skip
    """As ``headmux.backends.common.gemm.accumulate``: by one launch where all is of one 16-bit dtype."""
    narrow = dtype in (torch.bfloat16, torch.float16) and {total.dtype, *(t.dtype for p in pairs for t in p)} == {dtype}
    straight = all(aligned(left) is left for left, _ in pairs) and len(pairs) <= 1 + inside
    if not narrow or not straight or (inside and not apart(total, pairs[0][0], COLUMN)):
        gemm.accumulate(total, pairs, dtype, first=first, inside=inside, **others)
        return
    columns, across = -(-total.shape[0] // COLUMN), -(-total.shape[1] // (CLUSTER * TOKENS))
    clusters = min(multiprocessors(total.device) // CLUSTER, columns * across)
    zeros = torch.zeros(columns * inside + (clusters + 1) * RING, dtype=torch.int32, device=total.device)
    read, ring = zeros[: columns * inside], zeros[columns * inside :].view(-1, RING)
    operands = [t for left, right in pairs for t in (aligned(right), left)] + [None] * (2 * (2 - len(pairs)))
    with torch.cuda.device(total.device):
        kernel(Adding(dtype, not first, inside, len(pairs) > 1))(
            *operands, total, ring, read if inside else None, clusters
        )
