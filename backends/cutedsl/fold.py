"""What becomes of logits in registers: transformed, looked at for the label, folded into statistics of their token."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from headmux.backends.cutedsl import scalars
from headmux.backends.cutedsl.schedule import COLUMN

_WARP = 32
_LN2 = math.log(2.0)


class _Row(NamedTuple):
    """A row of a thread: its token, whether that exists, its slot, label and factor, and the statistics so far."""

    token: Int32
    slot: Int32
    there: cutlass.Boolean
    label: Int32
    scale: Float32
    top: Float32
    total: Float32
    moment: Float32


class Fold:
    """The epilogue of one configuration, and how slots become results. Attributes are those of ``Forward``.

    Attributes:
        label: Whether tokens have labels.
    """

    label = True

    def __init__(self, *, bias: bool, softcap: bool, entropy: bool, per_token: bool):
        self.bias, self.softcap, self.entropy, self.per_token = bias, softcap, entropy, per_token

    @cute.jit
    def rows(
        self,
        first: Int32,
        slot: Int32,
        step: Int32,
        fresh: cutlass.Boolean,
        tokens: Int32,
        target: cute.Tensor | None,
        factors: cute.Tensor | None,
        factor: Float32,
        partials: cute.Tensor,
    ):
        """The two rows of a thread, 8 apart, of the 16 from token ``first`` on. Four neighbouring threads share them.

        ``slot`` is the place of the first token's slot, ``step`` the distance to the next token's.
        """
        lane = cute.arch.lane_idx()
        found = []
        for r in range_constexpr(2):
            offset = lane // 4 + 8 * r
            token, place = first + offset, slot + offset * step
            there = token < tokens
            mark, scale = Int32(-1), factor
            if there:
                if const_expr(self.label):
                    mark = Int32(target[token])
                if const_expr(self.per_token):
                    scale = factors[token]
            top, total, moment = Float32(scalars.LOWEST), Float32(0.0), Float32(0.0)
            if lane % 4 == 0 and there and not fresh:
                top, total = partials[0, place], partials[1, place]
                if const_expr(self.entropy):
                    moment = partials[2, place]
            found.append(_Row(token, place, there, mark, scale, top, total, moment))
        return tuple(found)

    @cute.jit
    def transformed(
        self, z: cute.Tensor, rows: tuple, bias: cute.Tensor | None, inner: Float32, column: Int32, vocabulary: Int32
    ):
        """Products become logits, up to the factors of the two rows that are returned; where there is no column,
        such as are below every logit.
        """
        if const_expr(self.bias):  # nor is it kept for other rows
            column = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[column])
        first = column + 2 * (cute.arch.lane_idx() % 4)
        pairs = cute.size(z, mode=[2])
        scales = [row.scale for row in rows]
        if const_expr(self.bias or self.softcap):
            for j in range_constexpr(pairs):
                if const_expr(self.bias and j % 4 == 0):
                    cute.arch.sync_warp()  # so that no more of it is loaded ahead than there are registers for
                for q in range_constexpr(2):
                    shift = Float32(0.0)
                    if const_expr(self.bias):
                        shift = bias[first + 8 * j + q]
                    for r in range_constexpr(2):
                        y = cute.math.fma(z[q, r, j], inner, shift)
                        if const_expr(self.softcap):  # tanh(a) = 1 - 2 / (1 + e^2a)
                            y = cute.math.fma(Float32(-2.0), cute.arch.rcp_approx(1.0 + scalars.exp2(y)), Float32(1.0))
                        else:
                            y = y * scales[r]
                        z[q, r, j] = y
            if const_expr(not self.softcap):  # then z - top is exact, however large a masked logit
                scales = [Float32(1.0)] * 2
        if column + COLUMN > vocabulary:
            for j in range_constexpr(pairs):
                for q in range_constexpr(2):
                    if first + 8 * j + q >= vocabulary:
                        for r in range_constexpr(2):
                            z[q, r, j] = Float32(scalars.LOWEST)
        return scales

    @cute.jit
    def fold(
        self,
        z: cute.Tensor,  # (2, 2, COLUMN // 8): neighbouring columns, the two rows, columns 8 apart
        rows: tuple,
        bias: cute.Tensor | None,
        partials: cute.Tensor,
        logp: cute.Tensor,
        inner: Float32,
        column: Int32,
        vocabulary: Int32,
    ):
        """Fold the products of a thread, of a tile that starts at ``column``, into its two rows' slots."""
        lane = cute.arch.lane_idx()
        first = column + 2 * (lane % 4)
        pairs = cute.size(z, mode=[2])
        scales = self.transformed(z, rows, bias, inner, column, vocabulary)

        for r in range_constexpr(2):
            row, scale = rows[r], scales[r]
            mark = row.label - first
            if mark >= 0 and mark < COLUMN and mark % 8 < 2:
                found = Float32(0.0)
                for j in range_constexpr(pairs):
                    for q in range_constexpr(2):
                        if mark == 8 * j + q:
                            found = z[q, r, j]
                logp[row.token] = found * scale * _LN2

            top = self.top(z, r, scale)
            totals, moments = [Float32(0.0)] * 4, [Float32(0.0)] * 4
            for j in range_constexpr(pairs):
                for q in range_constexpr(2):
                    chain = 2 * (j % 2) + q
                    x = cute.math.fma(z[q, r, j], scale, -top)
                    e = scalars.exp2(x)
                    totals[chain] = totals[chain] + e
                    if const_expr(self.entropy):
                        x = cute.arch.fmax(x, Float32(scalars.UNDERFLOWN))
                        moments[chain] = cute.math.fma(e, x, moments[chain])
            total = (totals[0] + totals[1]) + (totals[2] + totals[3])
            moment = (moments[0] + moments[1]) + (moments[2] + moments[3])
            for i in range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
                if const_expr(self.entropy):
                    moment = moment + cute.arch.shuffle_sync_bfly(moment, offset=1 << i)

            self.into_slot(row, top, total, moment, partials)

    @cute.jit
    def top(self, z: cute.Tensor, r: cutlass.Constexpr, scale: Float32):
        """The largest exponent of a row's logits, of all four threads."""
        most = [z[q, r, 0] for q in range(2)] + [z[q, r, 1] for q in range(2)]
        for j in range_constexpr(2, cute.size(z, mode=[2])):
            for q in range_constexpr(2):
                chain = 2 * (j % 2) + q
                most[chain] = cute.arch.fmax(most[chain], z[q, r, j])
        top = cute.arch.fmax(cute.arch.fmax(most[0], most[1]), cute.arch.fmax(most[2], most[3]))
        for i in range_constexpr(2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
        return cute.arch.fmax(top * scale, Float32(scalars.LOWEST))

    @cute.jit
    def into_slot(self, row: _Row, top: Float32, total: Float32, moment: Float32, partials: cute.Tensor):
        """Statistics of a tile's row, which all four threads know, on top of those so far."""
        top, total, moment = scalars.combine(
            row.top, row.total, row.moment, top, total, moment, self.entropy
        )
        if cute.arch.lane_idx() % 4 == 0 and row.there:
            partials[0, row.slot] = top
            partials[1, row.slot] = total
            if const_expr(self.entropy):
                partials[2, row.slot] = moment

    @cute.jit
    def merge(
        self,
        token: Int32,
        slot: Int32,
        slots: Int32,
        vocabulary: Int32,
        partials: cute.Tensor,
        target: cute.Tensor,
        ignore: Int64,
        ignores: Int32,
        logp: cute.Tensor,
        lse: cute.Tensor,
        entropy: cute.Tensor | None,
    ):
        """Results of a token, by a warp, from so many slots at ``slot``. ``logp`` holds the label's logit before."""
        top, total, moment = self.total(slot, slots, partials)
        if cute.arch.lane_idx() == 0:
            bits = cute.math.log2(total)
            all_logits = (top + bits) * _LN2
            uncertainty = Float32(0.0)
            if const_expr(self.entropy):
                uncertainty = (bits - moment / total) * _LN2
            label = target[token]
            chosen = Float32(float("nan"))
            if label >= 0 and label < vocabulary:
                chosen = logp[token] - all_logits
            if ignores != 0 and label == ignore:
                chosen, all_logits, uncertainty = Float32(0.0), Float32(0.0), Float32(0.0)
            logp[token] = chosen
            lse[token] = all_logits
            if const_expr(self.entropy):
                entropy[token] = uncertainty

    @cute.jit
    def total(self, slot: Int32, slots: Int32, partials: cute.Tensor):
        """Statistics of a token, by a warp, from so many slots at ``slot``."""
        top, total, moment = Float32(scalars.LOWEST), Float32(0.0), Float32(0.0)
        for place in cutlass.range(slot + cute.arch.lane_idx(), slot + slots, _WARP, unroll=1):
            more = Float32(0.0)
            if const_expr(self.entropy):
                more = partials[2, place]
            top, total, moment = scalars.combine(
                top, total, moment, partials[0, place], partials[1, place], more, self.entropy
            )
        for i in range_constexpr(5):
            other = [cute.arch.shuffle_sync_bfly(v, offset=1 << i) for v in (top, total, moment)]
            top, total, moment = scalars.combine(top, total, moment, *other, self.entropy)
        return top, total, moment
