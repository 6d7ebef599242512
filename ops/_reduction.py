"""From losses per token to what is returned: divisors and weights, the same for every op that reduces."""

from __future__ import annotations

import torch
from torch import Tensor

from headmux.ops import _checks

REDUCTIONS = ("mean", "sum", "none")


def check(reduction: object, num_items: object) -> None:
    """Check ``reduction`` and ``num_items``.

    Raises:
        TypeError: ``num_items`` is neither a number nor a tensor.
        ValueError: Unknown reduction, ``num_items`` without a mean, negative, not 0-dim, or requiring a gradient.
    """
    _checks.one_of("reduction", reduction, REDUCTIONS)
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"num_items replaces the divisor of a mean, but reduction={reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.dtype == torch.bool or num_items.is_complex():
            raise TypeError(f"num_items has dtype {num_items.dtype}, needs an integer or a float")
        if num_items.numel() != 1:
            raise ValueError(f"num_items has shape {tuple(num_items.shape)}, needs a number or a 0-dim tensor")
        _checks.no_gradient("num_items", num_items)
    else:
        _checks.number("num_items", num_items, low=0.0)


def row_scale(
    reduction: str,
    valid: Tensor,
    dtype: torch.dtype,
    *,
    label_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
) -> Tensor | None:
    """What each token's loss is multiplied with before the sum over tokens; None for ``reduction="none"``.

    A mean divides by ``num_items`` or else by the sum of ``label_weight`` over the tokens that count (their number if
    None). With no such token, or ``num_items`` of 0, every factor is 0; a negative or NaN tensor makes
    them NaN. Tokens that do not count have factor 0.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        valid: [N] bool, the tokens that count.
        dtype: dtype of the factors.
        label_weight: [N], the class weight of each token's label.
        token_weight: [N], a further factor per token, which does not change the divisor.
        num_items: The mean's divisor.
    """
    if reduction == "none":
        return None
    ones = valid.to(dtype)
    scale = ones if token_weight is None else torch.where(valid, token_weight.to(dtype), 0.0)
    if reduction == "sum":
        return scale
    if num_items is None:
        count = ones.sum()
        if label_weight is None:  # the factors are 0 where nothing counts, whatever they are divided by
            return scale / count.clamp_(min=1.0)
        divisor = torch.where(valid, label_weight.to(dtype), 0.0).sum()
    elif isinstance(num_items, Tensor):
        # a 0-dim CPU tensor combines with tensors of any device without a transfer
        here = num_items.device == valid.device or num_items.device.type == "cpu"
        count = divisor = (num_items if here else num_items.to(valid.device)).detach().reshape(()).to(dtype)
    else:
        count = divisor = torch.full((), num_items, dtype=dtype, device=valid.device)
    return torch.where(valid, scale * torch.where(count == 0, 0.0, torch.where(count > 0, 1 / divisor, torch.nan)), 0.0)


def reduce(rows: Tensor, scale: Tensor | None) -> Tensor:
    """The weighted sum over tokens, or the rows themselves without a scale."""
    return rows if scale is None else (rows * scale).sum()
