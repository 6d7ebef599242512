"""Logits, left by the product that forms them, with the two parts of their log-sum-exp.

Four times 8 neighbouring threads of a warp hold 8 neighbouring tokens of a class each, so that plain stores into
[V, n], token index last, fill 32-byte sectors.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from headmux.backends.cutedsl import scalars
from headmux.backends.cutedsl.fold import Fold

_BYTES = 4


class Logits(Fold):
    """The epilogue that leaves logits in units of log 2, and how slots become results."""

    label = False

    @cute.jit
    def store(
        self,
        z: cute.Tensor,  # as ``Fold.fold`` has it
        rows: tuple,
        bias: cute.Tensor | None,
        partials: cute.Tensor,
        held: cute.Tensor,
        inner: Float32,
        column: Int32,
        vocabulary: Int32,
    ):
        """Store the logits of a thread, of a tile that starts at ``column``, and fold them into its two rows' slots.

        ``held`` is [V, n].
        """
        pairs = cute.size(z, mode=[2])
        scales = self.transformed(z, rows, bias, inner, column, vocabulary)
        tops = []
        for r in range_constexpr(2):
            for j in range_constexpr(pairs):
                for q in range_constexpr(2):
                    y = z[q, r, j] * scales[r]
                    if const_expr(self.bias):  # of a masked class, it may be -inf
                        y = cute.arch.fmax(y, Float32(scalars.LOWEST), nan=True)
                    z[q, r, j] = y
            tops.append(self.top(z, r, Float32(1.0)))

        first = column + 2 * (cute.arch.lane_idx() % 4)
        left = [Int32(0)] * 2  # how many classes from the first on are to be stored
        for r in range_constexpr(2):
            if rows[r].there:
                left[r] = vocabulary - first
        step = Int64(held.stride[0]) * _BYTES
        place = held.iterator.toint() + Int64(first) * step + Int64(rows[0].token) * _BYTES
        totals = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for j in range_constexpr(pairs):
            for q in range_constexpr(2):
                chain = 2 * (j % 2) + q
                for r in range_constexpr(2):
                    cute.arch.inline_ptx(
                        f"st.global.f32 [{{$r0}}+{8 * r * _BYTES}], {{$r1}};",
                        read_only_args=[place + q * step, z[q, r, j]],
                        predicate=8 * j + q < left[r],
                    )
                    totals[r][chain] = totals[r][chain] + scalars.exp2(z[q, r, j] - tops[r])
            place = place + 8 * step
        for r in range_constexpr(2):
            total = (totals[r][0] + totals[r][1]) + (totals[r][2] + totals[r][3])
            for i in range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            self.into_slot(rows[r], tops[r], total, Float32(0.0), partials)

    @cute.jit
    def logsumexp(self, token: Int32, slot: Int32, slots: Int32, partials: cute.Tensor, lse: cute.Tensor):
        """That of a token in units of log 2, by a warp, from so many slots at ``slot``: the largest logit, and the
        logarithm of the sum of exponentials against it.
        """
        top, total, _ = self.total(slot, slots, partials)
        if cute.arch.lane_idx() == 0:
            lse[0, token] = top
            lse[1, token] = cute.math.log2(total)
