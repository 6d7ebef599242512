"""Tiles given out to the clusters that run, in order: which cluster takes which is settled while they do.

So a cluster that starts late, because another kernel has its multiprocessors, takes fewer, and one that waits for what
is done with tiles before its own waits for none that does not run.

A warp of each cluster's first thread block claims tiles from a counter, one ahead of the tile whose operands it brings
in, until it gets a number that is no tile's. Others are told by way of a ring in global memory, [clusters + 1, RING]
zeros at the start: the counter, then a row for each cluster, where its k-th claim stands as 1 + the number. A cluster's
numbers grow, so an entry is the one waited for if it is above the one before.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from headmux.backends.cutedsl.schedule import RING


@cute.jit
def claim(ring: cute.Tensor, cluster: Int32, number: Int32) -> Int32:
    """Make a cluster's claim of that number, by a warp: a tile, or a number beyond all tiles."""
    tile = Int32(0)
    if cute.arch.lane_idx() == 0:
        tile = cute.arch.inline_ptx(
            "atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32],
            read_only_args=[ring.iterator.toint(), Int32(1)],
        )
        cute.arch.inline_ptx(
            "st.relaxed.gpu.global.s32 [{$r0}], {$r1};",
            read_only_args=[ring.iterator.toint() + _place(cluster, number), tile + 1],
        )
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(tile, offset=0))


@cute.jit
def told(ring: cute.Tensor, cluster: Int32, number: Int32, before: Int32) -> Int32:
    """What a cluster's claim of that number got, by a warp, once it is made. ``before`` is what the one before got, or
    -1.
    """
    entry = Int32(0)
    while entry <= before + 1:
        entry = cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32],
            read_only_args=[ring.iterator.toint() + _place(cluster, number)],
        )
    return cute.arch.make_warp_uniform(entry - 1)


def _place(cluster, number):
    """Bytes from the start of the rings."""
    return (Int64(cluster + 1) * RING + number % RING) * 4
