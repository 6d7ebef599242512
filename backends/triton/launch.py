"""Launches of the kernels over raw logits [V, n]."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from headmux.backends.common.gemm import is_native, operand, product
from headmux.backends.common.head import Head
from headmux.backends.common.labels import Labels
from headmux.backends.common.plan import Plan
from headmux.backends.common.softmax import Coefficients, Statistics, Wanted
from headmux.backends.common.storage import places, spread
from headmux.backends.triton import kernels
from headmux.backends.triton.tuning import INTERPRETED, MOST_REGISTERS, Cut, cdiv, next_power_of_2, tuning
from headmux.contract import Upstream

# fp16 holds a raw logit of up to 4 million so, and one of 4e-6 exactly enough
_FP16_UNIT = 64.0
_NOTHING_ELSE = {"ENTROPY": False, "SMOOTHED": False, "BEST": False}
# Products are rounded before they are added: jsd's kernels find the same logits, of which the largest less itself is 0,
# and threads that add up the same products find the same sum, in whichever order.
_ROUNDED = {"enable_fp_fusion": False}
_TRITON = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on the device of the tensors, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def unit(held: torch.dtype) -> float:
    """What a raw logit held in that dtype is to be multiplied with."""
    return _FP16_UNIT if held == torch.float16 else 1.0


def admit(
    states: Tensor, target: Tensor, ignore_index: int | None, classes: int, dtype: torch.dtype
) -> tuple[Labels, Tensor]:
    """Labels in one launch, and the states as they are: kernels pass over what is not valid."""
    count, target = target.shape[0], target.contiguous()
    index, counts = torch.empty_like(target), torch.empty(count, dtype=dtype, device=target.device)
    valid = None if ignore_index is None else torch.empty(count, dtype=torch.bool, device=target.device)
    width = next_power_of_2(count) if INTERPRETED else 256
    with on_device(target.device):
        kernels.sort_labels[(cdiv(count, width),)](
            target, ignore_index, count, classes, index, valid, counts, BN=width, num_warps=4
        )
    return Labels(index, valid, counts), states


def scale_rows(states: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, H] states times [n] factors, rounded once, in ``out`` or a new tensor; 0 where the factor is."""
    count, hidden = states.shape
    out = states.new_empty(count, hidden) if out is None else out
    width, height = (count, hidden) if INTERPRETED else (4, 1024)
    width, height = next_power_of_2(width), next_power_of_2(min(height, hidden))
    with on_device(states.device):
        kernels.scale_rows[(cdiv(count, width), cdiv(hidden, height))](
            states, states.stride(0), states.stride(1), factors, count, hidden, out, BN=width, BH=height, num_warps=4
        )
    return out


def raw_logits(head: Head, tokens: slice, out: Tensor, plan: Plan) -> None:
    """``input @ weight.T`` of these tokens, [V, n], divided by ``unit``."""
    out = spread(out)
    right = head.right(tokens)[:, : out.shape[1]]
    alpha = 1.0 / unit(out.dtype)
    if is_native(head.dtype, out.device) and head.weight.dtype == head.dtype:
        if out.dtype != head.dtype:
            product(head.weight, right, out=out)
        elif alpha == 1.0:
            torch.mm(head.weight, right, out=out)
        else:
            torch.addmm(out, head.weight, right, beta=0, alpha=alpha, out=out)
        return
    for rows in plan.blocks(out.shape[1]):
        found = product(operand(head.weight[rows], head.dtype), right)
        out[rows].copy_(found if alpha == 1.0 else found.mul_(alpha))


class Transform:
    """The head's transform of raw logits, as kernels take it."""

    def __init__(self, head: Head, tokens: slice) -> None:
        divisor = head.divisor(tokens)
        self.bias = None if head.bias is None else head.bias.contiguous()
        self.scale = float(head.scale)
        self.softcap = None if head.softcap is None else float(head.softcap)
        self.divisors, self.inverse = None, 1.0
        if isinstance(divisor, Tensor):
            self.divisors = divisor.float().contiguous()
        else:
            self.inverse = 1.0 / divisor


def statistics(
    raw: Tensor, transform: Transform, wanted: Wanted, labels: Labels, dots: Tensor
) -> tuple[Statistics, Tensor]:
    """One read of raw logits. ``dots`` [n] are the fp32 raw logits at the labels, used in place of those in ``raw``.

    Returns:
        The statistics, and [3, n]: 1 - p of each label, the largest logit and log(sum of exponentials against that),
        both / log 2.
    """
    count, device = raw.shape[1], raw.device
    t, cut = transform, tuning(device).look.cut(raw)
    weights = wanted.smoothed if isinstance(wanted.smoothed, Tensor) else None
    smoothed = wanted.smoothed is not None
    partials = torch.empty(
        (2 + wanted.entropy + smoothed + wanted.best, cut.parts, count), dtype=torch.float32, device=device
    )
    found = torch.empty((5 + wanted.entropy + smoothed, count), dtype=torch.float32, device=device)
    best = torch.empty(count, dtype=torch.int64, device=device) if wanted.best else None
    flags = {"ENTROPY": wanted.entropy, "SMOOTHED": smoothed, "BEST": wanted.best}
    left_out = labels.index if wanted.entropy else None
    with on_device(device):
        rounded = _ROUNDED if wanted.entropy or weights is not None else {}
        _look(raw, t, cut, partials, left_out, weights, **flags, **rounded)
        _combine(raw, t, cut, partials, found, labels, dots, best, weights, **flags)
    lse, target_logit = found[:2].unbind(0)
    entropy = found[5] if wanted.entropy else None
    return Statistics(lse, target_logit, entropy, best, found[-1] if smoothed else None), found[2:5]


def logsumexp(raw: Tensor, transform: Transform) -> Tensor:
    """One read of raw logits: [2, n], the largest and log(sum of exponentials against that), both / log 2."""
    cut = tuning(raw.device).look.cut(raw)
    partials = torch.empty((2, cut.parts, raw.shape[1]), dtype=torch.float32, device=raw.device)
    found = torch.empty((2, raw.shape[1]), dtype=torch.float32, device=raw.device)
    with on_device(raw.device):
        _look(raw, transform, cut, partials, None, None, **_NOTHING_ELSE, **_ROUNDED)
        _combine(raw, transform, cut, partials, found, None, None, None, None, **_NOTHING_ELSE)
    return found


def exponentials(raw: Tensor, transform: Transform, labels: Labels, dots: Tensor) -> tuple[Statistics, Tensor]:
    """Raw logits become, in place, exponentials that are a multiple of p - [j = y]; one read and one write.

    Returns:
        The statistics, and [n] the factors that make p - [j = y] of the exponentials.
    """
    vocabulary, count = raw.shape
    t, device = transform, raw.device
    cut = tuning(device).exponentiate.cut(raw)
    partials = torch.empty((2, cut.parts, count), dtype=torch.float32, device=device)
    found = torch.empty((6, count), dtype=torch.float32, device=device)
    tiles = {"EVEN": cut.even, "R": cut.height, "BN": cut.width, "num_warps": cut.warps, "maxnreg": MOST_REGISTERS}
    with on_device(device):
        kernels.exponentiate[(cut.programs,)](
            raw, raw.stride(0), count, places(raw), vocabulary, labels.index, labels.valid, dots, t.bias, t.divisors,
            t.scale, t.inverse, partials, cut.rows, cut.parts, **tiles,
        )  # fmt: skip
        _combine(raw, t, cut, partials, found, labels, dots, None, None, EXPONENTIALS=True, **_NOTHING_ELSE)
        kernels.settle[(cut.programs,)](
            raw, raw.stride(0), count, places(raw), vocabulary, labels.index, partials, found, cut.rows, cut.parts,
            **tiles,
        )  # fmt: skip
    lse, target_logit, *_, factors = found.unbind(0)
    return Statistics(lse, target_logit, None, None, None), factors


def to_gradient(
    raw: Tensor, transform: Transform, labels: Labels, dots: Tensor, rest_lse: Tensor, by: Coefficients,
    weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Raw logits become, in place, the gradient with respect to them; one read and one write.

    ``dots`` [n] are the fp32 raw logits at ``labels``, ``rest_lse`` [3, n] as ``statistics`` gives it, ``weights`` [V]
    those of ``by.smoothing``, None for equal ones.
    """
    vocabulary, count = raw.shape
    t, cut = transform, tuning(raw.device).gradient.cut(raw)
    with on_device(raw.device):
        kernels.to_gradient[(cut.programs,)](
            raw, raw.stride(0), count, places(raw), vocabulary, labels.index, labels.valid,
            t.bias, t.divisors, weights, unit(raw.dtype), t.scale, t.softcap, t.inverse,
            dots, rest_lse, by.softmax.contiguous(), by.label.contiguous(), by.entropy, by.smoothing, cut.rows,
            EVEN=cut.even, R=cut.height, BN=cut.width, STAGES=cut.stages, num_warps=cut.warps, maxnreg=MOST_REGISTERS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """One model's fp32 raw logits [V, n], their transform, and the ``logsumexp`` [2, n] of what it makes of them."""

    raw: Tensor
    transform: Transform
    lse: Tensor


def diverge(
    student: Side, teacher: Side, beta: float, valid: Tensor | None, *, loss: bool, upstream: Tensor | None = None,
    kl: Tensor | None = None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One read of a pair of logits: for ``loss`` their sums, and with ``into`` [V, n] the student's gradient there.

    The gradient is for ``upstream`` [n], and needs ``kl`` [n], the student's sum, where beta is not 0.

    Returns:
        [k, n], the teacher's sum unless beta is 1, and the student's unless it is 0; nothing without ``loss``.
    """
    q, p = student.transform, teacher.transform
    vocabulary, count = student.raw.shape
    device = student.raw.device
    tiles = tuning(device)
    cut = (tiles.compare if into is None else tiles.diverge).cut(student.raw)
    of_teacher, of_student = loss and beta != 1.0, loss and beta != 0.0
    partials = torch.empty((of_teacher + of_student, cut.parts, count), dtype=torch.float32, device=device)
    with on_device(device):
        kernels.diverge[(cut.programs,)](
            student.raw, teacher.raw, student.raw.stride(0), count, places(student.raw), vocabulary, valid,
            q.bias, q.scale, q.softcap, p.bias, p.scale, p.softcap, q.inverse, student.lse, teacher.lse,
            beta if 0.0 < beta < 1.0 else None, None if into is None else upstream, kl, into,
            0 if into is None else into.stride(0), partials, cut.rows, cut.parts,
            TEACHER=of_teacher, STUDENT=of_student, EVEN=cut.even, R=cut.height, BN=cut.width, STAGES=cut.stages,
            num_warps=cut.warps, maxnreg=MOST_REGISTERS, **_ROUNDED,
        )  # fmt: skip
    return partials.sum(1)


def _look(
    raw: Tensor, t: Transform, cut: Cut, partials: Tensor, left_out: Tensor | None, weights: Tensor | None,
    **keywords: bool,
) -> None:  # fmt: skip
    vocabulary, count = raw.shape
    kernels.look[(cut.programs,)](
        raw, raw.stride(0), count, places(raw), vocabulary, left_out, t.bias, t.divisors, weights,
        unit(raw.dtype), t.scale, t.softcap, t.inverse, partials, cut.rows, cut.parts,
        **keywords, EVEN=cut.even, R=cut.height, BN=cut.width, STAGES=cut.stages, num_warps=cut.warps,
        maxnreg=MOST_REGISTERS,
    )  # fmt: skip


def combined(count: int) -> tuple[int, int]:
    """Tokens and parts of a tile of ``combine``: fewer tokens where there are few: 256 programs share the work."""
    width = max(2, min(8, next_power_of_2(count) // 256))
    return width, 2048 // width


def _combine(
    raw: Tensor, t: Transform, cut: Cut, partials: Tensor, found: Tensor, labels: Labels | None, dots: Tensor | None,
    best: Tensor | None, weights: Tensor | None, *, EXPONENTIALS: bool = False, **flags: bool,
) -> None:  # fmt: skip
    count = raw.shape[1]
    index, valid = (None, None) if labels is None else (labels.index, labels.valid)
    width, height = (cut.width, 2) if INTERPRETED else combined(count)
    kernels.combine[(cdiv(count, width),)](
        partials, cut.parts, count, raw, raw.stride(0), index, valid, dots, t.bias, t.divisors, weights,
        unit(raw.dtype), t.scale, t.softcap, t.inverse, found, best, EXPONENTIALS=EXPONENTIALS, **flags,
        BP=height, BN=width, num_warps=4, maxnreg=MOST_REGISTERS,
    )  # fmt: skip


def dots_at_labels(head: Head, labels: Tensor) -> Tensor:
    """[N] fp32: the raw logit at each token's label."""
    x, w = head.input, head.weight
    count, hidden = x.shape
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    dtype = triton.language.dtype(_TRITON[head.dtype])
    width, height = (64, hidden) if INTERPRETED else (1, min(hidden, 2048))
    height = next_power_of_2(height)
    with on_device(x.device):
        kernels.dots_at_labels[(cdiv(count, width),)](
            x, x.stride(0), x.stride(1), w, w.stride(0), w.stride(1), labels, count, hidden, out,
            DTYPE=dtype, BN=width, BH=height, num_warps=4, maxnreg=MOST_REGISTERS,
        )  # fmt: skip
    return out


def scaled(
    gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...], upstream: Upstream
) -> tuple[Tensor | None, ...]:
    """Gradients that a forward formed, times a scalar that the host never sees."""
    scalar = upstream.scalar
    assert scalar is not None
    wanted = tuple(g if need else None for g, need in zip(gradients, needs, strict=True))
    with on_device(scalar.device):
        for g in wanted:
            if g is not None:
                programs = min(1056, cdiv(g.numel(), 4096))
                kernels.scale_in_place[(programs,)](g, g.numel(), scalar, programs, B=4096, num_warps=8)
    return wanted
