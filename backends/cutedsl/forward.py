"""Log-probability, logsumexp and entropy of a linear head's logits, which are never written: the kernels.

Where exponentials of the logits are kept for a gradient, the same product leaves them, see
headmux.backends.cutedsl.exponentials; where two heads are compared, the logits, see headmux.backends.cutedsl.logits.

A GEMM of 128 x 192 tiles, persistent and warp-specialised: one warp brings tiles in by TMA, the weight's by multicast
where both thread blocks of a cluster need it, and two warpgroups multiply by WGMMA in turn, see
headmux.backends.cutedsl.pingpong. A warpgroup reduces its logits in registers, row by row, and folds them into a slot
of ``partials`` that nobody else uses. A second kernel merges the slots of each token.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from headmux.backends.cutedsl import exponentials, pingpong, scalars
from headmux.backends.cutedsl.exponentials import Exponentials
from headmux.backends.cutedsl.fold import Fold
from headmux.backends.cutedsl.logits import Logits
from headmux.backends.cutedsl.pingpong import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    DEPTH,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP,
)
from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, STAGES, TOKENS

_WARP = 32
_HALVES = TOKENS // exponentials.TOKENS  # of a tile's tokens, each a row or two of every thread
_TOKEN_WARPS = 4  # of a thread block, with a token each

_SHARED_BYTES = 1024 + STAGES * (TOKENS + COLUMN) * DEPTH * 2
_SETTLE_THREADS, _SETTLE_COLUMNS = 128, 8


def shared_bytes(keep: bool) -> int:
    """Shared memory of a thread block: barriers, stages of 16-bit tiles, and exponentials on their way out."""
    return _SHARED_BYTES + (CONSUMERS * exponentials.BUFFERS * exponentials.PIECE_BYTES if keep else 0)


class Forward:
    """One configuration of the forward.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16, of states and weight.
        bias: Add a bias.
        softcap: Bound the logits.
        entropy: Also sum what the entropy needs.
        per_token: The factor of the logits is one per token.
        keep: Leave exponentials of the logits; in bfloat16, without softcap and entropy.
        store: Leave the logits; without labels and entropy.
    """

    def __init__(
        self, dtype: type, *, bias: bool, softcap: bool, entropy: bool, per_token: bool, keep: bool = False,
        store: bool = False,
    ):
        self.dtype, self.keep, self.store = dtype, keep, store
        kind = Exponentials if keep else Logits if store else Fold
        self.fold = kind(bias=bias, softcap=softcap, entropy=entropy, per_token=per_token)

    @cute.jit
    def __call__(
        self,
        states: cute.Tensor,  # [N, H]
        weight: cute.Tensor,  # [V, H]
        bias: cute.Tensor | None,  # [V, rounded up to whole tiles] fp32, times ``inner``
        target: cute.Tensor | None,  # [N] int64
        factors: cute.Tensor | None,  # [N] fp32
        partials: cute.Tensor,  # [2 or 3, slots of all tokens] fp32
        logp: cute.Tensor | None,  # [N] fp32
        lse: cute.Tensor,  # [N] fp32, [2, N] with ``store``
        entropy: cute.Tensor | None,  # [N] fp32
        held: cute.Tensor | None,  # [V, N], rows of neighbouring elements
        counts: cute.Tensor | None,  # [N] fp32, 0 for tokens that do not count
        guess: cute.Tensor | None,  # [N] fp32
        used: cute.Tensor | None,  # [V tiles, N] fp32
        found: cute.Tensor | None,  # [3, N] fp32
        inner: Float32,
        factor: Float32,
        ignore: Int64,
        ignores: Int32,
        group: Int32,
        period: Int32,
        last_period: Int32,
        slots: Int32,
        clusters: Int32,
        stream: CUstream,
    ):
        """Launch the kernels.

        The exponents whose powers of 2 are summed are ``factor * (inner * product + bias)`` or, with a softcap,
        ``factor * (1 - 2 / (1 + 2 ** (inner * product + bias)))``. ``factor`` is above 0.

        Results of tokens whose target is ``ignore`` are 0, if ``ignores`` is not; ``logp`` is NaN where a target is out
        of range. With ``keep`` all targets are in range, ``counts`` tells which do not count, ``guess`` gets what
        ``Exponentials.guess`` says, and ``logp`` the logits at the targets; ``held`` gets the exponentials of the
        others and what stands in place of the target's, ``found`` what ``Exponentials.statistics`` says. With
        ``store`` there are no targets; ``held`` gets those exponents in fp32, ``lse`` what ``Logits.logsumexp`` says.
        """
        mma = tiled_mma(self.dtype)
        layout_a, layout_b = (_stages(self.dtype, rows) for rows in (TOKENS, COLUMN))
        one_stage = (None, None, 0)
        atom_a, states_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), states, cute.slice_(layout_a, one_stage), (TOKENS, DEPTH)
        )
        # the weight's tile for the whole cluster, or for one thread block
        shared_b, own_b = (
            cpasync.make_tiled_tma_atom(
                op, weight, cute.slice_(layout_b, one_stage), (COLUMN, DEPTH), num_multicast=count
            )
            for op, count in (
                (cpasync.CopyBulkTensorTileG2SMulticastOp(), CLUSTER), (cpasync.CopyBulkTensorTileG2SOp(), 1)
            )
        )
        layout_e, atom_e, held_to = None, None, held
        if const_expr(self.keep):
            self.guess(states, weight, bias, target, factors, counts, guess, inner, factor).launch(
                grid=[cute.ceil_div(states.shape[0], _TOKEN_WARPS), 1, 1],
                block=[_TOKEN_WARPS * _WARP, 1, 1],
                min_blocks_per_mp=1,  # so that a thread has the registers for all of its loads
                stream=stream,
            )
            layout_e = exponentials.shared_layout(self.dtype, CONSUMERS)
            atom_e, held_to = exponentials.copies(held, layout_e)
        blocks = cute.ceil_div(states.shape[0], TOKENS) // CLUSTER
        columns = cute.ceil_div(weight.shape[0], COLUMN)
        self.logits(
            mma, atom_a, states_tma, *shared_b, *own_b, layout_a, layout_b, layout_e, atom_e, held_to, bias, target,
            factors, partials, logp, counts, guess, used, inner, factor, states.shape[0], blocks, columns, group,
            period, last_period, slots,
        ).launch(
            grid=[clusters * CLUSTER, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )
        self.merge(
            partials, target, logp, lse, entropy, counts, found, ignore, ignores, states.shape[0], weight.shape[0],
            blocks, columns, group, period, last_period, slots, CONSUMERS * clusters,
        ).launch(
            grid=[cute.ceil_div(states.shape[0], _TOKEN_WARPS), 1, 1],
            block=[_TOKEN_WARPS * _WARP, 1, 1],
            stream=stream,
        )
        if const_expr(self.keep):
            self.settle(held, target, used, found, columns).launch(
                grid=[cute.ceil_div(states.shape[0], _SETTLE_THREADS), cute.ceil_div(columns, _SETTLE_COLUMNS), 1],
                block=[_SETTLE_THREADS, 1, 1],
                stream=stream,
            )

    @cute.kernel
    def guess(
        self,
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
        """What the exponentials of a token are measured against at first, by a warp."""
        token = cute.arch.block_idx()[0] * _TOKEN_WARPS + cute.arch.warp_idx()
        if token < states.shape[0]:
            self.fold.guess(token, states, weight, bias, target, factors, counts, guess, inner, factor)

    @cute.kernel
    def logits(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        states: cute.Tensor,
        atom_b: cute.CopyAtom,
        weight: cute.Tensor,
        atom_own_b: cute.CopyAtom,
        own_weight: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_e: cute.ComposedLayout | None,
        atom_e: cute.CopyAtom | None,
        held: cute.Tensor | None,
        bias: cute.Tensor | None,
        target: cute.Tensor | None,
        factors: cute.Tensor | None,
        partials: cute.Tensor,
        logp: cute.Tensor | None,
        counts: cute.Tensor | None,
        guess: cute.Tensor | None,
        used: cute.Tensor | None,
        inner: Float32,
        factor: Float32,
        tokens: Int32,
        blocks: Int32,
        columns: Int32,
        group: Int32,
        period: Int32,
        last_period: Int32,
        slots: Int32,
    ):
        """Statistics of each token's logits, by slots."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = cute.arch.block_idx()[0] // CLUSTER
        clusters = cute.arch.grid_dim()[0] // CLUSTER
        whole = blocks * columns  # tiles of whole blocks
        tiles = whole
        if cute.ceil_div(tokens, TOKENS) % CLUSTER > 0:
            tiles += cute.ceil_div(columns, CLUSTER)

        if warp == 0:
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
            cpasync.prefetch_descriptor(atom_own_b)
            if const_expr(self.keep):
                cpasync.prefetch_descriptor(atom_e)

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]

        allocator = cutlass.memory.SmemAllocator()
        shared = allocator.allocate(Shared)
        shared_a = shared.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        shared_b = shared.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        if const_expr(self.keep):
            shared_e = allocator.allocate_tensor(
                self.dtype, layout_e.outer, byte_alignment=1024, swizzle=layout_e.inner
            )
            buffers, places = exponentials.partition(atom_e, shared_e, held)
            address = shared_e.iterator.toint()
        loads = pingpong.stages(shared.barriers.data_ptr(), (TOKENS + COLUMN) * DEPTH * self.dtype.width // 8)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cute.make_layout((CLUSTER, 1)), is_relaxed=True)

        # (rows, depth, row tiles, depth tiles)
        tiles_a = cute.local_tile(states, (TOKENS, DEPTH), (None, None))
        depth = cute.size(tiles_a, mode=[3])
        pipeline.pipeline_init_wait(cluster_shape_mn=cute.make_layout((CLUSTER, 1)))

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            to_a, from_a = cpasync.tma_partition(
                atom_a, 0, cute.make_layout(1), cute.group_modes(shared_a, 0, 2), cute.group_modes(tiles_a, 0, 2)
            )
            to_b, from_b = cpasync.tma_partition(
                atom_b, rank, cute.make_layout(CLUSTER), cute.group_modes(shared_b, 0, 2), _columns(weight)
            )
            to_own_b, from_own_b = cpasync.tma_partition(
                atom_own_b, 0, cute.make_layout(1), cute.group_modes(shared_b, 0, 2), _columns(own_weight)
            )
            everyone = cutlass.Int16((1 << CLUSTER) - 1)
            filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for number in cutlass.range(cluster, tiles, clusters, unroll=1):
                block, column = scalars.tile_at(number, rank, blocks, columns, group)
                row = block * CLUSTER
                if number < whole:
                    row += rank
                for k in cutlass.range(depth, unroll=1):
                    loads.producer_acquire(filled)
                    barrier = loads.producer_get_barrier(filled)
                    cute.copy(atom_a, from_a[(None, row, k)], to_a[(None, filled.index)], tma_bar_ptr=barrier)
                    if number < whole:
                        cute.copy(
                            atom_b, from_b[(None, column, k)], to_b[(None, filled.index)], tma_bar_ptr=barrier,
                            mcast_mask=everyone,
                        )
                    else:
                        cute.copy(
                            atom_own_b, from_own_b[(None, column, k)], to_own_b[(None, filled.index)],
                            tma_bar_ptr=barrier,
                        )
                    filled.advance()
            loads.producer_tail(filled)

        if warp >= 4:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
            operand_a, operand_b, accumulator = pingpong.fragments(mma, shared_a, shared_b)
            for number in cutlass.range(cluster + consumer * clusters, tiles, CONSUMERS * clusters, unroll=1):
                block, column = scalars.tile_at(number, rank, blocks, columns, group)
                mma = pingpong.multiply(
                    mma, accumulator, operand_a, operand_b, loads, depth, number // clusters, number + clusters < tiles,
                    consumer,
                )
                if column < columns:
                    slot, step, again = scalars.slots_of(
                        block, blocks, columns, group, period, last_period, slots, CONSUMERS * clusters
                    )
                    for half in range_constexpr(_HALVES):
                        first = half * exponentials.TOKENS
                        if number < whole:
                            first += rank * TOKENS
                        place = first + warp % 4 * 16
                        rows = self.fold.rows(
                            block * (CLUSTER * TOKENS) + place, slot + place * step + column % again, step,
                            column < again, tokens, target, factors, factor, partials,
                        )
                        shape = (2, 2, COLUMN // 8)
                        z = cute.make_tensor(
                            accumulator.iterator + half * cute.size(shape), cute.make_layout(shape)
                        )
                        start = column * COLUMN
                        if const_expr(self.keep):
                            tops = self.fold.tops(rows, counts, guess)
                            e = self.fold.keep(
                                z, rows, tops, bias, partials, logp, used, inner, start, weight.shape[0]
                            )
                            sixty_four = block * (CLUSTER * _HALVES) + first // exponentials.TOKENS
                            self.fold.leave(e, address, atom_e, buffers, places, column, sixty_four, consumer)
                        elif const_expr(self.store):
                            self.fold.store(z, rows, bias, partials, held, inner, start, weight.shape[0])
                        else:
                            self.fold.fold(z, rows, bias, partials, logp, inner, start, weight.shape[0])
            if const_expr(self.keep):  # shared memory stays until it has been read
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.kernel
    def merge(
        self,
        partials: cute.Tensor,
        target: cute.Tensor | None,
        logp: cute.Tensor | None,
        lse: cute.Tensor,
        entropy: cute.Tensor | None,
        counts: cute.Tensor | None,
        found: cute.Tensor | None,
        ignore: Int64,
        ignores: Int32,
        tokens: Int32,
        vocabulary: Int32,
        blocks: Int32,
        columns: Int32,
        group: Int32,
        period: Int32,
        last_period: Int32,
        slots: Int32,
        workers: Int32,
    ):
        """Results of a token by a warp, from its slots."""
        token = cute.arch.block_idx()[0] * _TOKEN_WARPS + cute.arch.warp_idx()
        if token < tokens:
            block = token // (CLUSTER * TOKENS)
            slot, step, again = scalars.slots_of(block, blocks, columns, group, period, last_period, slots, workers)
            if again > columns:
                again = columns
            slot += token % (CLUSTER * TOKENS) * step
            if const_expr(self.keep):
                self.fold.statistics(token, slot, again, partials, counts, logp, lse, found)
            elif const_expr(self.store):
                self.fold.logsumexp(token, slot, again, partials, lse)
            else:
                self.fold.merge(
                    token, slot, again, vocabulary, partials, target, ignore, ignores, logp, lse, entropy
                )

    @cute.kernel
    def settle(
        self, held: cute.Tensor, target: cute.Tensor, used: cute.Tensor, found: cute.Tensor, columns: Int32
    ):
        """Exponentials against one m for each token, and what stands at labels, by a thread for some columns each."""
        token = cute.arch.block_idx()[0] * _SETTLE_THREADS + cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[1] * _SETTLE_COLUMNS
        if token < held.shape[1]:
            for column in cutlass.range(first, first + _SETTLE_COLUMNS, unroll=1):
                if column < columns:
                    self.fold.settle(token, column, held, target, used, found)


def tiled_mma(dtype):
    """The matrix multiplication of a tile by a warpgroup."""
    major = cute.nvgpu.OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, (1, 1, 1), tiler_mn=(64, COLUMN))


def _columns(weight):
    """A weight as (the elements of a tile, columns, depth tiles)."""
    return cute.group_modes(cute.local_tile(weight, (COLUMN, DEPTH), (None, None)), 0, 2)


def _stages(dtype, rows):
    """Layout of all stages of a tile in shared memory."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, DEPTH, STAGES), order=(0, 1, 2))
