"""How products reach a running sum: which way is taken, its error, and that no second [V, H] is made."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headmux.backends.common import gemm
from headmux.backends.common.gemm import Way, accumulate, is_native, operand, product, way, wide_dtype
from headmux.backends.common.storage import blocks, capacity, whole, workspace

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]


def mock(monkeypatch: pytest.MonkeyPatch, have: tuple[int, int] | None, hip: str | None = None) -> None:
    monkeypatch.setattr(gemm, "capability", lambda device: have if device.type == "cuda" else None)
    monkeypatch.setattr(torch.version, "hip", hip)


# operands, sum -> way where the GEMM is native (capability 8.0), way elsewhere
TABLE = {
    (F32, F32): (Way.DIRECT, Way.DIRECT),
    (F64, F64): (Way.DIRECT, Way.DIRECT),
    (F16, F16): (Way.DIRECT, Way.STAGED),
    (BF16, BF16): (Way.DIRECT, Way.STAGED),
    (F16, F32): (Way.WIDE, Way.STAGED),
    (BF16, F32): (Way.WIDE, Way.STAGED),
}


@pytest.mark.parametrize(("operands", "total"), list(itertools.product((F32, F64, F16, BF16), repeat=2)))
@pytest.mark.parametrize("have", [None, *CAPABILITIES])
@pytest.mark.parametrize("hip", [None, "6.4"])
def test_way(
    monkeypatch: pytest.MonkeyPatch,
    operands: torch.dtype,
    total: torch.dtype,
    have: tuple[int, int] | None,
    hip: str | None,
) -> None:
    """Every pair of dtypes on every kind of device; what is not in the table is staged."""
    mock(monkeypatch, have, hip)
    native, other = TABLE.get((operands, total), (Way.STAGED, Way.STAGED))
    device = CPU if have is None else CUDA
    expected = native if have is not None and have >= (8, 0) and hip is None else other
    assert way(operands, total, device) is expected


def test_operands_are_widened_only_where_the_gemm_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 4)
    for dtype in (F32, F64):
        assert operand(values, dtype).dtype == dtype
    for dtype in (F16, BF16):
        rounded = operand(values, dtype)
        assert rounded.dtype == F32
        assert torch.equal(rounded, values.to(dtype).float())
    mock(monkeypatch, (9, 0))
    assert is_native(BF16, CUDA)
    assert not is_native(BF16, CPU)
    mock(monkeypatch, (7, 5))
    assert not is_native(F16, CUDA)
    assert is_native(F32, CUDA)
    assert wide_dtype(F64) == F64
    assert {wide_dtype(d) for d in (F32, F16, BF16)} == {F32}


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that is made, views of ``known`` aside."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, t.numel())
        return found


R, C, N, CHUNKS, ROWS = 96, 40, 64, 4, 16


def pieces_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[R, N] and [N, C] with products of one sign, so that rounding a running sum shows."""
    generator = torch.Generator().manual_seed(1)
    left = torch.rand(R, N, generator=generator, dtype=F64).add_(0.5).to(dtype)
    right = torch.rand(N, C, generator=generator, dtype=F64).add_(0.5).to(dtype)
    return left, right


def worst(total: Tensor, left: Tensor, right: Tensor) -> float:
    exact = left.double() @ right.double()
    return float(((total.double() - exact) / exact).abs().max())


# relative error of a sum of positive products: a few roundings of the sum's dtype, one a chunk
EPS = {F64: 2.0**-52, F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}


@pytest.mark.parametrize("operands", [F32, F64, F16, BF16])
@pytest.mark.parametrize("total_dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize("left_dtype", ["operands", "wide"])
@pytest.mark.parametrize("rows", [ROWS, 7, R, 1000])
def test_sums(operands: torch.dtype, total_dtype: torch.dtype, left_dtype: str, rows: int) -> None:
    left, right = pieces_of(operands)
    given = left if left_dtype == "operands" else left.to(wide_dtype(operands))
    total = torch.full((R, C), torch.nan, dtype=total_dtype)
    step = N // CHUNKS
    for i in range(CHUNKS):
        tokens = slice(i * step, (i + 1) * step)
        accumulate(total, [(given[:, tokens], right[tokens])], operands, first=i == 0, rows=rows)
    accumulated = max(EPS[wide_dtype(operands)], EPS[total_dtype])
    # half an ulp a rounding to the sum, and the wide sums' own roundings
    assert worst(total, left, right) <= CHUNKS * accumulated / 2 + 8 * EPS[wide_dtype(operands)]


@pytest.mark.parametrize("operands", [F16, BF16])
def test_wide_sum_is_independent_of_chunks(operands: torch.dtype) -> None:
    """With an fp32 sum, sixteen chunks are as exact as one; with a 16-bit sum they would not be."""
    left, right = pieces_of(operands)
    errors = {}
    for dtype, chunks in itertools.product((F32, operands), (1, 16)):
        total = torch.empty(R, C, dtype=dtype)
        for i in range(chunks):
            tokens = slice(i * N // chunks, (i + 1) * N // chunks)
            accumulate(total, [(left[:, tokens], right[tokens])], operands, first=i == 0, rows=ROWS)
        errors[dtype, chunks] = worst(total.to(operands), left, right)
    assert errors[F32, 16] <= 1.1 * errors[F32, 1]
    assert errors[operands, 16] > 1.1 * errors[operands, 1]


@pytest.mark.parametrize(("operands", "total_dtype"), [(F32, F32), (F64, F64), (F16, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize("first", [True, False])
def test_no_second_total(operands: torch.dtype, total_dtype: torch.dtype, first: bool) -> None:
    left, right = pieces_of(operands)
    total = torch.zeros(R, C, dtype=total_dtype)
    with Sizes(total, left, right) as seen:
        accumulate(total, [(left, right)], operands, first=first, rows=ROWS)
    staged = way(operands, total_dtype, CPU) is Way.STAGED
    assert seen.largest <= max(ROWS * C, ROWS * N, N * C)
    assert seen.largest < R * C
    assert (seen.largest > 0) == staged


@pytest.mark.parametrize("have", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize(("operands", "total_dtype"), [(F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, F32)])
@pytest.mark.parametrize("first", [True, False])
def test_calls_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
    have: tuple[int, int],
    operands: torch.dtype,
    total_dtype: torch.dtype,
    first: bool,
) -> None:
    """With a GPU's capability mocked: one GEMM into the sum where it can, blocks of wide products where not.

    The GEMMs of a GPU are stood in for by ones that round once, to the dtype that was asked for.
    """
    monkeypatch.setattr(gemm, "capability", lambda device: have)
    calls: list[str] = []

    def result(a: Tensor, b: Tensor, add: Tensor | None, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        assert a.dtype == b.dtype
        wide = a.to(F64) @ b.to(F64) + (0 if add is None else add.to(F64))
        found = wide.to(out_dtype or a.dtype)
        if out is None:
            return found
        assert out.dtype == found.dtype
        out.copy_(found)
        return out

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        calls.append("mm" if out_dtype is None else "mm wide")
        return result(a, b, None, out, out_dtype)

    def addmm(
        total: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        calls.append("addmm" if out_dtype is None else "addmm wide")
        return result(a, b, total, out, out_dtype)

    left, right = pieces_of(operands)
    total = torch.full((R, C), torch.nan if first else 1.0, dtype=total_dtype)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    accumulate(total, [(left, right)], operands, first=first, rows=ROWS)
    monkeypatch.undo()
    bound = max(EPS[total_dtype], EPS[F32])
    assert worst(total if first else total - 1.0, left, right) <= 2 * bound
    name = "mm" if first else "addmm"
    if operands == total_dtype and (have >= (8, 0) or operands == F32):
        assert calls == [name]
    elif have >= (8, 0):
        assert calls == [f"{name} wide"]
    else:
        assert calls == ["mm"] * (R // ROWS)


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize("total_dtype", [F32, F64, F16, BF16])
@pytest.mark.parametrize("rows", [1, 7, R - 1, 1000])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("beside", [False, True])
def test_product_formed_inside_its_sum(
    dtype: torch.dtype, total_dtype: torch.dtype, rows: int, share: float, beside: bool
) -> None:
    """The left operand lies in the storage of the sum that overwrites it, alone or with another beside it."""
    most = min(N, capacity(total_dtype, C, dtype))
    tokens = max(1, int(share * most))
    left, right = pieces_of(dtype)
    total, held = workspace(left, (R, C), total_dtype, tokens, dtype, rows)
    total.fill_(torch.nan)
    held.copy_(left[:, :tokens])
    pairs = [(held, right[:tokens])]
    count = N if beside else tokens
    if beside and tokens < N:
        pairs.append((left[:, tokens:], right[tokens:]))
    accumulate(total, pairs, dtype, first=True, rows=rows, inside=True, once=True)
    bound = max(EPS[total_dtype], EPS[wide_dtype(dtype)])
    assert worst(total, left[:, :count], right[:count]) <= bound / 2 + 8 * EPS[wide_dtype(dtype)]


def test_two_products_may_round_twice() -> None:
    left, right = pieces_of(BF16)
    errors = []
    for once in (True, False):
        total = torch.empty(R, C, dtype=BF16)
        pairs = [(left[:, a:b], right[a:b]) for a, b in ((0, 40), (40, N))]
        accumulate(total, pairs, BF16, first=True, rows=ROWS, once=once)
        errors.append(worst(total, left, right))
    assert errors[0] <= EPS[BF16] / 2 + 8 * EPS[F32]
    assert errors[1] <= 2 * EPS[BF16]


@pytest.mark.parametrize("total_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("held_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("hidden", [1, 5, C])
def test_storage_holds_as_many_tokens_as_fit(total_dtype: torch.dtype, held_dtype: torch.dtype, hidden: int) -> None:
    most = capacity(total_dtype, hidden, held_dtype)
    assert most * held_dtype.itemsize <= hidden * total_dtype.itemsize
    like = torch.zeros(1)
    for tokens, rows in itertools.product({0, most // 2, most}, (1, ROWS, R)):
        total, inside = workspace(like, (R, hidden), total_dtype, tokens, held_dtype, rows)
        assert total.shape == (R, hidden)
        assert total.is_contiguous()
        assert not total._is_view()
        assert inside.shape == (R, tokens)
        assert inside.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
        extra = total.untyped_storage().nbytes() - R * hidden * total_dtype.itemsize
        assert extra <= max(rows * (tokens + 16) * held_dtype.itemsize, hidden * total_dtype.itemsize) + 256
        inside.fill_(1.0)  # lies within the storage
    with pytest.raises(ValueError, match=f"{most + 1} tokens of {held_dtype} do not fit in rows of {hidden}"):
        workspace(like, (R, hidden), total_dtype, most + 1, held_dtype, ROWS)


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("rows", [1, 100, 3000])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("total_dtype", [F32, BF16])
def test_blocks_are_few_and_never_reach_rows_still_to_be_read(
    total_dtype: torch.dtype, share: float, rows: int, most: int | None
) -> None:
    vocabulary, hidden = 3001, 64
    tokens = max(1, int(share * capacity(total_dtype, hidden, BF16)))
    total, inside = workspace(torch.zeros(1), (vocabulary, hidden), total_dtype, tokens, BF16, rows)
    begin, narrow = inside.storage_offset() * 2, inside.stride(0) * 2
    end, count = 0, 0
    for block in blocks(total, inside, most):
        assert block.start == end < block.stop
        assert block.stop * hidden * total.itemsize <= begin + block.start * narrow
        assert most is None or block.stop - block.start <= most
        end, count = block.stop, count + 1
    assert end == vocabulary
    if most is None:
        at_least = max(1, rows * narrow // (hidden * total.itemsize))  # rows, by the excess alone
        assert count <= 1 + -(-vocabulary // at_least)


def test_blocks_shrink_with_the_share_of_tokens() -> None:
    total, inside = workspace(torch.zeros(1), (128256, 64), BF16, 16, BF16, 8192)
    assert [b.stop - b.start for b in blocks(total, inside)] == [98176, 24576, 5504]


@pytest.mark.parametrize("tokens", [1, 17, 20, 24])
def test_rows_in_the_storage_are_aligned_where_those_of_the_total_are(tokens: int) -> None:
    _, inside = workspace(torch.zeros(1), (R, 24), BF16, tokens, BF16, ROWS)
    assert inside.stride(0) % 8 == 0
    assert inside.stride(0) >= tokens


def test_product_widens() -> None:
    left, right = (operand(t, BF16) for t in pieces_of(BF16))
    out = torch.empty(R, C)
    assert product(left, right, out=out) is out
    assert torch.equal(out, product(left, right))
    assert product(left, right).dtype == F32
    assert product(left.double(), right.double()).dtype == F64


@pytest.mark.parametrize(
    ("rows", "columns", "processors", "expected"),
    [
        (4300, 4096, 132, 4224),  # 33 rows of 16 tiles: 4 waves
        (4224, 4096, 132, 4224),
        (4223, 4096, 132, 4096),  # 32 rows of tiles take as long as 33, but 16 of them take more than half of that
        (8448, 2048, 132, 8448),
        (4300, 4096, 108, 3456),
        (4300, 4096, 1, 4224),  # elsewhere only whole tiles count
        (127, 4096, 132, 127),
        (128, 99999, 132, 128),
    ],
)
def test_blocks_are_whole_waves_of_tiles(rows: int, columns: int, processors: int, expected: int) -> None:
    assert whole(rows, columns, processors) == expected


@pytest.mark.parametrize("processors", [132, 114, 108, 148, 1])
@pytest.mark.parametrize("columns", [64, 768, 2048, 2304, 2880, 4096, 7168, 16384])
def test_no_block_is_much_slower_by_the_row_than_the_best(columns: int, processors: int) -> None:
    def cost(height: int) -> float:
        return (math.ceil(height * across / processors) + 1 / 16) / height

    across = math.ceil(columns / 256)
    for rows in [*range(128, 9000, 413), 30000, 128000]:
        found, rest = divmod(whole(rows, columns, processors), 128)
        assert rest == 0
        assert 1 <= found <= rows // 128
        assert cost(found) <= 1.01 * min(cost(height) for height in range(1, rows // 128 + 1))
