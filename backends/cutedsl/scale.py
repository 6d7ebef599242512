"""Rows times factors, in place or not: hidden states, gradients of them, gradients that a forward formed."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr

_THREADS = 128
_BYTES = 16  # that a thread loads at once


class Scale:
    """One configuration.

    Args:
        dtype: CUTLASS dtype of the rows.
        each: A factor for each row, 0 makes a row 0 whatever it holds. Else one for all rows, and nothing is done where
            that is 1.
    """

    def __init__(self, dtype: type, *, each: bool):
        self.dtype, self.each = dtype, each
        self.width = _BYTES * 8 // dtype.width

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,  # [n, H]
        factors: cute.Tensor,  # [n] or [1], fp32
        out: cute.Tensor,  # [n, H], may be ``rows``
        blocks: Int32,
        stream: CUstream,
    ):
        """Launch so many thread blocks."""
        self.scale(rows, factors, out).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def scale(self, rows: cute.Tensor, factors: cute.Tensor, out: cute.Tensor):
        """Each thread block a row after another."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        parts = rows.shape[1] // self.width
        factor, count = factors[0], Int32(rows.shape[0])
        if const_expr(not self.each):  # noqa: SIM102, this is decided while tracing
            if factor == 1.0:
                count = Int32(0)
        for row in cutlass.range(block, count, blocks, unroll=1):
            if const_expr(self.each):
                factor = factors[row]
            for part in cutlass.range(thread, parts, _THREADS, unroll=4):
                held = cute.make_rmem_tensor((1, self.width), self.dtype)
                cute.autovec_copy(cute.local_tile(rows, (1, self.width), (row, part)), held)
                scaled = held.load().to(Float32) * factor
                if const_expr(self.each):  # noqa: SIM102, this is decided while tracing
                    if factor == 0.0:
                        scaled = cute.full_like(scaled, 0.0)
                held.store(scaled.to(self.dtype))
                cute.autovec_copy(held, cute.local_tile(out, (1, self.width), (row, part)))
