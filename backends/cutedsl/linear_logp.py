"""linear_logp from the kernels' statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headmux.backends.cutedsl.statistics import statistics

if TYPE_CHECKING:
    from headmux.ops.linear_logp import LinearLogpArgs


def forward(args: LinearLogpArgs) -> tuple[tuple[Tensor | None, ...], None]:
    """Outputs per token."""
    s = statistics(
        args.input.to(args.compute_dtype),
        args.weight,
        args.bias,
        args.target,
        ignore_index=args.ignore_index,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=args.temperature if args.token_temperature is None else args.token_temperature,
        entropy=args.return_entropy,
    )
    return (s.logp, s.entropy, s.lse if args.return_lse else None), None
