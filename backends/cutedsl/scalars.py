"""Scalar arithmetic of the kernels. Without a launch in them, these functions run on a CPU too."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from headmux.backends.cutedsl.schedule import CLUSTER, TOKENS

LOWEST = -3.0e38
"""Largest exponent of no logits: below every logit, and finite, so that differences are never NaN."""

MOST = 40.0
"""The largest exponent. Sums of such powers, and products with their inverse, stay far inside fp32 and bf16."""

UNDERFLOWN = -1.0e4
"""An exponent whose power is 0, to multiply a power with."""


@cute.jit
def exp2(x: Float32) -> Float32:
    """2^x by the special-function unit."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def raised(guess: Float32, peak: Float32) -> Float32:
    """What exponentials are measured against: a guess or, where their largest exponent lies far above, that."""
    top = guess
    if peak > guess + MOST:
        top = cute.math.ceil(peak)
    return top


@cute.jit
def larger(x: Float32, y: Float32) -> Float32:
    """The larger of two numbers. Unlike ``cute.arch.fmax``, which is faster, it runs on a CPU."""
    found = x
    if y > x:
        found = y
    return found


@cute.jit
def tile_at(number: Int32, rank: Int32, blocks: Int32, columns: Int32, group: Int32):
    """Token block and column of a thread block's tile, see headmux.backends.cutedsl.schedule.

    ``rank`` is the thread block's place in its cluster. In a half block the column may be one too many.
    """
    per_group = group * columns
    first = number // per_group * group
    height = blocks - first
    if height > group:
        height = group
    rest = number % per_group
    if number >= blocks * columns:
        first, height, rest = blocks, Int32(1), (number - blocks * columns) * CLUSTER + rank
    return first + rest % height, rest // height


@cute.jit
def slots_of(
    block: Int32, blocks: Int32, columns: Int32, group: Int32, period: Int32, last_period: Int32, slots: Int32,
    workers: Int32,
):
    """The place of a token block's first slot, the step from a token to the next, and after how many columns a slot
    is used again. Slots of a token lie side by side.
    """
    step, again = slots, period
    if block >= (blocks - 1) // group * group:
        again = last_period
    if block >= blocks:
        step, again = workers * CLUSTER, workers * CLUSTER
    return block * (CLUSTER * TOKENS * slots), step, again


@cute.jit
def combine(
    top: Float32, total: Float32, moment: Float32, top2: Float32, total2: Float32, moment2: Float32,
    entropy: cutlass.Constexpr,
):
    """Statistics of two sets of logits together.

    ``top`` is the largest exponent x, ``total`` the sum of 2^(x - top), ``moment`` that of 2^(x - top) * (x - top).
    """
    most = larger(top, top2)
    down, down2 = top - most, top2 - most
    factor, factor2 = exp2(down), exp2(down2)
    if cutlass.const_expr(entropy):
        moment = moment + total * larger(down, Float32(UNDERFLOWN))
        moment2 = moment2 + total2 * larger(down2, Float32(UNDERFLOWN))
        moment = moment * factor + moment2 * factor2
    return most, total * factor + total2 * factor2, moment


@cute.jit
def with_label(top: Float32, others: Float32, stored: Float32, exact: Float32):
    """Logsumexp in units of log 2, and what makes p - [j = y] of exponentials.

    ``others`` is the sum of all exponentials 2^(x - top) but the label's, ``stored`` the same rounded, as it stands,
    negative, in place of the label's exponential, ``exact`` the label's x. What is stored becomes exactly p - 1.
    """
    peak, share = larger(top, exact), Float32(0.0)
    if others == 0.0:  # then nothing may be measured against a guess
        peak = exact
    else:
        share = exp2(top - peak)
    total = share * others + exp2(exact - peak)
    factor = share / total
    if stored > 0.0:
        factor = factor * (others / stored)
    return peak + cute.math.log2(total), factor


@cute.jit
def mixture(d: Float32, teacher: Float32, student: Float32):
    """Of p and q = p * 2^d, the smaller over the larger, and the logarithm to base 2 of m over the larger.

    m is ``teacher * p + student * q``. No sum cancels, and nothing overflows.
    """
    share = exp2(-cute.math.abs(d))
    near, far = teacher, student
    if d > 0.0:
        near, far = student, teacher
    return share, cute.math.log2(cute.math.fma(far, share, near), fastmath=True)


@cute.jit
def against_mixture(log_q: Float32, log_p: Float32, d: Float32, teacher: Float32, student: Float32):
    """q * log2(q / m) and p * log2(p / m), from logarithms to base 2, see ``mixture``.

    d, their difference, is given apart, for it may be known better.
    """
    share, bits = mixture(d, teacher, student)
    most = log_p
    if d > 0.0:
        most = log_q
    large = exp2(most)
    of_large, of_small = -large * bits, -(large * share) * (cute.math.abs(d) + bits)
    of_q, of_p = of_small, of_large
    if d > 0.0:
        of_q, of_p = of_large, of_small
    return of_q, of_p


@cute.jit
def gradient(log_q: Float32, d: Float32, teacher: Float32, student: Float32, slope: Float32, offset: Float32):
    """q * (log2(q / m) * slope + offset)."""
    _, bits = mixture(d, teacher, student)
    return exp2(log_q) * cute.math.fma(cute.math.min(d, Float32(0.0)) - bits, slope, offset)


@cute.jit
def pair(x: Float32, y: Float32, dtype: cutlass.Constexpr) -> Int32:
    """Two numbers in bfloat16 or float16, rounded to nearest even, x in the lower half."""
    kind = "bf16x2" if cutlass.const_expr(dtype is cutlass.BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[y, x]
    )


@cute.jit
def covered(stop: Int32, start: Int64, wide: Int64, narrow: Int64) -> Int32:
    """How many rows of a second matrix begin before the end of so many rows of a first, in the same storage.

    The second begins ``start`` bytes after the first; their rows are ``narrow`` and ``wide`` bytes apart.
    """
    over = stop * wide - start
    if over < 0:
        over = Int64(0)
    return Int32((over + narrow - 1) // narrow)


@cute.jit
def stored_at(lane: Int32, warp: Int32) -> Int32:
    """Where a lane's 16 bytes go, from the start of a piece of [64 classes, 64 tokens], of the first 16 classes.

    Four transposed 8 x 8 matrices are stored at once: tokens 0 to 7 and 8 to 15 of the warp's 16 with classes 0 to 7,
    then with 8 to 15. A lane tells the place of one class and 8 tokens. Rows are 128 bytes, whose 16-byte parts are
    swizzled.
    """
    row, half, more = lane % 8, lane // 8 % 2, lane // 16
    return (8 * more + row) * 128 + ((2 * warp + half) ^ row) * 16
