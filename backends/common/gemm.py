"""Matrix products and their sums over chunks of tokens: the accumulation rules, once for every backend.

Products accumulate in fp32 (fp64 for fp64). A product reaches a running sum in one of three ways:

| operands -> sum | CUDA | elsewhere |
|---|---|---|
| fp32 -> fp32, fp64 -> fp64 | into the sum | into the sum |
| fp16 -> fp16, bf16 -> bf16 | into the sum (capability 8.0) | staged |
| fp16 or bf16 -> fp32 | into the sum, with ``out_dtype`` (capability 8.0) | staged |
| anything else, ROCm | staged | staged |

Staged means that the fp32 product of a block of vocabulary rows is formed aside and added; a second [V, H] is never
allocated. Outside CUDA a 16-bit operand is widened first, block by block: products of 16-bit numbers are exact in fp32,
and there the fp32 GEMM is both faster and as exact as a 16-bit one that accumulates in fp32.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from headmux.backends.common.plan import pieces
from headmux.backends.common.storage import blocks
from headmux.devices import capability


class Way(enum.Enum):
    """How a product reaches a running sum."""

    DIRECT = "GEMM into a sum of the operands' dtype"
    WIDE = "GEMM into an fp32 sum"
    STAGED = "fp32 product of a block of rows, then added"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of this dtype accumulate."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device's GEMM takes such operands and can return fp32 sums of their products."""
    if dtype in (torch.float32, torch.float64):
        return True
    found = capability(device)
    return found is not None and found >= (8, 0) and torch.version.hip is None


def way(operands: torch.dtype, total: torch.dtype, device: torch.device) -> Way:
    """How a product of these operands reaches a sum of that dtype on that device."""
    if not is_native(operands, device):
        return Way.STAGED
    if operands == total:
        return Way.DIRECT
    return Way.WIDE if total == torch.float32 and operands in (torch.float16, torch.bfloat16) else Way.STAGED


def operand(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to a GEMM's dtype, in the dtype in which this device's GEMM takes them."""
    values = values.to(dtype)
    return values if is_native(dtype, values.device) else values.to(wide_dtype(dtype))


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The wide product of two operands, as ``operand`` gives them."""
    wide = wide_dtype(left.dtype)
    if left.dtype == wide:
        return torch.mm(left, right, out=out) if out is not None else torch.mm(left, right)
    if out is not None:
        return torch.mm(left, right, out_dtype=wide, out=out)
    return torch.mm(left, right, out_dtype=wide)


def accumulate(
    total: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    *,
    first: bool,
    rows: int,
    inside: bool = False,
    once: bool = False,
) -> None:
    """Add each ``left @ right`` to a running sum, or overwrite the sum with the first of them.

    Args:
        total: [R, C], contiguous.
        pairs: Each left [R, n] and right [n, C].
        dtype: dtype of the GEMM's operands.
        first: Overwrite: the sum's old values are not read.
        rows: Rows of a block, where the product is formed in blocks.
        inside: The first left lies in the storage of ``total`` as ``storage.workspace`` lays it out.
        once: Round a sum of several products once, from fp32, where ``total`` has 16 bits.
    """
    wide = wide_dtype(dtype)
    staged = way(dtype, total.dtype, total.device) is Way.STAGED
    staged = staged or (once and len(pairs) > 1 and total.dtype != wide)
    rights = [operand(right, dtype) for _, right in pairs]
    most = None if not staged and all(left.dtype == dtype for left, _ in pairs) else rows
    cut = blocks(total, pairs[0][0], most) if inside else pieces(total.shape[0], most or total.shape[0])
    for block in cut:
        out = total[block]
        into = out.new_empty(out.shape, dtype=wide) if staged else out
        for i, ((left, _), right) in enumerate(zip(pairs, rights, strict=True)):
            _into(into, operand(left[block], dtype), right, first=i == 0 and (first or staged))
        if staged:
            out.copy_(into if first else into.add_(out))


def _into(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    if left.dtype == total.dtype:
        torch.mm(left, right, out=total) if first else torch.addmm(total, left, right, out=total)
    elif first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
