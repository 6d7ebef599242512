"""Labels as kernels use them, see headmux.backends.common.labels.Labels, and a state's product with its label's row."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

_THREADS = 256
_WARP = 32
_WIDTH = 8  # features that a thread loads at once: 16 bytes
_AHEAD = 8  # such loads of either row that are on their way before the first is needed


class Sort:
    """Labels of which some may be ignored, or all count."""

    @cute.jit
    def __call__(
        self,
        target: cute.Tensor,  # [N] int64
        index: cute.Tensor,  # [N] int64
        valid: cute.Tensor | None,  # [N] bool; without it none is ignored
        counts: cute.Tensor,  # [N] fp32
        ignore: Int64,
        classes: Int32,
        stream: CUstream,
    ):
        """Launch the kernel, which sets ``index``, ``valid`` and ``counts``."""
        self.sort(target, index, valid, counts, ignore, classes).launch(
            grid=[cute.ceil_div(target.shape[0], _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def sort(
        self,
        target: cute.Tensor,
        index: cute.Tensor,
        valid: cute.Tensor | None,
        counts: cute.Tensor,
        ignore: Int64,
        classes: Int32,
    ):
        """A token by a thread."""
        token = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        if token < target.shape[0]:
            label = target[token]
            index[token], count = sort(label, classes)
            if const_expr(valid is not None):
                valid[token] = label != ignore
                if label == ignore:
                    count = Float32(0.0)
            counts[token] = count


@cute.jit
def sort(label: Int64, classes: Int32):
    """A label clamped into range, and 1, or NaN where it is out of range."""
    index, count = label, Float32(1.0)
    if label < 0:
        index, count = Int64(0), Float32(float("nan"))
    if label >= classes:
        index, count = Int64(classes - 1), Float32(float("nan"))
    return index, count


@cute.jit
def product(states: cute.Tensor, token: Int32, weight: cute.Tensor, label: Int32):
    """The product of a token's state with a row of the weight, in fp32, by a warp."""
    parts = Int32(states.shape[1] // _WIDTH)
    sums = cute.make_rmem_tensor(_WIDTH, Float32)
    sums.fill(0.0)
    for start in cutlass.range(0, parts, _AHEAD * _WARP, unroll=1):
        first = start + cute.arch.lane_idx()
        x, w = (cute.make_rmem_tensor((_WIDTH, _AHEAD), rows.element_type) for rows in (states, weight))
        for i in range_constexpr(_AHEAD):
            part = first + i * _WARP
            if part >= parts:  # then it is not added below
                part = parts - 1
            for rows, row, held in ((states, token, x), (weight, label, w)):
                cute.autovec_copy(cute.local_tile(rows, (1, _WIDTH), (row, part))[0, None], held[None, i])
        for i in range_constexpr(_AHEAD):
            if first + i * _WARP < parts:
                sums.store(sums.load() + x[None, i].load().to(Float32) * w[None, i].load().to(Float32))
    total = sums.load().reduce(cute.ReductionOp.ADD, Float32(0.0), reduction_profile=0)
    for i in range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    return total
