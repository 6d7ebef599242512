"""Scalar arithmetic of the kernels. Without a launch in them, these functions run on a CPU too."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from headmux.backends.cutedsl.schedule import CLUSTER, TOKENS

LOWEST = -3.0e38
"""Largest exponent of no logits: below every logit, and finite, so that differences are never NaN."""

UNDERFLOWN = -1.0e4
"""An exponent whose power is 0, to multiply a power with."""


@cute.jit
def exp2(x: Float32) -> Float32:
    """2^x by the special-function unit."""
    return cute.math.exp2(x, fastmath=True)


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
    clusters: Int32,
):
    """The place of a token block's first slot, the step from a token to the next, and after how many columns a slot
    is used again. Slots of a token lie side by side.
    """
    step, again = slots, period
    if block >= (blocks - 1) // group * group:
        again = last_period
    if block >= blocks:
        step, again = clusters * CLUSTER, clusters * CLUSTER
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
