"""flce from the kernels' statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmux.backends.cutedsl.statistics import statistics

if TYPE_CHECKING:
    from headmux.ops.flce import FLCEArgs


def forward(args: FLCEArgs) -> tuple[tuple[Tensor | None, ...], None]:
    """Losses per token."""
    s = statistics(
        args.input.to(args.compute_dtype),
        args.weight,
        args.bias,
        args.target,
        ignore_index=args.ignore_index,
        scale=args.logit_scale,
        softcap=args.softcap,
    )
    loss = 0.0 - s.logp
    if args.ce_weight is not None:
        loss = loss * args.ce_weight[args.target.clamp(0, args.weight.shape[0] - 1)]
    z_loss = None
    if args.lse_square_scale or args.return_z_loss:
        z_loss = torch.where(s.logp.isnan(), s.logp, args.lse_square_scale * s.lse.square())
        loss = loss + z_loss
    if args.use_token_scaling:
        p = torch.exp(s.logp)
        loss, z_loss = loss * p, None if z_loss is None else z_loss * p
    return (loss, z_loss if args.return_z_loss else None, None), None
