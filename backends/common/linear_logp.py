"""linear_logp from a backend's softmax: log-probabilities, entropies and logit gradients from its statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.head import Head
from headmux.backends.common.labels import Admit, admit
from headmux.backends.common.softmax import Coefficients, MakeSoftmax, Softmax, Statistics, Wanted
from headmux.contract import Kernel, Requirement, Upstream

if TYPE_CHECKING:
    from headmux.ops.linear_logp import LinearLogpArgs

Prepare = Callable[..., Softmax]


def kernel(make: MakeSoftmax, *requires: Requirement, admit: Admit = admit) -> Kernel:
    """The kernel of a backend that supplies a softmax and, if it has a better one, its own ``admit``."""
    prepare = partial(_softmax, make, admit)
    return Kernel(partial(_forward, prepare), partial(_backward, prepare), requires)


def _forward(prepare: Prepare, args: LinearLogpArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    softmax = prepare(args, entropy=args.return_entropy)
    labels = softmax.labels
    s, residual = (softmax.keep(), softmax) if any(args.needs) else (softmax.statistics(), None)
    logp = labels.poisoned(s.target_logit - s.lse)

    def own(rows: Tensor) -> Tensor:
        """For the caller, who may write to it: a backward reads the statistics themselves."""
        return labels.masked(rows) if residual is None or labels.valid is not None else rows.clone()

    entropy = None if s.entropy is None else own(s.entropy)
    return (logp, entropy, own(s.lse) if args.return_lse else None), residual


def _backward(
    prepare: Prepare, args: LinearLogpArgs, residual: Any, upstream: Upstream
) -> tuple[Tensor | None, ...]:
    logp, entropy, lse = upstream.rows
    softmax = residual or prepare(args, entropy=entropy is not None)
    labels = softmax.labels

    def coefficients(s: Statistics, tokens: slice) -> Coefficients:
        softmax = label = torch.zeros_like(s.lse) if logp is None else -labels[tokens].poisoned(logp[tokens])
        if lse is not None:
            softmax = softmax + lse[tokens]
        if entropy is None:
            return Coefficients(softmax, label)
        assert s.entropy is not None
        return Coefficients(softmax - entropy[tokens] * s.entropy, label, entropy=-entropy[tokens])

    return softmax.gradients(coefficients, args.needs)[1]


def _softmax(make: MakeSoftmax, admit: Admit, args: LinearLogpArgs, *, entropy: bool) -> Softmax:
    wide = wide_dtype(args.compute_dtype)
    labels, states = admit(args.input, args.target, args.ignore_index, args.weight.shape[0], wide)
    temperature: float | Tensor = args.temperature
    if args.token_temperature is not None:
        temperature = labels.masked(args.token_temperature, 1.0)
    head = Head(
        input=states,
        weight=args.weight,
        bias=args.bias,
        dtype=args.compute_dtype,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=temperature,
    )
    bias = args.weight if args.bias is None else args.bias
    dtypes = (args.input.dtype, args.weight.dtype, bias.dtype)
    wanted = Wanted(entropy=entropy, proportional=not (entropy or args.return_lse or args.needs[2]))
    return make(head, labels, wanted, args.needs, dtypes, args.accum_dtype)
