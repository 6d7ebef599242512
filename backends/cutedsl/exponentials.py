"""Exponentials of logits, left for a gradient by the product that forms the logits, which are never written.

Where a token's gradient is a multiple of p - [j = y], it is one of e_j = exp(z_j - m) too, but at the label, where
minus the sum of the others stands. A tile's exponentials, [tokens, classes] in registers, leave by way of shared
memory, where they are transposed, into E [V, N].

m is a token's guess, the logit at its label, which is not above the logsumexp, unless a tile's logits lie so far above
that their sum would not stay small: then it is raised to the largest of them, for this tile and for those that follow
in its slot. ``used`` [V tiles, N] tells which m a tile used, and ``settle`` brings all to the largest. m / log 2 is an
integer, so that this rounds nothing.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from headmux.backends.cutedsl import labels, scalars
from headmux.backends.cutedsl.fold import Fold
from headmux.backends.cutedsl.schedule import COLUMN

PIECE = 64
"""Classes that leave at once."""

TOKENS = 64
"""Tokens that leave at once, half of a warpgroup's: 128 bytes of a row, the widest swizzle."""

PIECE_BYTES = PIECE * TOKENS * 2

BUFFERS = 3
"""Pieces of a warpgroup that may be on their way."""

_WARP, _WARPGROUP = 32, 128
_LN2 = math.log(2.0)
_SOME = 8


class Exponentials(Fold):
    """The epilogue that leaves exponentials, and how slots become results."""

    @cute.jit
    def guess(
        self,
        token: Int32,
        states: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        target: cute.Tensor,
        factors: cute.Tensor | None,
        counts: cute.Tensor,
        guess: cute.Tensor,
        inner: Float32,
        factor: Float32,
    ):
        """The logit at a token's label in units of log 2, rounded up, by a warp; 0 where the token does not count."""
        top, scale, label = Float32(0.0), factor, Int32(target[token])
        if counts[token] != 0.0:  # NaN, too, counts
            y = labels.product(states, token, weight, label)
            if const_expr(self.per_token):
                scale = factors[token]
            if const_expr(self.bias):
                y = cute.math.fma(y, inner, bias[label])
            top = cute.math.ceil(y * scale)
        if cute.arch.lane_idx() == 0:
            guess[token] = top

    @cute.jit
    def tops(self, rows: tuple, counts: cute.Tensor, guess: cute.Tensor):
        """m / log 2 of the two rows, at least the slot's, and whether they count; 0 where they do not."""
        tops, counted = [], []
        for r in range_constexpr(2):
            row = rows[r]
            top, counts_here = Float32(0.0), Int32(0)
            if row.there:
                top = guess[row.token]
                if counts[row.token] != 0.0:  # NaN, too, counts
                    counts_here = Int32(1)
            before = cute.arch.shuffle_sync(row.top, offset=cute.arch.lane_idx() // 4 * 4)
            tops.append(scalars.larger(top, before))
            counted.append(counts_here)
        return (*tops, *counted)

    @cute.jit
    def keep(
        self,
        z: cute.Tensor,  # as ``Fold.fold`` has it
        rows: tuple,
        tops: tuple,  # what ``tops`` returns
        bias: cute.Tensor | None,
        partials: cute.Tensor,
        logit: cute.Tensor,
        used: cute.Tensor,
        inner: Float32,
        column: Int32,
        vocabulary: Int32,
    ):
        """Fold a tile's exponentials, but those at labels, into their rows' slots; the exponentials in bfloat16, 0 at
        labels and where a token does not count: (2 rows, pairs of neighbouring columns).
        """
        lane = cute.arch.lane_idx()
        first = column + 2 * (lane % 4)
        pairs = cute.size(z, mode=[2])
        scales = self.transformed(z, rows, bias, inner, column, vocabulary)
        for r in range_constexpr(2):
            if tops[2 + r] == 0:  # states that do not count may be NaN
                for j in range_constexpr(pairs):
                    for q in range_constexpr(2):
                        z[q, r, j] = Float32(scalars.LOWEST)
            mark = rows[r].label - first
            if mark >= 0 and mark < COLUMN and mark % 8 < 2:
                found = Float32(0.0)
                for j in range_constexpr(pairs):
                    for q in range_constexpr(2):
                        if mark == 8 * j + q:
                            found = z[q, r, j]
                            z[q, r, j] = Float32(scalars.LOWEST)
                logit[rows[r].token] = found * scales[r]

        found = cute.make_rmem_tensor((2, pairs), Int32)
        for r in range_constexpr(2):
            row, top = rows[r], scalars.raised(tops[r], self.top(z, r, scales[r]))
            totals = [Float32(0.0)] * 4
            for j in range_constexpr(pairs):
                e = [scalars.exp2(cute.math.fma(z[q, r, j], scales[r], -top)) for q in range(2)]
                for q in range_constexpr(2):
                    totals[2 * (j % 2) + q] = totals[2 * (j % 2) + q] + e[q]
                found[r, j] = scalars.pair(e[0], e[1], cutlass.BFloat16)
            total = (totals[0] + totals[1]) + (totals[2] + totals[3])
            for i in range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
            if lane % 4 == 0 and row.there:
                used[column // COLUMN, row.token] = top
                top, total, _ = scalars.combine(
                    row.top, row.total, Float32(0.0), top, total, Float32(0.0), False
                )
                partials[0, row.slot] = top
                partials[1, row.slot] = total
        return found

    @cute.jit
    def leave(
        self,
        e: cute.Tensor,  # what ``keep`` returns
        shared: Int32,
        atom: cute.CopyAtom,
        buffers: cute.Tensor,
        places: cute.Tensor,
        column: Int32,
        tokens: Int32,
        consumer: Int32,
    ):
        """Copy exponentials of a warpgroup, [64 tokens, COLUMN classes], into E, piece by piece.

        Args:
            e: What ``keep`` returns.
            shared: Address of all buffers.
            atom: The copy.
            buffers: [elements of a piece, buffers of all warpgroups] in shared memory.
            places: [elements of a piece, pieces of the vocabulary, blocks of 64 tokens] of E.
            column: Which column of vocabulary rows.
            tokens: Which block of 64 tokens.
            consumer: Which warpgroup.
        """
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx() % 4)
        start = shared + consumer * (BUFFERS * PIECE_BYTES) + scalars.stored_at(lane, warp)
        for piece in range_constexpr(COLUMN // PIECE):
            buffer = piece % BUFFERS
            if warp == 0:  # what it held before has been read
                cute.arch.cp_async_bulk_wait_group(BUFFERS - 1, read=True)
            cute.arch.barrier(barrier_id=consumer + 1, number_of_threads=_WARPGROUP)
            for i in range_constexpr(PIECE // 16):
                j = piece * (PIECE // 8) + 2 * i
                cute.arch.inline_ptx(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[
                        start + (buffer * PIECE_BYTES + i * 16 * TOKENS * 2), e[0, j], e[1, j], e[0, j + 1], e[1, j + 1]
                    ],
                )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=consumer + 1, number_of_threads=_WARPGROUP)
            if warp == 0:
                cute.copy(
                    atom,
                    buffers[(None, consumer * BUFFERS + buffer)],
                    places[(None, column * (COLUMN // PIECE) + piece, tokens)],
                )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def statistics(
        self,
        token: Int32,
        slot: Int32,
        slots: Int32,
        partials: cute.Tensor,
        counts: cute.Tensor,
        logit: cute.Tensor,
        lse: cute.Tensor,
        found: cute.Tensor,
    ):
        """Results of a token, by a warp, from so many slots at ``slot``. ``logit`` holds the label's in bits before.

        ``found`` [3, N] gets the largest m / log 2, the sum of the exponentials but the label's, and what makes
        p - [j = y] of them.
        """
        top, total = Float32(scalars.LOWEST), Float32(0.0)
        for place in cutlass.range(slot + cute.arch.lane_idx(), slot + slots, _WARP, unroll=1):
            top, total, _ = scalars.combine(
                top, total, Float32(0.0), partials[0, place], partials[1, place], Float32(0.0), False
            )
        for i in range_constexpr(5):
            other = [cute.arch.shuffle_sync_bfly(v, offset=1 << i) for v in (top, total)]
            top, total, _ = scalars.combine(top, total, Float32(0.0), *other, Float32(0.0), False)
        if cute.arch.lane_idx() == 0:
            at_label = logit[token]
            all_logits, factor = scalars.with_label(
                top, total, total.to(cutlass.BFloat16).to(Float32), at_label
            )
            if counts[token] == 0.0:
                at_label, all_logits, factor, total = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
            logit[token] = at_label * _LN2
            lse[token] = all_logits * _LN2
            found[0, token] = top
            found[1, token] = total
            found[2, token] = factor

    @cute.jit
    def settle(
        self,
        token: Int32,
        column: Int32,
        held: cute.Tensor,
        target: cute.Tensor,
        used: cute.Tensor,
        found: cute.Tensor,
    ):
        """Exponentials of a token in a column against the largest m, and at the label minus the sum of the others."""
        low = column * COLUMN
        high = low + COLUMN
        if high > held.shape[0]:
            high = Int32(held.shape[0])
        mine, top = used[column, token], found[0, token]
        if top > mine:
            share = scalars.exp2(mine - top)
            some = cute.make_rmem_tensor(_SOME, Float32)
            for first in cutlass.range(low, high, _SOME, unroll=1):
                for i in range_constexpr(_SOME):  # all are on their way before the first is needed
                    some[i] = Float32(0.0)
                    if first + i < high:
                        some[i] = held[first + i, token].to(Float32)
                for i in range_constexpr(_SOME):
                    if first + i < high:
                        held[first + i, token] = (some[i] * share).to(held.element_type)
        label = Int32(target[token])
        if label >= low and label < high:
            held[label, token] = (0.0 - found[1, token]).to(held.element_type)


def shared_layout(dtype: type, consumers: int):
    """Layout of all buffers in shared memory: (classes, tokens, buffers)."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (PIECE, TOKENS, consumers * BUFFERS), order=(0, 1, 2))


def copies(held: cute.Tensor, layout: cute.ComposedLayout):
    """The copy of a piece into E, and E as that takes it."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), held, cute.slice_(layout, (None, None, 0)), (PIECE, TOKENS)
    )


def partition(atom: cute.CopyAtom, shared: cute.Tensor, held: cute.Tensor):
    """``buffers`` and ``places`` of ``Exponentials.leave``."""
    tiles = cute.local_tile(held, (PIECE, TOKENS), (None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
