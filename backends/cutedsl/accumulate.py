"""The product that turns the logits' gradient into grad_weight: formed in place, and added up while others multiply.

A tile is 192 classes times 128 hidden features, over all tokens. One warp brings operands in by TMA, the logits'
gradient by multicast for both thread blocks of a cluster, which take neighbouring features. Two warpgroups take every
second tile of their thread block each: while one converts a tile, adds what grad_weight held and stores it, the other
one multiplies. Sums leave by way of shared memory, transposed.

Where the logits' gradient lies inside the storage of grad_weight (headmux.backends.common.storage), a tile is stored
over classes of it that come before. Tiles are given out over the vocabulary in order, ``read`` counts for each column
of classes the thread blocks that have read it, and a tile is not stored before all that it covers has been read. It
covers columns before its own only, whose tiles have all been given out: they will be read, for before a warpgroup reads
one it waits for none but earlier columns.
"""

import itertools

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup

from headmux.backends.cutedsl import claims, pingpong, scalars
from headmux.backends.cutedsl.pingpong import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    DEPTH,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP,
)
from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, STAGES, TOKENS

CLASSES, FEATURES = COLUMN, TOKENS  # of a tile

_PIECE = 64  # classes, and features, that leave at once
_PIECE_BYTES = _PIECE * _PIECE * 2
_PIECES = CLASSES // _PIECE * (FEATURES // _PIECE)
_BUFFERS = 3  # pieces of a warpgroup that may be on their way
_WARP = 32

SHARED_BYTES = 1024 + STAGES * (CLASSES + FEATURES) * DEPTH * 2 + CONSUMERS * _BUFFERS * _PIECE_BYTES
"""Shared memory of a thread block: barriers, stages, and pieces on their way."""


class Accumulate:
    """One configuration.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16, of everything.
        add: Add to what ``total`` holds.
        inside: ``gradient`` lies inside the storage of ``total``, a column of classes apart from where that ends.
        more: There are two products, of which the sum is rounded once.
    """

    def __init__(self, dtype: type, *, add: bool, inside: bool, more: bool):
        self.dtype, self.add, self.inside, self.more = dtype, add, inside, more

    @cute.jit
    def __call__(
        self,
        states: cute.Tensor,  # [n, H]
        gradient: cute.Tensor,  # [V, n]
        more_states: cute.Tensor | None,  # [m, H]
        more_gradient: cute.Tensor | None,  # [V, m]
        total: cute.Tensor,  # [V, H]
        ring: cute.Tensor,  # [clusters + 1, RING] int32, zeros
        read: cute.Tensor | None,  # [columns of classes] int32, zeros
        clusters: Int32,
        stream: CUstream,
    ):
        """Launch the kernel: ``gradient @ states``, and ``more_gradient @ more_states``, into ``total``."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, cute.nvgpu.OperandMajorMode.MN, cute.nvgpu.OperandMajorMode.K, Float32, (1, 1, 1),
            tiler_mn=(64, CLASSES),
        )
        features = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.dtype)
        layout_a = cute.tile_to_shape(features, (FEATURES, DEPTH, STAGES), order=(1, 0, 2))
        rows = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        layout_b = cute.tile_to_shape(rows, (CLASSES, DEPTH, STAGES), order=(0, 1, 2))
        layout_c = cute.tile_to_shape(rows, (_PIECE, _PIECE, CONSUMERS * _BUFFERS), order=(0, 1, 2))
        pairs = [self.copies(states, gradient, layout_a, layout_b)]
        if const_expr(self.more):
            pairs.append(self.copies(more_states, more_gradient, layout_a, layout_b))
        piece = cute.slice_(layout_c, (None, None, 0))
        atom_c, total_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), total, piece, (_PIECE, _PIECE)
        )
        atom_out, out_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), total, piece, (_PIECE, _PIECE)
        )
        self.accumulate(
            mma, pairs, atom_c, total_tma, atom_out, out_tma, layout_a, layout_b, layout_c, gradient, total, ring, read,
        ).launch(
            grid=[clusters * CLUSTER, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def copies(
        self, states: cute.Tensor, gradient: cute.Tensor, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout
    ) -> tuple[cute.CopyAtom, cute.Tensor, cute.CopyAtom, cute.Tensor]:
        """How a product's operands come into a stage."""
        turned = cute.make_tensor(states.iterator, cute.select(states.layout, mode=[1, 0]))
        stage = (None, None, 0)
        return (
            *cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), turned, cute.slice_(layout_a, stage), (FEATURES, DEPTH)
            ),
            *cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SMulticastOp(), gradient, cute.slice_(layout_b, stage), (CLASSES, DEPTH),
                num_multicast=CLUSTER,
            ),
        )

    @cute.kernel
    def accumulate(
        self,
        mma: cute.TiledMma,
        pairs: list,  # of what ``copies`` returns
        atom_c: cute.CopyAtom,
        total_tma: cute.Tensor,
        atom_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_c: cute.ComposedLayout,
        gradient: cute.Tensor,
        total: cute.Tensor,
        ring: cute.Tensor,
        read: cute.Tensor | None,
    ):
        """Tiles by persistent clusters."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = cute.arch.block_idx()[0] // CLUSTER
        across = cute.ceil_div(total.shape[1], CLUSTER * FEATURES)
        columns = cute.ceil_div(total.shape[0], CLASSES)
        tiles = across * columns

        if warp == 0:
            for atom in (*[pair[i] for pair in pairs for i in (0, 2)], atom_c, atom_out):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            arrived: cute.struct.MemRange[cutlass.Int64, CONSUMERS * _BUFFERS]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_b)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_c)], 1024]

        shared = cutlass.memory.SmemAllocator().allocate(Shared)
        shared_a = shared.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        shared_b = shared.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        shared_c = shared.c.get_tensor(layout_c.outer, swizzle=layout_c.inner)
        arrived = shared.arrived.data_ptr()
        if const_expr(self.add):  # noqa: SIM102, this is decided while tracing
            if warp == 0:
                with cute.arch.elect_one():
                    for i in range_constexpr(CONSUMERS * _BUFFERS):
                        cute.arch.mbarrier_init(arrived + i, 1)
        loads = pingpong.stages(shared.barriers.data_ptr(), (CLASSES + FEATURES) * DEPTH * self.dtype.width // 8)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cute.make_layout((CLUSTER, 1)), is_relaxed=True)
        depths = [cute.ceil_div(states.shape[1], DEPTH) for _, states, _, _ in pairs]
        depth = sum(depths)
        pipeline.pipeline_init_wait(cluster_shape_mn=cute.make_layout((CLUSTER, 1)))

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            sources = [self.sources(pair, shared_a, shared_b, rank) for pair in pairs]
            filled = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            number, tile = Int32(0), self.take(ring, cluster, rank, Int32(0), Int32(-1))
            while tile < tiles:
                number += 1
                following = self.take(ring, cluster, rank, number, tile)
                column, feature = tile // across, tile % across * CLUSTER + rank
                for pair, source, count in zip(pairs, sources, depths, strict=True):
                    filled = self.bring(pair, source, count, column, feature, loads, filled)
                tile = following
            loads.producer_tail(filled)

        if warp >= 4:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
            operand_a, operand_b, accumulator = pingpong.fragments(mma, shared_a, shared_b)
            buffers, places = _pieces(atom_out, shared_c, out_tma)
            into, from_total = _pieces(atom_c, shared_c, total_tma)
            first = consumer * _BUFFERS
            address = shared_c.iterator.toint() + first * _PIECE_BYTES + scalars.stored_at(lane, warp % 4)
            known = Int32(0)  # columns that everybody has read
            number, tile = Int32(0), claims.told(ring, cluster, Int32(0), Int32(-1))
            if consumer == 1 and tile < tiles:
                number, tile = Int32(1), claims.told(ring, cluster, Int32(1), tile)
            while tile < tiles:
                following = claims.told(ring, cluster, number + 1, tile)
                column = tile // across
                feature = (tile % across * CLUSTER + rank) * (FEATURES // _PIECE)
                if const_expr(self.add):  # noqa: SIM102, this is decided while tracing
                    if warp % 4 == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        for i in range_constexpr(_BUFFERS):
                            self.fetch(i, atom_c, into, from_total, first, column, feature, arrived)
                mma = pingpong.multiply(
                    mma, accumulator, operand_a, operand_b, loads, depth, number, following < tiles, consumer
                )
                if const_expr(self.inside):  # noqa: SIM102, this is decided while tracing
                    if warp % 4 == 0:
                        if lane == 0:
                            cute.arch.inline_ptx(
                                "red.release.gpu.global.add.s32 [{$r0}], {$r1};",
                                read_only_args=[read.iterator.toint() + Int64(column) * 4, Int32(1)],
                            )
                        known = self.wait(known, column, across * CLUSTER, gradient, total, read)
                z = cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, CLASSES // 8, FEATURES // _PIECE)))
                for i in range_constexpr(_PIECES):
                    self.convert(i, z, consumer, address, arrived)
                    if warp % 4 == 0:
                        cute.copy(
                            atom_out, buffers[(None, first + i % _BUFFERS)], places[(None, *_place(i, column, feature))]
                        )
                        cute.arch.cp_async_bulk_commit_group()
                        if const_expr(self.add and 0 < i <= _PIECES - _BUFFERS):
                            cute.arch.cp_async_bulk_wait_group(1, read=True)
                            self.fetch(
                                i - 1 + _BUFFERS, atom_c, into, from_total, first, column, feature, arrived
                            )
                if following < tiles:
                    following = claims.told(ring, cluster, number + CONSUMERS, following)
                number, tile = number + CONSUMERS, following
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory stays until it has been read

    def sources(self, pair: tuple, shared_a: cute.Tensor, shared_b: cute.Tensor, rank: Int32) -> tuple:
        """Where a product's operands go, and come from: features, then classes."""
        atom_a, states, atom_b, gradient = pair
        tiles_a = cute.local_tile(states, (FEATURES, DEPTH), (None, None))
        tiles_b = cute.local_tile(gradient, (CLASSES, DEPTH), (None, None))
        return (
            *cpasync.tma_partition(
                atom_a, 0, cute.make_layout(1), cute.group_modes(shared_a, 0, 2), cute.group_modes(tiles_a, 0, 2)
            ),
            *cpasync.tma_partition(
                atom_b, rank, cute.make_layout(CLUSTER), cute.group_modes(shared_b, 0, 2),
                cute.group_modes(tiles_b, 0, 2),
            ),
        )

    @cute.jit
    def bring(
        self,
        pair: tuple,
        source: tuple,
        depth: Int32,
        column: Int32,
        feature: Int32,
        loads: pipeline.PipelineTmaAsync,
        filled: pipeline.PipelineState,
    ):
        """Fill stages with a tile's operands of one product, by a warp. The state after that is returned."""
        atom_a, _, atom_b, _ = pair
        to_a, from_a, to_b, from_b = source
        everyone = cutlass.Int16((1 << CLUSTER) - 1)
        for k in cutlass.range(depth, unroll=1):
            loads.producer_acquire(filled)
            barrier = loads.producer_get_barrier(filled)
            cute.copy(atom_a, from_a[(None, feature, k)], to_a[(None, filled.index)], tma_bar_ptr=barrier)
            cute.copy(
                atom_b, from_b[(None, column, k)], to_b[(None, filled.index)], tma_bar_ptr=barrier, mcast_mask=everyone
            )
            filled.advance()
        return filled

    @cute.jit
    def take(self, ring: cute.Tensor, cluster: Int32, rank: Int32, number: Int32, before: Int32) -> Int32:
        """The cluster's next tile, by the warp that brings in operands: the first thread block's claims it."""
        tile = Int32(0)
        if rank == 0:  # noqa: SIM108, a device's branch
            tile = claims.claim(ring, cluster, number)
        else:
            tile = claims.told(ring, cluster, number, before)
        return tile

    @cute.jit
    def fetch(
        self,
        i: cutlass.Constexpr,
        atom: cute.CopyAtom,
        buffers: cute.Tensor,
        places: cute.Tensor,
        first: Int32,
        column: Int32,
        feature: Int32,
        arrived: cute.Pointer,
    ):
        """Bring in what ``total`` holds of a tile's piece, by a warp. ``first`` is its warpgroup's first buffer."""
        buffer = first + i % _BUFFERS
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived + buffer, _PIECE_BYTES)
        cute.copy(
            atom, places[(None, *_place(i, column, feature))], buffers[(None, buffer)], tma_bar_ptr=arrived + buffer
        )

    @cute.jit
    def convert(
        self,
        i: cutlass.Constexpr,
        z: cute.Tensor,  # (2 neighbouring classes, 2 features, classes 8 apart, features 64 apart)
        consumer: Int32,
        address: Int32,
        arrived: cute.Pointer,
    ):
        """Leave a tile's piece in its buffer, with what that holds on top, by a warpgroup. ``address`` is this thread's
        of its first buffer.
        """
        buffer = i % _BUFFERS
        if const_expr(self.add):
            cute.arch.mbarrier_wait(arrived + consumer * _BUFFERS + buffer, i // _BUFFERS % 2)
        else:
            if cute.arch.warp_idx() % 4 == 0:  # what it held before has been read
                cute.arch.cp_async_bulk_wait_group(_BUFFERS - 1, read=True)
            cute.arch.barrier(barrier_id=consumer + 1, number_of_threads=WARPGROUP)
        rest, across = i % (FEATURES // _PIECE), i // (FEATURES // _PIECE)
        for k in range_constexpr(_PIECE // 16):
            place = address + (buffer * _PIECE_BYTES + k * 16 * _PIECE * 2)
            j = across * (_PIECE // 8) + 2 * k
            sums = cute.make_rmem_tensor((2, 2, 2), Float32)
            for b, r, q in itertools.product(range(2), range(2), range(2)):
                sums[q, r, b] = z[q, r, j + b, rest]
            if const_expr(self.add):
                held = cute.make_rmem_tensor(4, Int32)
                found = cute.arch.inline_ptx(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Int32] * 4, read_only_args=[place],
                )
                for n in range_constexpr(4):
                    held[n] = found[n]
                before = cute.recast_tensor(held, self.dtype)
                for n in range_constexpr(8):
                    sums[n] = sums[n] + before[n].to(Float32)
            pairs = [scalars.pair(sums[2 * n], sums[2 * n + 1], self.dtype) for n in range(4)]
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place, *pairs],
            )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=consumer + 1, number_of_threads=WARPGROUP)

    @cute.jit
    def wait(
        self, known: Int32, column: Int32, full: Int32, gradient: cute.Tensor, total: cute.Tensor, read: cute.Tensor
    ):
        """Wait, by a warp, until all has been read that a column of ``total`` covers.

        ``full`` thread blocks read a column. The first ``known`` columns are known to have been read; the new number is
        returned.
        """
        size = self.dtype.width // 8
        stop = (column + 1) * CLASSES
        if stop > total.shape[0]:
            stop = Int32(total.shape[0])
        start = gradient.iterator.toint() - total.iterator.toint()
        rows = scalars.covered(stop, start, Int64(total.stride[0]) * size, Int64(gradient.stride[0]) * size)
        needed = (rows + CLASSES - 1) // CLASSES
        while known < needed:
            place, count = known + cute.arch.lane_idx(), full
            if place < needed:
                count = cute.arch.inline_ptx(
                    "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32],
                    read_only_args=[read.iterator.toint() + Int64(place) * 4],
                )
            if cute.arch.vote_all_sync(count >= full):
                known += _WARP
                if known > needed:
                    known = needed
        cute.arch.fence_proxy("async")
        return known


def _place(i, column, feature):
    """Which piece of ``total`` the ``i``-th of a tile is."""
    across = FEATURES // _PIECE
    return column * (CLASSES // _PIECE) + i // across, feature + i % across


def _pieces(atom, shared, total):
    """Pieces in shared memory and of ``total``, as a copy takes them."""
    tiles = cute.local_tile(total, (_PIECE, _PIECE), (None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
