"""Triton kernels over logits kept token index last, S [V, n] with row stride ``stride``, raw as the GEMM left them.

``transformed`` turns raw logits into what the softmax sees. Loads go to fp32 at once and stores round to nearest even in
the interpreter too, whose own bf16 arithmetic is wrong and whose bf16 stores truncate.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def _stored(x, pointer):
    """x in the dtype behind a pointer, rounded to nearest even."""
    if _INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(tl.bfloat16)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def _transformed(raw, bias, scale, softcap, divisor, HAS_SOFTCAP: tl.constexpr):
    """scale * (raw + bias), softcap, divided: the logits' transform. tanh(x) = 2 sigmoid(2 x) - 1."""
    z = (raw + bias) * scale
    if HAS_SOFTCAP:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return z / divisor


@triton.jit
def look(
    S, stride, n, V, bias_ptr, divisor_ptr, weight_ptr, scale, softcap, divisor,
    top_ptr, sum_ptr, moment_ptr, smoothed_ptr, best_ptr, rows,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DIVISORS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ENTROPY: tl.constexpr, SMOOTHED: tl.constexpr, BEST: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial statistics of ``rows`` vocabulary rows for BN tokens: [parts, n] maxima, sums of exponentials, ...

    Maxima and sums are kept for each of BV x BN places apart, so that nothing crosses threads before the end, and one
    exponential serves both ways a maximum can go.
    """
    columns = tl.cdiv(n, BN)
    part = tl.program_id(0) // columns
    c = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    here = c < n
    r = tl.arange(0, BV)
    low = part * rows
    high = tl.minimum(low + rows, V)
    if HAS_DIVISORS:
        divisor = tl.load(divisor_ptr + c, mask=here, other=1.0)[None, :]
    top = tl.full((BV, BN), _LOWEST, tl.float32)
    total = tl.zeros((BV, BN), tl.float32)
    moment = tl.zeros((BV, BN), tl.float32)
    smoothed = tl.zeros((BV, BN), tl.float32)
    best = tl.zeros((BV, BN), tl.int32)
    for v in range(low, high, BV):
        row = v + r
        inside = (row < high)[:, None] & here[None, :]
        raw = tl.load(S + row[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + row, mask=row < high, other=0.0).to(tl.float32)[:, None]
        z = _transformed(raw, bias, scale, softcap, divisor, HAS_SOFTCAP)
        if SMOOTHED:
            if HAS_WEIGHTS:
                smoothed += tl.where(inside, z * tl.load(weight_ptr + row, mask=row < high, other=0.0)[:, None], 0.0)
            else:
                smoothed += tl.where(inside, z, 0.0)
        known = tl.where(inside, z, 0.0)
        z = tl.where(inside, z, float("-inf"))
        e = _exp(-tl.abs(z - top))
        rises = z > top
        total = tl.where(rises, total * e + 1.0, total + e)
        if ENTROPY:
            moment = tl.where(rises, moment * e + known, moment + e * known)
        if BEST:
            best = tl.where(rises, row[:, None], best)
        top = tl.where(rises, z, top)
    peak = tl.max(top, 0)
    share = _exp(top - peak[None, :])
    at = part.to(tl.int64) * n + c
    tl.store(top_ptr + at, peak, mask=here)
    tl.store(sum_ptr + at, tl.sum(total * share, 0), mask=here)
    if ENTROPY:
        tl.store(moment_ptr + at, tl.sum(moment * share, 0), mask=here)
    if SMOOTHED:
        tl.store(smoothed_ptr + at, tl.sum(smoothed, 0), mask=here)
    if BEST:
        tl.store(best_ptr + at, tl.min(tl.where(top == peak[None, :], best, 2147483647), 0), mask=here)


@triton.jit
def combine(
    S, stride, n, label_ptr, bias_ptr, divisor_ptr, scale, softcap, divisor,
    top_ptr, sum_ptr, moment_ptr, smoothed_ptr, best_ptr, parts,
    lse_ptr, at_label_ptr, entropy_ptr, smooth_ptr, index_ptr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DIVISORS: tl.constexpr,
    ENTROPY: tl.constexpr, SMOOTHED: tl.constexpr, BEST: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Statistics of BN tokens from their parts, merged in a fixed order, and the logit at each token's label."""
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    here = c < n
    p = tl.arange(0, BP)
    top = tl.full((BN,), _LOWEST, tl.float32)
    for first in range(0, parts, BP):
        at = (first + p)[:, None].to(tl.int64) * n + c[None, :]
        there = (first + p < parts)[:, None] & here[None, :]
        top = tl.maximum(top, tl.max(tl.load(top_ptr + at, mask=there, other=_LOWEST), 0))
    total = tl.zeros((BN,), tl.float32)
    moment = tl.zeros((BN,), tl.float32)
    smoothed = tl.zeros((BN,), tl.float32)
    best = tl.full((BN,), 2147483647, tl.int32)
    for first in range(0, parts, BP):
        at = (first + p)[:, None].to(tl.int64) * n + c[None, :]
        there = (first + p < parts)[:, None] & here[None, :]
        peak = tl.load(top_ptr + at, mask=there, other=_LOWEST)
        share = tl.where(there, _exp(peak - top[None, :]), 0.0)
        sums = tl.load(sum_ptr + at, mask=there, other=0.0)
        total += tl.sum(sums * share, 0)
        if ENTROPY:
            # sum of p * (z - top), which does not cancel as sum of p * z would
            found = tl.load(moment_ptr + at, mask=there, other=0.0)
            moment += tl.sum((found - sums * top[None, :]) * share, 0)
        if SMOOTHED:
            smoothed += tl.sum(tl.load(smoothed_ptr + at, mask=there, other=0.0), 0)
        if BEST:
            index = tl.load(best_ptr + at, mask=there, other=2147483647)
            best = tl.minimum(best, tl.min(tl.where(there & (peak == top[None, :]), index, 2147483647), 0))
    log_total = tl.log(total)
    label = tl.load(label_ptr + c, mask=here, other=0)
    raw = tl.load(S + label * stride + c, mask=here, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + label, mask=here, other=0.0).to(tl.float32)
    if HAS_DIVISORS:
        divisor = tl.load(divisor_ptr + c, mask=here, other=1.0)
    tl.store(at_label_ptr + c, _transformed(raw, bias, scale, softcap, divisor, HAS_SOFTCAP), mask=here)
    tl.store(lse_ptr + c, top + log_total, mask=here)
    if ENTROPY:
        tl.store(entropy_ptr + c, log_total - moment / total, mask=here)
    if SMOOTHED:
        tl.store(smooth_ptr + c, smoothed, mask=here)
    if BEST:
        tl.store(index_ptr + c, best.to(tl.int64), mask=here)


@triton.jit
def to_gradient(
    S, stride, n, V, label_ptr, bias_ptr, divisor_ptr, weight_ptr, scale, softcap, divisor,
    lse_ptr, softmax_ptr, at_label_ptr, entropy_ptr, smoothing_ptr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DIVISORS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ENTROPY: tl.constexpr, SMOOTHED: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """S becomes the gradient with respect to the raw logits, in place; formed in fp32 and rounded once."""
    columns = tl.cdiv(n, BN)
    row = (tl.program_id(0) // columns) * BV + tl.arange(0, BV)
    c = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    here = c < n
    inside = (row < V)[:, None] & here[None, :]
    if HAS_DIVISORS:
        divisor = tl.load(divisor_ptr + c, mask=here, other=1.0)[None, :]
    place = S + row[:, None].to(tl.int64) * stride + c[None, :]
    raw = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=row < V, other=0.0).to(tl.float32)[:, None]
    z = _transformed(raw, bias, scale, softcap, divisor, HAS_SOFTCAP)
    logp = z - tl.load(lse_ptr + c, mask=here, other=0.0)[None, :]
    p = _exp(logp)
    factor = tl.load(softmax_ptr + c, mask=here, other=0.0)[None, :]
    if ENTROPY:
        factor = factor + tl.load(entropy_ptr + c, mask=here, other=0.0)[None, :] * logp
    g = p * factor
    if SMOOTHED:
        spread = tl.load(smoothing_ptr + c, mask=here, other=0.0)[None, :]
        if HAS_WEIGHTS:
            spread = spread * tl.load(weight_ptr + row, mask=row < V, other=0.0)[:, None]
        g = g - spread
    label = tl.load(label_ptr + c, mask=here, other=0)
    g = tl.where(row[:, None] == label[None, :], g - tl.load(at_label_ptr + c, mask=here, other=0.0)[None, :], g)
    if HAS_SOFTCAP:
        t = z * divisor / softcap
        g = g * (1.0 - t * t)
    g = g * (scale / divisor)
    tl.store(place, _stored(g, S), mask=inside)


@triton.jit
def scale_in_place(X, count, scalar_ptr, programs, B: tl.constexpr):
    """X times a scalar on the device, without a pass over X when that is 1."""
    factor = tl.load(scalar_ptr).to(tl.float32)
    if factor != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * B, count, programs * B):
            at = first + tl.arange(0, B)
            x = tl.load(X + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(X + at, _stored(x * factor, X), mask=at < count)
