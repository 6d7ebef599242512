"""flce from a backend's softmax: losses and logit gradients from its statistics."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.head import Head
from headmux.backends.common.labels import Labels, counted
from headmux.backends.common.residual import Scale, scaled
from headmux.backends.common.softmax import Coefficients, Kept, MakeSoftmax, Softmax, Statistics, Wanted
from headmux.contract import Kernel, Requirement, Upstream

if TYPE_CHECKING:
    from headmux.ops.flce import FLCEArgs


def kernel(make: MakeSoftmax, *requires: Requirement, scale: Scale = scaled) -> Kernel:
    """The kernel of a backend that supplies a softmax and, if it has a better one, a way to scale gradients."""
    return Kernel(partial(_forward, make), partial(_backward, make, scale), requires)


def _forward(make: MakeSoftmax, args: FLCEArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    labels, softmax = _softmax(make, args)
    residual: Any = None
    if any(args.needs) and softmax.can_keep():
        residual = softmax.keep()
        statistics = residual.statistics
    elif any(args.needs) and args.row_scale is not None and args.compute_dtype != torch.float16:
        # in fp16 the gradients of a mean underflow before a loss scale arrives, so they wait for it
        scale = args.row_scale
        statistics, residual = softmax.gradients(lambda s, t: _coefficients(args, labels[t], s, scale[t]))
    else:
        statistics = softmax.statistics()
    return _outputs(args, labels, statistics), residual


def _backward(
    make: MakeSoftmax, scale: Scale, args: FLCEArgs, residual: Any, upstream: Upstream
) -> tuple[Tensor | None, ...]:
    if isinstance(residual, tuple):  # formed in the forward
        return scale(residual, args.needs, upstream)
    labels, softmax = _softmax(make, args)
    (loss, *_) = upstream.rows
    assert loss is not None

    def coefficients(statistics: Statistics, tokens: slice) -> Coefficients:
        return _coefficients(args, labels[tokens], statistics, loss[tokens])

    if isinstance(residual, Kept):
        return softmax.finish(residual, coefficients)
    return softmax.gradients(coefficients)[1]


def _softmax(make: MakeSoftmax, args: FLCEArgs) -> tuple[Labels, Softmax]:
    labels = Labels.of(args.target, args.ignore_index, args.weight.shape[0])
    head = Head(
        input=counted(args.input, labels.valid),
        weight=args.weight,
        bias=args.bias,
        dtype=args.compute_dtype,
        scale=args.logit_scale,
        softcap=args.softcap,
        temperature=1.0,
    )
    smoothed = (1.0 if args.ce_weight is None else args.ce_weight) if args.label_smoothing else None
    wanted = Wanted(best=args.return_predicted, smoothed=smoothed)
    bias = args.weight if args.bias is None else args.bias
    dtypes = (args.input.dtype, args.weight.dtype, bias.dtype)
    return labels, make(head, labels, wanted, args.needs, dtypes, args.accum_dtype)


def _outputs(args: FLCEArgs, labels: Labels, s: Statistics) -> tuple[Tensor | None, ...]:
    nll = s.lse - s.target_logit
    loss = nll if args.ce_weight is None else nll * args.ce_weight[labels.index]
    if s.smoothed is not None:
        classes = args.weight.shape[0]
        total = classes if args.ce_weight is None else args.ce_weight.sum()
        loss = (1 - args.label_smoothing) * loss + args.label_smoothing / classes * (s.lse * total - s.smoothed)
    z_loss = args.lse_square_scale * s.lse.square()
    if args.lse_square_scale:
        loss = loss + z_loss
    if args.use_token_scaling:
        p = torch.exp(-nll)
        loss, z_loss = loss * p, z_loss * p
    return (
        labels.masked(labels.poisoned(loss)),
        labels.masked(labels.poisoned(z_loss)) if args.return_z_loss else None,
        None if s.best is None else torch.where(args.target != args.ignore_index, s.best, -1),
    )


def _coefficients(args: FLCEArgs, labels: Labels, s: Statistics, upstream: Tensor) -> Coefficients:
    g = labels.poisoned(upstream)
    if args.use_token_scaling:
        g = g * torch.exp(s.target_logit - s.lse)
    classes = args.weight.shape[0]
    label = (1 - args.label_smoothing) * g
    if args.ce_weight is not None:
        label = label * args.ce_weight[labels.index]
    softmax, smoothing = label, None
    if args.label_smoothing:
        smoothing = g * (args.label_smoothing / classes)
        softmax = softmax + smoothing * (classes if args.ce_weight is None else args.ce_weight.sum())
    if args.lse_square_scale:
        softmax = softmax + 2 * args.lse_square_scale * s.lse * g
    return Coefficients(softmax=softmax, label=label, smoothing=smoothing)
