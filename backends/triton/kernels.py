"""Triton kernels over logits kept token index last, S [V, n] with row stride ``stride``, raw as a matrix product left
them. A logit is ``_bits`` of its raw value: the head's transform, in units of log 2, so that a softmax needs ``exp2``.

A tile is [rows, BN] with the tokens along a row of S: its rows stay within a thread, and so do all sums over them.
A row has places for ``width`` tokens, n and up to 15 more. What is in those of S is nobody's, to be loaded and written:
so no mask ends within a vector where n is not a multiple of 16, which would make single loads of it.

Loads go to fp32 at once and stores round to nearest even in the interpreter too, whose own bf16 arithmetic is wrong and
whose bf16 stores truncate. Optional pointers and numbers are None where there is none of them.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.0e38)
_MASKED = tl.constexpr(-1.0e30)
_NO_INDEX = tl.constexpr(2147483647)
# sums of exponentials of up to 2^40, and what is multiplied with their inverse, stay far inside fp32 and bf16
_MOST_BITS = tl.constexpr(40.0)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x in a dtype, rounded to nearest even."""
    if _INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x).to(tl.bfloat16)
    else:
        return x.to(DTYPE)


@triton.jit
def _inverse(divisors, inverse, c, here):
    """1 / temperature of tokens ``c``."""
    if divisors is None:
        return inverse
    else:
        return 1.0 / tl.load(divisors + c, mask=here, other=1.0)


@triton.jit
def _biased(raw, UNIT: tl.constexpr, bias, row, mask):
    """UNIT * raw plus the bias of classes ``row``; one of -inf masks a class, and stays finite."""
    z = raw * UNIT
    if bias is not None:
        z += tl.maximum(tl.load(bias + row, mask=mask, other=0.0).to(tl.float32), _MASKED)
    return z


@triton.jit
def _bits(z, scale, softcap, inverse):
    """softcap(scale * z) / temperature / log 2."""
    if softcap is None:
        return z * (scale * inverse * _LOG2E)
    else:
        return _tanh(z * (scale / softcap)) * (softcap * inverse * _LOG2E)


@triton.jit
def _tanh(x):
    """To fp32's precision: near 0 by its series, elsewhere from an exponential, which would cancel there."""
    square = x * x
    series = tl.fma(square, tl.fma(square, tl.fma(square, 0.0218694885, -0.0539682540), 0.1333333333), -0.3333333333)
    e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, tl.fma(x * square, series, x), tl.where(x < 0.0, -far, far))


@triton.jit
def _log2(x):
    """log2 by the special-function unit, to 2^-22."""
    if _INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _slope(z, scale, softcap):
    """1 - tanh^2, the softcap's part of a logit's derivative."""
    e = tl.exp2(tl.abs(z * (scale / softcap)) * (-2.0 * _LOG2E))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _share(n, width, V, rows, BN: tl.constexpr, FORTH: tl.constexpr):
    """Which part of the classes a program has, its first class and the one after its last, its tokens, whether there
    are those, and whether S has a place for them.

    Programs go forth, from the first classes on, or back: one that follows on another pass over the logits goes the
    other way, for what that has touched last is still in the second-level cache.
    """
    number = tl.program_id(0)
    if not FORTH:
        number = tl.num_programs(0) - 1 - number
    columns = tl.cdiv(n, BN)
    part = number // columns
    low = part * rows
    c = (number % columns) * BN + tl.arange(0, BN)
    return part, low, tl.minimum(low + rows, V), c, c < n, c < width


@triton.jit
def sort_labels(targets, ignored, n, V, index_out, valid_out, counts_out, BN: tl.constexpr):
    """See ``headmux.backends.common.labels.Labels``."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    here = c < n
    target = tl.load(targets + c, mask=here, other=0)
    counts = tl.where((target >= 0) & (target < V), 1.0, float("nan"))
    if ignored is not None:
        valid = target != ignored
        counts = tl.where(valid, counts, 0.0)
        tl.store(valid_out + c, valid, mask=here)
    tl.store(index_out + c, tl.minimum(tl.maximum(target, 0), V - 1), mask=here)
    tl.store(counts_out + c, counts, mask=here)


@triton.jit
def scale_rows(X, x_row, x_column, factors, n, H, out, BN: tl.constexpr, BH: tl.constexpr):
    """``out`` [n, H], contiguous, may be X: its rows times their factors, 0 where that is 0 whatever X holds."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :]
    factor = tl.load(factors + c, mask=c < n, other=0.0)[:, None]
    mask = (c < n)[:, None] & (h < H)
    x = tl.load(X + c[:, None].to(tl.int64) * x_row + h.to(tl.int64) * x_column, mask=mask & (factor != 0.0), other=0.0)
    y = tl.where(factor != 0.0, x.to(tl.float32) * factor, 0.0)
    tl.store(out + c[:, None].to(tl.int64) * H + h, _rounded(y, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "parts"])
def look(
    S, stride, n, width, V, labels, bias, divisors, weights, UNIT: tl.constexpr, scale, softcap, inverse,
    partials, rows, parts,
    ENTROPY: tl.constexpr, SMOOTHED: tl.constexpr, BEST: tl.constexpr, EVEN: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics of ``rows`` classes for BN tokens: ``partials`` [2 + ENTROPY + SMOOTHED + BEST, parts, n].

    The largest logit m, the sum of e = exp(z - m) and, if wanted, the sums of e * (z - m) and of z times its weight,
    and the first index of m. ``labels``, or None, are left out of all but the weighted sum: where the label's logit is
    to be another one, what the sums hold of it may be more than all the others, and cannot be subtracted. EVEN tells
    that ``rows`` and V are multiples of R.
    """
    part, low, high, c, here, held = _share(n, width, V, rows, BN, FORTH=False)
    inverse = _inverse(divisors, inverse, c, here)
    if divisors is not None:
        inverse = inverse[None, :]
    if labels is not None:
        label = tl.load(labels + c, mask=here, other=0)[None, :]
    top = tl.full((BN,), _LOWEST, tl.float32)
    total = tl.zeros((BN,), tl.float32)
    moment = tl.zeros((BN,), tl.float32)
    smoothed = tl.zeros((BN,), tl.float32)
    best = tl.full((BN,), _NO_INDEX, tl.int32)
    for v in tl.range(low, high, R, num_stages=STAGES):
        row = v + tl.arange(0, R)
        there = row < high
        mask = held[None, :]
        if not EVEN:
            mask = mask & there[:, None]
        raw = tl.load(S + row[:, None].to(tl.int64) * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        y = _bits(_biased(raw, UNIT, bias, row[:, None], there[:, None]), scale, softcap, inverse)
        if bias is not None:
            y = tl.maximum(y, _LOWEST)
        if SMOOTHED:
            weighted = y
            if weights is not None:
                weighted = y * tl.load(weights + row, mask=there, other=0.0)[:, None]
            if not EVEN:
                weighted = tl.where(mask, weighted, 0.0)
            smoothed += tl.sum(weighted, 0)
        if not EVEN:
            y = tl.where(mask, y, _LOWEST)
        if labels is not None:
            y = tl.where(row[:, None] == label, _LOWEST, y)
        peak = tl.maximum(top, tl.max(y, 0))
        if BEST:
            index = tl.min(tl.where(y == peak[None, :], row[:, None], _NO_INDEX), 0)
            best = tl.where(peak > top, index, best)
        distance = y - peak[None, :]
        e = tl.exp2(distance)
        if labels is not None:  # there may be nothing else; NaN stays
            e = tl.where(y <= _LOWEST, 0.0, e)
        share = tl.exp2(top - peak)
        if ENTROPY:
            moment = share * (moment + total * (top - peak)) + tl.sum(e * distance, 0)
        total = share * total + tl.sum(e, 0)
        top = peak
    plane = parts.to(tl.int64) * n
    at = partials + part.to(tl.int64) * n + c
    tl.store(at, top, mask=here)
    tl.store(at + plane, total, mask=here)
    if ENTROPY:
        tl.store(at + 2 * plane, moment, mask=here)
    if SMOOTHED:
        tl.store(at + (2 + ENTROPY) * plane, smoothed, mask=here)
    if BEST:
        tl.store(at + (2 + ENTROPY + SMOOTHED) * plane, best.to(tl.float32), mask=here)


@triton.jit(do_not_specialize=["rows", "parts"])
def exponentiate(
    S, stride, n, width, V, labels, valid, dots, bias, divisors, scale, inverse, partials, rows, parts,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``rows`` classes of S become exponentials exp(z - m), in place, 0 where a token is not valid; ``partials``
    [2, parts, n] get m / log 2 and the sums of the exponentials but that of the label.

    m is the logit at the label, of the raw logit in ``dots`` [n], which is never above the logsumexp, unless another
    lies so far above it that its exponential would not fit: then m is raised to that logit, and what the program has
    stored for that token is scaled down. m / log 2 is rounded to an integer, so that scaling is exact.
    """
    part, low, high, c, here, held = _share(n, width, V, rows, BN, FORTH=False)
    inverse = _inverse(divisors, inverse, c, here)
    counted = here
    if valid is not None:
        counted = tl.load(valid + c, mask=here, other=0) != 0
    label = tl.load(labels + c, mask=here, other=0).to(tl.int32)
    dot = tl.load(dots + c, mask=counted, other=0.0)
    top = _bits(_biased(dot, 1.0, bias, label, counted), scale, None, inverse)
    top = tl.ceil(tl.maximum(top, _LOWEST))
    if divisors is not None:
        inverse = inverse[None, :]
    total = tl.zeros((BN,), tl.float32)
    for v in range(low, high, R):
        row = v + tl.arange(0, R)
        there = row < high
        mask = held[None, :]
        known = counted[None, :]
        if not EVEN:
            mask = mask & there[:, None]
            known = known & there[:, None]
        place = S + row[:, None].to(tl.int64) * stride + c[None, :]
        raw = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        y = _bits(_biased(raw, 1.0, bias, row[:, None], there[:, None]), scale, None, inverse)
        if bias is not None:
            y = tl.maximum(y, _LOWEST)
        if valid is not None or not EVEN:
            y = tl.where(known, y, _LOWEST)
        # few tiles have a label or such a logit
        special = (tl.max(y, 0) > top + _MOST_BITS) | ((label - v).to(tl.uint32, bitcast=True) < R)
        if tl.max(special.to(tl.int32), 0) > 0:
            y = tl.where(row[:, None] == label[None, :], _LOWEST, y)
            peak = tl.ceil(tl.max(y, 0))
            higher = tl.where(here & (peak > top + _MOST_BITS), peak, top)
            if tl.max((higher > top).to(tl.int32), 0) > 0:
                share = tl.exp2(top - higher)
                total *= share
                top = higher
                before = S + low.to(tl.int64) * stride + c
                tl.debug_barrier()
                for _ in range(low, v):
                    e = tl.load(before, mask=here, other=0.0).to(tl.float32)
                    tl.store(before, _rounded(e * share, S.dtype.element_ty), mask=here)
                    before += stride
                tl.debug_barrier()
        e = tl.exp2(y - top[None, :])
        tl.store(place, _rounded(e, S.dtype.element_ty), mask=mask)
        total += tl.sum(e, 0)
    at = partials + part.to(tl.int64) * n + c
    tl.store(at, top, mask=here)
    tl.store(at + parts.to(tl.int64) * n, total, mask=here)


@triton.jit(do_not_specialize=["rows", "parts"])
def settle(
    S, stride, n, width, V, labels, partials, statistics, rows, parts,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Exponentials against one m for each token, which they are already unless one was raised, and at the label what
    makes them a multiple of p - [j = y]: minus the sum of the others. ``statistics`` as ``combine`` leaves them.
    """
    part, low, high, c, here, held = _share(n, width, V, rows, BN, FORTH=False)
    mine = tl.load(partials + part.to(tl.int64) * n + c, mask=here, other=0.0)
    top = tl.load(statistics + 3 * n + c, mask=here, other=0.0)
    if tl.max((top > mine).to(tl.int32), 0) > 0:
        share = tl.where(top > mine, tl.exp2(mine - top), 1.0)[None, :]
        for v in range(low, high, R):
            row = v + tl.arange(0, R)
            mask = held[None, :]
            if not EVEN:
                mask = mask & (row < high)[:, None]
            place = S + row[:, None].to(tl.int64) * stride + c[None, :]
            e = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            tl.store(place, _rounded(e * share, S.dtype.element_ty), mask=mask)
        tl.debug_barrier()
    label = tl.load(labels + c, mask=here, other=0)
    others = tl.load(statistics + 4 * n + c, mask=here, other=0.0)
    here = here & (label >= low) & (label < high)
    tl.store(S + label * stride + c, _rounded(-others, S.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["parts"])
def combine(
    partials, parts, n, S, stride, labels, valid, dots, bias, divisors, weights, UNIT: tl.constexpr, scale, softcap,
    inverse, out, best_out,
    EXPONENTIALS: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHED: tl.constexpr, BEST: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Statistics of BN tokens from their parts in a fixed order: without ``labels``, ``out`` [2, n] gets the largest
    logit m and the logarithm of the sum of exponentials against it, both / log 2. Else ``out`` [..., n] gets, 0 where a
    token is not valid, the logsumexp, the logit at the label and 1 - p there, those two, and what else is wanted.

    The logit at each label is that of the fp32 ``dots``, in place of the one that S holds. With ENTROPY the parts leave
    that one out. With EXPONENTIALS, the parts are those of ``exponentiate``, and in place of those two come its m, the
    sum of the exponentials but the label's, and the factor that makes p of an exponential, and exactly 1 - p of that
    sum as it is stored.
    """
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    here = c < n
    plane = parts.to(tl.int64) * n
    top = tl.full((BN,), _LOWEST, tl.float32)
    total = tl.zeros((BN,), tl.float32)
    moment = tl.zeros((BN,), tl.float32)
    smoothed = tl.zeros((BN,), tl.float32)
    best = tl.full((BN,), 0.0, tl.float32)
    for first in range(0, parts, BP):
        p = first + tl.arange(0, BP)
        at = partials + p[:, None].to(tl.int64) * n + c[None, :]
        mask = (p < parts)[:, None] & here[None, :]
        tops = tl.load(at, mask=mask, other=_LOWEST)
        sums = tl.load(at + plane, mask=mask, other=0.0)
        peak = tl.maximum(top, tl.max(tops, 0))
        distance = tops - peak[None, :]
        shares = tl.exp2(distance)
        share = tl.exp2(top - peak)
        if ENTROPY:
            moments = tl.load(at + 2 * plane, mask=mask, other=0.0)
            moment = share * (moment + total * (top - peak)) + tl.sum(shares * (moments + sums * distance), 0)
        total = share * total + tl.sum(shares * sums, 0)
        if SMOOTHED:
            smoothed += tl.sum(tl.load(at + (2 + ENTROPY) * plane, mask=mask, other=0.0), 0)
        if BEST:
            indices = tl.load(at + (2 + ENTROPY + SMOOTHED) * plane, mask=mask, other=0.0)
            index = tl.min(tl.where(mask & (tops == peak[None, :]), indices, float("inf")), 0)
            best = tl.where(peak > top, index, best)
        top = peak
    if labels is not None:
        label = tl.load(labels + c, mask=here, other=0)
        inverse = _inverse(divisors, inverse, c, here)
        if not EXPONENTIALS:
            held = tl.load(S + label * stride + c, mask=here, other=0.0).to(tl.float32)
            held = _bits(_biased(held, UNIT, bias, label, here), scale, softcap, inverse)
            if bias is not None:
                held = tl.maximum(held, _LOWEST)
        others = total
        if not (EXPONENTIALS or ENTROPY):
            others = tl.maximum(total - tl.exp2(held - top), 0.0)
        dot = tl.load(dots + c, mask=here, other=0.0)
        exact = _bits(_biased(dot, 1.0, bias, label, here), scale, softcap, inverse)
        if bias is not None:
            exact = tl.maximum(exact, _LOWEST)
        # where the label's logit as it was rounded was all there is, nothing may be measured against that
        alone = others == 0.0
        peak = tl.where(alone, exact, tl.maximum(top, exact))
        share = tl.where(alone, 0.0, tl.exp2(top - peak))
        instead = tl.exp2(exact - peak)
        if ENTROPY:
            moment = share * (moment + others * (top - peak)) + instead * (exact - peak)
        total = share * others + instead
        tl.store(out + n + c, _kept(exact * _LN2, valid, c, here), mask=here)
        tl.store(out + 2 * n + c, _kept(share * others / total, valid, c, here), mask=here)
        if EXPONENTIALS:
            stored = _rounded(others, S.dtype.element_ty).to(tl.float32)
            factor = share / total * tl.where(stored > 0.0, others / stored, 1.0)
            tl.store(out + 3 * n + c, _kept(top, valid, c, here), mask=here)
            tl.store(out + 4 * n + c, _kept(others, valid, c, here), mask=here)
            tl.store(out + 5 * n + c, _kept(factor, valid, c, here), mask=here)
        if SMOOTHED:
            weight = 1.0
            if weights is not None:
                weight = tl.load(weights + label, mask=here, other=0.0)
            smoothed += weight * (exact - held)
        top = peak
    log_total = tl.log2(total)
    if labels is None:
        tl.store(out + c, top, mask=here)
        tl.store(out + n + c, log_total, mask=here)
    else:
        tl.store(out + c, _kept((top + log_total) * _LN2, valid, c, here), mask=here)
        if not EXPONENTIALS:
            tl.store(out + 3 * n + c, _kept(top, valid, c, here), mask=here)
            tl.store(out + 4 * n + c, _kept(log_total, valid, c, here), mask=here)
        if ENTROPY:
            entropy = _kept((log_total - moment / total) * _LN2, valid, c, here)
            tl.store(out + 5 * n + c, entropy, mask=here)
        if SMOOTHED:
            tl.store(out + (5 + ENTROPY) * n + c, _kept(smoothed * _LN2, valid, c, here), mask=here)
    if BEST:
        tl.store(best_out + c, best.to(tl.int64), mask=here)


@triton.jit
def _kept(x, valid, c, here):
    """x, but 0 where a token is not valid."""
    if valid is None:
        return x
    else:
        return tl.where(tl.load(valid + c, mask=here, other=0) != 0, x, 0.0)


@triton.jit
def dots_at_labels(
    X, x_row, x_column, W, w_row, w_column, labels, n, H, out, DTYPE: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr
):
    """The fp32 product of each token's state with its label's row of the weight, both rounded to DTYPE."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    here = c < n
    x_start = X + c[:, None].to(tl.int64) * x_row
    w_start = W + tl.load(labels + c, mask=here, other=0)[:, None] * w_row
    total = tl.zeros((BN, BH), tl.float32)
    for first in range(0, H, BH):
        h = (first + tl.arange(0, BH))[None, :].to(tl.int64)
        mask = here[:, None] & (h < H)
        x = tl.load(x_start + h * x_column, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_start + h * w_column, mask=mask, other=0.0).to(tl.float32)
        total += _rounded(x, DTYPE).to(tl.float32) * _rounded(w, DTYPE).to(tl.float32)
    tl.store(out + c, tl.sum(total, 1), mask=here)


@triton.jit(do_not_specialize=["rows"])
def to_gradient(
    S, stride, n, width, V, labels, valid, bias, divisors, weights, UNIT: tl.constexpr, scale, softcap, inverse,
    dots, rest_lse, softmax, label_part, entropy, smoothing, rows,
    EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``rows`` classes of S become the gradient with respect to the raw logits, 0 where a token is not valid; formed in
    fp32 and rounded once.

    See ``headmux.backends.common.softmax.Coefficients``, of which ``softmax``, ``label_part``, ``entropy`` and
    ``smoothing`` are the parts. ``dots`` are the raw logits at the labels, ``rest_lse`` [3, n] is 1 - p there
    and the logsumexp in two numbers, as ``combine`` leaves them.
    """
    _, low, high, c, here, held = _share(n, width, V, rows, BN, FORTH=True)
    inverse = _inverse(divisors, inverse, c, here)
    top = tl.load(rest_lse + n + c, mask=here, other=0.0)
    log_total = tl.load(rest_lse + 2 * n + c, mask=here, other=0.0)
    factor = tl.load(softmax + c, mask=here, other=0.0)
    of_all = factor * tl.exp2(-log_total)  # without an entropy's gradient, log p itself is not needed
    slant = 0.0
    if entropy is not None:
        slant = tl.load(entropy + c, mask=here, other=0.0) * _LN2
    spread = 0.0
    if smoothing is not None:
        spread = tl.load(smoothing + c, mask=here, other=0.0)
    counted = here
    if valid is not None:
        counted = tl.load(valid + c, mask=here, other=0) != 0
    for v in tl.range(low, high, R, num_stages=STAGES):
        row = v + tl.arange(0, R)
        there = row < high
        mask = held[None, :]
        if not EVEN:
            mask = mask & there[:, None]
        place = S + row[:, None].to(tl.int64) * stride + c[None, :]
        raw = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        z = _biased(raw, UNIT, bias, row[:, None], there[:, None])
        across = inverse
        if divisors is not None:
            across = inverse[None, :]
        y = _bits(z, scale, softcap, across) - top[None, :]
        if entropy is None:
            g = tl.exp2(y) * of_all[None, :]
        else:
            logp = y - log_total[None, :]
            g = tl.exp2(logp) * (factor[None, :] + slant[None, :] * logp)
        if smoothing is not None:
            if weights is None:
                g -= spread[None, :]
            else:
                g -= spread[None, :] * tl.load(weights + row, mask=there, other=0.0)[:, None]
        if softcap is not None:
            g *= _slope(z, scale, softcap)
        g *= scale * across
        if valid is not None:
            g = tl.where(counted[None, :], g, 0.0)
        tl.store(place, _rounded(g, S.dtype.element_ty), mask=mask)

    label = tl.load(labels + c, mask=here, other=0)
    of_label = tl.load(label_part + c, mask=here, other=0.0)
    not_y = tl.load(rest_lse + c, mask=here, other=0.0)
    dot = tl.load(dots + c, mask=here, other=0.0)
    z_y = _biased(dot, 1.0, bias, label, here)
    # p * softmax - label, as a difference that does not cancel where p is near 1
    logp_y = (_bits(z_y, scale, softcap, inverse) - top) - log_total
    p_y = tl.where(not_y < 0.5, 1.0 - not_y, tl.exp2(logp_y))
    at_y = p_y * (factor - of_label) - not_y * of_label
    if entropy is not None:
        at_y += p_y * slant * tl.maximum(logp_y, _MASKED)
    if smoothing is not None:
        if weights is None:
            at_y -= spread
        else:
            at_y -= spread * tl.load(weights + label, mask=here, other=0.0)
    if softcap is not None:
        at_y *= _slope(z_y, scale, softcap)
    at_y = tl.where(counted, at_y * scale * inverse, 0.0)
    # the tile's own stores come first
    tl.debug_barrier()
    mine = here & (label >= low) & (label < high)
    tl.store(S + label * stride + c, _rounded(at_y, S.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["rows", "parts"])
def diverge(
    Q, P, stride, n, width, V, valid, q_bias, q_scale, q_softcap, p_bias, p_scale, p_softcap, inverse, q_lse, p_lse,
    beta, upstream, kl, out, out_stride, partials, rows, parts,
    TEACHER: tl.constexpr, STUDENT: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of ``rows`` classes and BN tokens, from raw fp32 logits of student (Q) and teacher (P), and of each what
    ``combine`` leaves without labels, M being their mixture:

    - TEACHER, STUDENT: sums of p * log(p / m) and q * log(q / m), into ``partials`` [TEACHER + STUDENT, parts, n];
    - with ``out``: the gradient with respect to the student's raw logits for ``upstream``, 0 where a token is not
      valid. Where beta is not 0 it needs ``kl`` [n], the student's whole sum.

    beta of 0 makes M the student, 1 the teacher.
    """
    part, low, high, c, here, held = _share(n, width, V, rows, BN, FORTH=TEACHER or STUDENT)
    q_top = tl.load(q_lse + c, mask=here, other=0.0)[None, :]
    p_top = tl.load(p_lse + c, mask=here, other=0.0)[None, :]
    q_total = tl.load(q_lse + n + c, mask=here, other=0.0)[None, :]
    p_total = tl.load(p_lse + n + c, mask=here, other=0.0)[None, :]
    shift = (q_top - p_top) + (q_total - p_total)
    if out is not None:
        chain = tl.load(upstream + c, mask=here, other=0.0)[None, :] * (q_scale * inverse)
        if beta is not None:
            chain *= 1.0 - beta
        counted = here[None, :]
        if valid is not None:
            counted = tl.load(valid + c, mask=here, other=0)[None, :] != 0
        if kl is not None:
            mean = tl.load(kl + c, mask=here, other=0.0)[None, :]
    sum_p = tl.zeros((BN,), tl.float32)
    sum_q = tl.zeros((BN,), tl.float32)
    for v in tl.range(low, high, R, num_stages=STAGES):
        row = v + tl.arange(0, R)
        there = row < high
        mask = held[None, :]
        if not EVEN:
            mask = mask & there[:, None]
        at = row[:, None].to(tl.int64) * stride + c[None, :]
        z = _biased(tl.load(Q + at, mask=mask, other=0.0), 1.0, q_bias, row[:, None], there[:, None])
        q_bits = _bits(z, q_scale, q_softcap, inverse)
        z_p = _biased(tl.load(P + at, mask=mask, other=0.0), 1.0, p_bias, row[:, None], there[:, None])
        p_bits = _bits(z_p, p_scale, p_softcap, inverse)
        if q_bias is not None:
            q_bits = tl.maximum(q_bits, _LOWEST)
        if p_bias is not None:
            p_bits = tl.maximum(p_bits, _LOWEST)
        log_q = (q_bits - q_top) - q_total
        log_p = (p_bits - p_top) - p_total
        d = (q_bits - p_bits) - shift
        if beta is None:  # one of them is the mixture
            of_p = -tl.exp2(log_p) * d
            of_q = tl.exp2(log_q) * d
            against = d
        else:
            # of p and q the smaller over the larger, and log2(m) less that of the larger: no sum cancels
            share = tl.exp2(-tl.abs(d))
            near = tl.where(d > 0.0, 1.0 - beta, beta)
            bits = _log2(tl.fma(1.0 - near, share, near))
            large = tl.exp2(tl.where(d > 0.0, log_q, log_p))
            of_large = -large * bits
            of_small = -(large * share) * (tl.abs(d) + bits)
            of_p = tl.where(d > 0.0, of_small, of_large)
            of_q = tl.where(d > 0.0, of_large, of_small)
            against = tl.minimum(d, 0.0) - bits
        if TEACHER:
            sum_p += tl.sum(of_p if EVEN else tl.where(mask, of_p, 0.0), 0)
        if STUDENT:
            sum_q += tl.sum(of_q if EVEN else tl.where(mask, of_q, 0.0), 0)
        if out is not None:
            g = tl.exp2(log_q)
            if kl is None:
                g -= tl.exp2(log_p)
            else:
                g *= against * _LN2 - mean  # as rounded as the mean: where they are the same, nothing is left
            g *= chain
            if q_softcap is not None:
                g *= _slope(z, q_scale, q_softcap)
            if valid is not None:
                g = tl.where(counted, g, 0.0)
            place = out + row[:, None].to(tl.int64) * out_stride + c[None, :]
            mine = here[None, :]  # other tokens' places may follow
            if not EVEN:
                mine = mine & there[:, None]
            tl.store(place, _rounded(g, out.dtype.element_ty), mask=mine)
    at_part = partials + part.to(tl.int64) * n + c
    if TEACHER:
        tl.store(at_part, sum_p * _LN2, mask=here)
    if STUDENT:
        tl.store(at_part + TEACHER * parts.to(tl.int64) * n, sum_q * _LN2, mask=here)


@triton.jit(do_not_specialize=["programs"])
def scale_in_place(X, count, scalar, programs, B: tl.constexpr):
    """X times a scalar on the device, without a pass over X when that is 1."""
    factor = tl.load(scalar).to(tl.float32)
    if factor != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * B, count, programs * B):
            at = first + tl.arange(0, B)
            x = tl.load(X + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(X + at, _rounded(x * factor, X.dtype.element_ty), mask=at < count)
