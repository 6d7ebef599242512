"""Tokens that are no multiple of 8: on a GPU, matrix products take zeros after them, which reach no result.

Here a CPU stands in for it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from headmux import get_op
from headmux.backends.common import storage
from headmux.backends.common.storage import padded, places, rows_of, spread, vectors

# A 16-bit product is several times slower on a GPU where one of its sizes that vectors lie along is no multiple of
# 8. Sizes of all products of a call are collected, with a gradient and without.
PRODUCTS = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from headmux import budget, get_op
from headmux.backends.common import storage

impl = sys.argv[1]
storage._SINGLE = ()


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.strides = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
            self.sizes.append((*left.shape, right.shape[1]))
            self.strides.update(max(t.stride()) for t in (left, right))
        return func(*args, **(kwargs or {}))


def check(op, tokens, mb, **options):
    x, w = torch.randn(tokens, 32, requires_grad=True), torch.randn(160, 32, requires_grad=True)
    rest = (x.detach() * 2, w.detach() + 0.1) if op == "jsd" else (torch.arange(tokens) % 160,)
    with budget(mb), Products() as seen:
        get_op(op)(x, w, *rest, impl=impl, **options).sum().backward()
        with torch.no_grad():
            get_op(op)(x, w, *rest, impl=impl, **options)
    assert len(seen.sizes) >= 4, (op, tokens, mb, options, seen.sizes)
    assert all(n % 8 == 0 for product in seen.sizes for n in product), (op, tokens, mb, options, seen.sizes)
    assert all(s % 8 == 0 for s in seen.strides), (op, tokens, mb, options, seen.strides)


for tokens in (1, 31, 71):
    for mb in (56, 0.1):
        for op in ("flce", "jsd", "linear_logp"):
            check(op, tokens, mb)
        check("flce", tokens, mb, reduction="none")
print("aligned")
"""


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_sizes_of_products(impl: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRODUCTS, impl],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "aligned\n", done.stderr[-2000:]


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SINGLE", ())


def call(op: str, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 24, generator=generator).to(dtype).requires_grad_() for n in (tokens, 50))
    rest = (x.detach() * 2, w.detach() + 0.1) if op == "jsd" else (torch.arange(tokens) % 50,)
    out = get_op(op)(x, w, *rest, impl="torch")
    return [out.detach(), *torch.autograd.grad(out.sum(), (x, w))]


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("tokens", [1, 23, 24, 25, 39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["flce", "jsd", "linear_logp"])
def test_what_lay_in_memory_reaches_no_result(op: str, dtype: torch.dtype, tokens: int) -> None:
    """With all memory filled with NaN before it is used; some tokens lie inside grad_weight and some beyond."""
    want = call(op, tokens, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = call(op, tokens, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("as_on_gpu")
def test_grad_input_is_a_tensor_of_its_own() -> None:
    """It has the storage of a few more rows, and is no view of it."""
    grad = call("flce", 23, torch.float32)[1]
    assert grad.shape == (23, 24)
    assert grad.is_contiguous()
    assert not grad._is_view()
    assert grad.untyped_storage().nbytes() == 24 * 24 * 4


def test_a_cpu_takes_the_tokens_that_there_are() -> None:
    grad = call("flce", 23, torch.float32)[1]
    assert grad.untyped_storage().nbytes() == 23 * 24 * 4
    assert [vectors(23, torch.device(kind)) for kind in ("cpu", "cuda", "xpu")] == [23, 24, 24]


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize(
    ("columns", "stride", "held", "multiplied"),
    [(1, 16, 16, 8), (17, 32, 32, 24), (25, 32, 32, 32), (32, 32, 32, 32), (20, 24, 20, 24), (20, 20, 20, 20)],
)
def test_places(columns: int, stride: int, held: int, multiplied: int) -> None:
    rows = torch.empty(5 * stride).as_strided((5, columns), (stride, 1))
    assert places(rows) == held
    assert spread(rows).shape == (5, multiplied)
    assert spread(rows).data_ptr() == rows.data_ptr()


def test_rows_of_a_buffer_have_all_places() -> None:
    assert places(rows_of(torch.empty(3 * padded(17)), 3, 17)) == 32
