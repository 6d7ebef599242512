"""Divergence of a student's and a teacher's softmax, and its gradient, from logits [V, n] in units of log 2.

A thread has 4 tokens and walks over classes: some threads of a block stand side by side, the others, and the blocks,
share the classes. Its logits go through shared memory, which no other thread reads: so as many as it takes are on their
way, whatever registers there are. What a block's threads sum is added up in a fixed order.
"""

import math

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from headmux.backends.cutedsl import scalars

THREADS = 256
"""Threads of a thread block."""

TOKENS = 4
"""Tokens of a thread: 16 bytes."""

STAGES = 4
"""Classes of a thread whose logits are in shared memory, or on their way to it."""

_LN2 = math.log(2.0)


class Diverge:
    """One configuration.

    Args:
        beta: 0, 1, or None for what lies between.
        loss: Sum the divergence.
        gradient: CUTLASS dtype of the gradient, or None.
    """

    def __init__(self, beta: float | None, *, loss: bool, gradient: type | None):
        self.beta, self.loss, self.gradient = beta, loss, gradient

    @property
    def planes(self) -> int:
        """How many sums there are."""
        return 2 if self.beta is None else 1

    @cute.jit
    def __call__(
        self,
        student: cute.Tensor,  # [V, n] fp32, rows of neighbouring elements
        teacher: cute.Tensor,  # [V, n] fp32
        student_lse: cute.Tensor,  # [2, n] fp32, as ``Logits.logsumexp`` leaves it
        teacher_lse: cute.Tensor,  # [2, n] fp32, the same
        partials: cute.Tensor | None,  # [1 or 2, parts, n] fp32
        upstream: cute.Tensor | None,  # [n] fp32
        kl: cute.Tensor | None,  # [n] fp32
        out: cute.Tensor | None,  # [V, n], may be written up to a row's next multiple of 4 tokens
        teacher_share: Float32,
        student_share: Float32,
        chain: Float32,
        width: Int32,
        columns: Int32,
        parts: Int32,
        stream: CUstream,
    ):
        """Launch ``columns * parts`` thread blocks, in each of which ``width`` threads, a power of 2, are side by side.

        ``partials`` gets sums, where beta is 0 of p * log(p / q), where it is 1 of q * log(q / p), else of
        p * log(p / m) and of q * log(q / m), m being the mixture by the shares. ``out`` gets the gradient with respect
        to what is ``1 / chain`` times the student's logit, for ``upstream``, 0 where that is 0; it needs ``kl``, the
        student's sum, where beta is not 0.
        """
        self.diverge(
            student, teacher, student_lse, teacher_lse, partials, upstream, kl, out, teacher_share, student_share,
            chain, width, columns, parts,
        ).launch(grid=[columns * parts, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def diverge(
        self,
        student: cute.Tensor,
        teacher: cute.Tensor,
        student_lse: cute.Tensor,
        teacher_lse: cute.Tensor,
        partials: cute.Tensor | None,
        upstream: cute.Tensor | None,
        kl: cute.Tensor | None,
        out: cute.Tensor | None,
        teacher_share: Float32,
        student_share: Float32,
        chain: Float32,
        width: Int32,
        columns: Int32,
        parts: Int32,
    ):
        """Each thread block the same tokens of every ``parts``-th group of classes."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        four = block % columns * width + thread % width
        part, height = block // columns, THREADS // width
        vocabulary, tokens = Int32(student.shape[0]), Int32(student.shape[1])
        groups = cute.ceil_div(vocabulary, height)
        shares = (teacher_share, student_share)
        allocator = cutlass.memory.SmemAllocator()
        shape = (TOKENS, THREADS, 2, STAGES)
        shared = allocator.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        mine = shared[(None, thread, None, None)]

        lses, slopes, offsets, gone = [], [], [], []
        for i in range_constexpr(TOKENS):
            token = four * TOKENS + i
            q_top, q_sum, p_top, p_sum, factor, mean = [Float32(0.0)] * 6
            if token < tokens:
                q_top, q_sum = student_lse[0, token], student_lse[1, token]
                p_top, p_sum = teacher_lse[0, token], teacher_lse[1, token]
                if const_expr(self.gradient is not None):
                    factor = upstream[token] * chain
                if const_expr(kl is not None):
                    mean = kl[token]
            lses.append((q_top, q_sum, p_top, p_sum, (q_top - p_top) + (q_sum - p_sum)))
            gone.append(factor == 0.0)
            if const_expr(self.beta is None):
                factor = factor * student_share
            slopes.append(factor if const_expr(self.beta == 0.0) else factor * _LN2)
            offsets.append(-(factor * mean))

        sums = cute.make_rmem_tensor((TOKENS, self.planes), Float32)
        sums.fill(0.0)
        to_token = (lses, slopes, offsets, gone)
        if four * TOKENS < tokens:
            first = part * height + thread // width
            step = parts * height
            if const_expr(self.loss):  # from the end, which has been written last
                first, step = groups * height - 1 - first, -step
            row = first
            for stage in range_constexpr(STAGES - 1):
                self._load(student, teacher, mine, stage, row, four)
                row += step
            to_load = row
            row = first
            for _ in cutlass.range(part, groups, parts * STAGES, unroll=1):
                for stage in range_constexpr(STAGES):
                    cute.arch.cp_async_wait_group(STAGES - 2)
                    self._load(student, teacher, mine, (stage + STAGES - 1) % STAGES, to_load, four)
                    to_load += step
                    if row >= 0 and row < vocabulary:
                        self._compare(mine, stage, to_token, shares, sums, out, row, four)
                    row += step
            cute.arch.cp_async_wait_group(0)

        if const_expr(self.loss):
            self._reduce(sums, partials, allocator, thread, width, height, four * TOKENS, part)

    @cute.jit
    def _load(
        self, student: cute.Tensor, teacher: cute.Tensor, mine: cute.Tensor, stage: cutlass.Constexpr, row: Int32,
        four: Int32,
    ):
        """Have a thread's logits of a row copied to shared memory, if there is such a row."""
        if row >= 0 and row < student.shape[0]:
            atom = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=TOKENS * 32
            )
            for model in range_constexpr(2):
                place = cute.local_tile((student, teacher)[model], (1, TOKENS), (row, four))
                cute.copy(atom, place[(0, None)], mine[(None, model, stage)])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _compare(
        self,
        mine: cute.Tensor,
        stage: cutlass.Constexpr,
        to_token: tuple,
        shares: tuple,
        sums: cute.Tensor,
        out: cute.Tensor | None,
        row: Int32,
        four: Int32,
    ):
        """Add to the sums what a row's logits make of them, and leave their gradient."""
        lses, slopes, offsets, gone = to_token
        q_bits, p_bits = (cute.make_rmem_tensor(TOKENS, Float32) for _ in range(2))
        cute.autovec_copy(mine[(None, 0, stage)], q_bits)
        cute.autovec_copy(mine[(None, 1, stage)], p_bits)
        gradient = cute.make_rmem_tensor((1, TOKENS), Float32)
        for i in range_constexpr(TOKENS):
            q_top, q_sum, p_top, p_sum, shift = lses[i]
            log_q, log_p = (q_bits[i] - q_top) - q_sum, (p_bits[i] - p_top) - p_sum
            d = (q_bits[i] - p_bits[i]) - shift
            if const_expr(self.loss):
                if const_expr(self.beta is None):
                    of_q, of_p = scalars.against_mixture(log_q, log_p, d, *shares)
                    sums[i, 0] = sums[i, 0] + of_p
                    sums[i, 1] = sums[i, 1] + of_q
                elif const_expr(self.beta == 0.0):
                    sums[i, 0] = cute.math.fma(scalars.exp2(log_p), -d, sums[i, 0])
                else:
                    sums[i, 0] = cute.math.fma(scalars.exp2(log_q), d, sums[i, 0])
            if const_expr(self.gradient is not None):
                if const_expr(self.beta is None):
                    g = scalars.gradient(log_q, d, *shares, slopes[i], offsets[i])
                elif const_expr(self.beta == 0.0):
                    g = (scalars.exp2(log_q) - scalars.exp2(log_p)) * slopes[i]
                else:
                    g = scalars.exp2(log_q) * cute.math.fma(d, slopes[i], offsets[i])
                if gone[i]:
                    g = Float32(0.0)
                gradient[i] = g
        if const_expr(self.gradient is not None):
            rounded = cute.make_rmem_tensor((1, TOKENS), self.gradient)
            rounded.store(gradient.load().to(self.gradient))
            cute.autovec_copy(rounded, cute.local_tile(out, (1, TOKENS), (row, four)))

    @cute.jit
    def _reduce(
        self, sums: cute.Tensor, partials: cute.Tensor, allocator: cutlass.memory.SmemAllocator, thread: Int32,
        width: Int32, height: Int32, token: Int32, part: Int32,
    ):
        """Sums of a thread block, in nats, into its place."""
        shared = allocator.allocate_tensor(
            Float32, cute.make_layout((THREADS, TOKENS, self.planes)), byte_alignment=16
        )
        for i in range_constexpr(TOKENS):
            for plane in range_constexpr(self.planes):
                shared[thread, i, plane] = sums[i, plane]
        cute.arch.sync_threads()
        if thread < width:
            for above in cutlass.range(1, height, unroll=1):
                for i in range_constexpr(TOKENS):
                    for plane in range_constexpr(self.planes):
                        sums[i, plane] = sums[i, plane] + shared[above * width + thread, i, plane]
            for i in range_constexpr(TOKENS):
                if token + i < partials.shape[2]:
                    for plane in range_constexpr(self.planes):
                        partials[plane, part, token + i] = sums[i, plane] * _LN2
