"""Gradients that a forward formed for an upstream of 1."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headmux.contract import Upstream

Scale = Callable[[tuple["Tensor | None", ...], tuple[bool, ...], Upstream], tuple["Tensor | None", ...]]
"""Scales gradients that a forward formed, as ``scaled`` does."""


def scaled(
    gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...], upstream: Upstream
) -> tuple[Tensor | None, ...]:
    """The gradients times the upstream's scalar, in place, None where not needed.

    On a CPU a look at the scalar is free, and 1, what ``loss.backward()`` sends, needs no pass over them.
    """
    scalar = upstream.scalar
    assert scalar is not None
    if scalar.device.type == "cpu" and float(scalar) == 1.0:
        return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))
    return tuple(g.mul_(scalar) if need and g is not None else None for g, need in zip(gradients, needs, strict=True))
