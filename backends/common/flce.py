"""flce from a backend's softmax: losses and logit gradients from its statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.head import Head
from headmux.backends.common.labels import Admit, Labels, admit
from headmux.backends.common.residual import Scale, scaled
from headmux.backends.common.softmax import Coefficients, MakeSoftmax, Softmax, Statistics, Wanted
from headmux.contract import Kernel, Requirement, Upstream

if TYPE_CHECKING:
    from headmux.ops.flce import FLCEArgs

Prepare = Callable[["FLCEArgs"], Softmax]


def kernel(make: MakeSoftmax, *requires: Requirement, admit: Admit = admit, scale: Scale = scaled) -> Kernel:
    """The kernel of a backend that supplies a softmax and, if it has better ones, its own ``admit`` and ``scaled``."""
    prepare = partial(_softmax, make, admit)
    return Kernel(partial(_forward, prepare), partial(_backward, prepare, scale), requires)


def _forward(prepare: Prepare, args: FLCEArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    softmax = prepare(args)
    labels = softmax.labels
    residual: Any = None
    if not any(args.needs):
        statistics = softmax.statistics()
    elif args.row_scale is not None and args.compute_dtype != torch.float16 and softmax.places.inside < softmax.tokens:
        # in fp16 the gradients of a mean underflow before a loss scale arrives, so they wait for it
        scale = args.row_scale
        statistics, residual = softmax.gradients(
            lambda s, t: _coefficients(args, labels[t], s, scale[t]), args.needs
        )
    else:
        statistics, residual = softmax.keep(), softmax
    return _outputs(args, labels, statistics), residual


def _backward(
    prepare: Prepare, scale: Scale, args: FLCEArgs, residual: Any, upstream: Upstream
) -> tuple[Tensor | None, ...]:
    if isinstance(residual, tuple):  # formed in the forward
        return scale(residual, args.needs, upstream)
    softmax = residual or prepare(args)
    (loss, *_) = upstream.rows
    assert loss is not None
    labels = softmax.labels
    return softmax.gradients(lambda s, t: _coefficients(args, labels[t], s, loss[t]), args.needs)[1]


def _softmax(make: MakeSoftmax, admit: Admit, args: FLCEArgs) -> Softmax:
    wide = wide_dtype(args.compute_dtype)
    labels, states = admit(args.input, args.target, args.ignore_index, args.weight.shape[0], wide)
    head = Head(
        input=states,
        weight=args.weight,
        bias=args.bias,
        dtype=args.compute_dtype,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=1.0,
    )
    smoothed = (1.0 if args.ce_weight is None else args.ce_weight) if args.label_smoothing else None
    proportional = smoothed is None and not (args.lse_square_scale or args.return_predicted or args.needs[2])
    wanted = Wanted(best=args.return_predicted, smoothed=smoothed, proportional=proportional)
    bias = args.weight if args.bias is None else args.bias
    dtypes = (args.input.dtype, args.weight.dtype, bias.dtype)
    return make(head, labels, wanted, args.needs, dtypes, args.accum_dtype)


def _outputs(args: FLCEArgs, labels: Labels, s: Statistics) -> tuple[Tensor | None, ...]:
    nll = s.lse - s.target_logit
    loss = nll if args.ce_weight is None else nll * args.ce_weight[labels.index]
    if s.smoothed is not None:
        classes = args.weight.shape[0]
        total = classes if args.ce_weight is None else args.ce_weight.sum()
        loss = (1 - args.label_smoothing) * loss + args.label_smoothing / classes * (s.lse * total - s.smoothed)
    counts = labels.counts * torch.exp(-nll) if args.use_token_scaling else labels.counts
    z_loss = None
    if args.lse_square_scale or args.return_z_loss:
        z_loss = args.lse_square_scale * s.lse.square()
        loss = loss + z_loss
    return (
        loss * counts,
        z_loss * counts if z_loss is not None and args.return_z_loss else None,
        None if s.best is None else torch.where(args.target != args.ignore_index, s.best, -1),
    )


def _coefficients(args: FLCEArgs, labels: Labels, s: Statistics, upstream: Tensor) -> Coefficients:
    g = labels.poisoned(upstream)
    if args.use_token_scaling:
        g = g * torch.exp(s.target_logit - s.lse)
    classes = args.weight.shape[0]
    label = (1 - args.label_smoothing) * g if args.label_smoothing else g
    if args.ce_weight is not None:
        label = label * args.ce_weight[labels.index]
    softmax, smoothing = label, None
    if args.label_smoothing:
        smoothing = g * (args.label_smoothing / classes)
        softmax = softmax + smoothing * (classes if args.ce_weight is None else args.ce_weight.sum())
    if args.lse_square_scale:
        softmax = softmax + 2 * args.lse_square_scale * s.lse * g
    return Coefficients(softmax=softmax, label=label, smoothing=smoothing)
