"""linear_logp from the kernels' statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headmux.backends.common.labels import Labels
from headmux.backends.cutedsl.statistics import statistics

if TYPE_CHECKING:
    from headmux.ops.linear_logp import LinearLogpArgs


def forward(args: LinearLogpArgs) -> tuple[tuple[Tensor | None, ...], None]:
    """Outputs per token. Ignored tokens' states are read and their results dropped."""
    labels = Labels.of(args.target, args.ignore_index, args.weight.shape[0])
    s = statistics(
        args.input.to(args.compute_dtype),
        args.weight,
        args.bias,
        labels.index,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=args.temperature if args.token_temperature is None else args.token_temperature,
        entropy=args.return_entropy,
    )
    logp = labels.masked(labels.poisoned(s.target_logit - s.lse))
    entropy = None if s.entropy is None else labels.masked(s.entropy)
    return (logp, entropy, labels.masked(s.lse) if args.return_lse else None), None
