"""How two warpgroups of a thread block share its tensor cores: each multiplies a tile while the other one, with the
tile before in its registers, does what is to be done with that.

One warp brings stages of operands in by TMA, tile after tile. The warpgroups take every second tile each, and turns: a
warpgroup waits for its first stage when the other one has waited for all of its own. Otherwise it could take the
barrier of a stage, which knows no more than whether it has been filled an even or odd number of times, for filled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, STAGES, TOKENS, WORKERS

DEPTH = 64
"""Elements of the inner dimension of a stage: 128 bytes, the widest swizzle."""

CONSUMERS = WORKERS
WARPGROUP = 128
THREADS = (1 + CONSUMERS) * WARPGROUP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240

_TURN = 1 + CONSUMERS  # the first barriers are for what a warpgroup does alone


def stages(barriers: cute.Pointer, count: int) -> pipeline.PipelineTmaAsync:
    """The stages of both thread blocks of a cluster, which share an operand: of so many bytes in each."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        # a stage is free once the warps of both thread blocks that read it have read their shared tile
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CLUSTER * WARPGROUP // 32),
        tx_count=count,
        cta_layout_vmnk=cute.make_layout((1, CLUSTER, 1, 1)),
        defer_sync=True,
    )


def fragments(
    mma: cute.TiledMma, shared_a: cute.Tensor, shared_b: cute.Tensor
) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """The operands of all stages as ``multiply`` takes them, and a warpgroup's accumulator of a tile."""
    part = mma.get_slice(0)
    shape = mma.partition_shape_C((TOKENS, COLUMN))
    return (
        mma.make_fragment_A(part.partition_A(shared_a)),
        mma.make_fragment_B(part.partition_B(shared_b)),
        cute.make_rmem_tensor(shape, Float32),
    )


@cute.jit
def multiply(
    mma: cute.TiledMma,
    accumulator: cute.Tensor,
    operand_a: cute.Tensor,
    operand_b: cute.Tensor,
    loads: pipeline.PipelineTmaAsync,
    depth: Int32,
    number: Int32,
    more: Boolean,
    consumer: Int32,
):
    """The product of the thread block's tile of that number, counted from 0, by a warpgroup. ``more`` tiles follow."""
    before = number * depth  # stages of all tiles of the thread block
    ready, done = _state(before), _state(before)
    if number > 0:
        cute.arch.barrier(barrier_id=_TURN + consumer, number_of_threads=CONSUMERS * WARPGROUP)
    loads.consumer_wait(ready)
    warpgroup.fence()
    for i in range_constexpr(DEPTH // 16):
        mma.set(warpgroup.Field.ACCUMULATE, i > 0)
        at = (None, None, i, ready.index)
        cute.gemm(mma, accumulator, operand_a[at], operand_b[at], accumulator)
    warpgroup.commit_group()
    ready.advance()
    for _ in cutlass.range(1, depth, unroll=1):
        loads.consumer_wait(ready)
        for i in range_constexpr(DEPTH // 16):
            at = (None, None, i, ready.index)
            cute.gemm(mma, accumulator, operand_a[at], operand_b[at], accumulator)
        warpgroup.commit_group()
        ready.advance()
        warpgroup.wait_group(1)
        loads.consumer_release(done)
        done.advance()
    if more:
        cute.arch.barrier_arrive(barrier_id=_TURN + 1 - consumer, number_of_threads=CONSUMERS * WARPGROUP)
    warpgroup.wait_group(0)
    loads.consumer_release(done)
    return mma  # which a tracer takes for another one, as a field of it was set


def _state(stages):
    """Of a consumer, after so many stages."""
    return pipeline.PipelineState(STAGES, Int32(stages), Int32(stages % STAGES), Int32(stages // STAGES % 2))
