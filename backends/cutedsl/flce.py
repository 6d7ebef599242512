"""flce from the kernels' statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from headmux.backends.common.flce import _outputs
from headmux.backends.common.labels import Labels
from headmux.backends.cutedsl.statistics import statistics

if TYPE_CHECKING:
    from headmux.ops.flce import FLCEArgs


def forward(args: FLCEArgs) -> tuple[tuple[Tensor | None, ...], None]:
    """Losses per token. Ignored tokens' states are read and their results dropped."""
    labels = Labels.of(args.target, args.ignore_index, args.weight.shape[0])
    s = statistics(
        args.input.to(args.compute_dtype),
        args.weight,
        args.bias,
        labels.index,
        scale=args.logit_scale,
        softcap=args.softcap,
    )
    return _outputs(args, labels, s), None
