"""linear_logp from a backend's softmax: log-probabilities, entropies and logit gradients from its statistics."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.head import Head
from headmux.backends.common.labels import Labels, counted
from headmux.backends.common.softmax import Coefficients, Kept, MakeSoftmax, Softmax, Statistics, Wanted
from headmux.contract import Kernel, Requirement, Upstream

if TYPE_CHECKING:
    from headmux.ops.linear_logp import LinearLogpArgs


def kernel(make: MakeSoftmax, *requires: Requirement) -> Kernel:
    """The kernel of a backend that supplies a softmax."""
    return Kernel(partial(_forward, make), partial(_backward, make), requires)


def _forward(make: MakeSoftmax, args: LinearLogpArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    labels, softmax = _softmax(make, args, entropy=args.return_entropy)
    residual = softmax.keep() if any(args.needs) and softmax.can_keep() else None
    s = softmax.statistics() if residual is None else residual.statistics
    logp = labels.masked(labels.poisoned(s.target_logit - s.lse))
    entropy = None if s.entropy is None else labels.masked(s.entropy)
    return (logp, entropy, labels.masked(s.lse) if args.return_lse else None), residual


def _backward(
    make: MakeSoftmax, args: LinearLogpArgs, residual: Any, upstream: Upstream
) -> tuple[Tensor | None, ...]:
    logp, entropy, lse = upstream.rows
    labels, softmax = _softmax(make, args, entropy=entropy is not None)

    def coefficients(s: Statistics, tokens: slice) -> Coefficients:
        softmax, label = torch.zeros_like(s.lse), torch.zeros_like(s.lse)
        if logp is not None:
            label = -labels[tokens].poisoned(logp[tokens])
            softmax = softmax + label
        if lse is not None:
            softmax = softmax + lse[tokens]
        if entropy is None:
            return Coefficients(softmax, label)
        assert s.entropy is not None
        return Coefficients(softmax - entropy[tokens] * s.entropy, label, entropy=-entropy[tokens])

    if isinstance(residual, Kept):
        return softmax.finish(residual, coefficients)
    return softmax.gradients(coefficients)[1]


def _softmax(make: MakeSoftmax, args: LinearLogpArgs, *, entropy: bool) -> tuple[Labels, Softmax]:
    labels = Labels.of(args.target, args.ignore_index, args.weight.shape[0])
    temperature: float | Tensor = args.temperature
    if args.token_temperature is not None:
        temperature = labels.masked(args.token_temperature, 1.0)
    head = Head(
        input=counted(args.input, labels.valid),
        weight=args.weight,
        bias=args.bias,
        dtype=args.compute_dtype,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=temperature,
    )
    bias = args.weight if args.bias is None else args.bias
    dtypes = (args.input.dtype, args.weight.dtype, bias.dtype)
    return labels, make(head, labels, Wanted(entropy=entropy), args.needs, dtypes, args.accum_dtype)
