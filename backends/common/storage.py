"""The workspace inside grad_weight: logits of tokens held where the gradient will be written.

grad_weight has V * H elements and nobody reads it before the end, so the logits of up to H tokens fit inside, token
index last: row v of a [V, n] view lies within row v of [V, H]. When the gradient is formed from them, block by block of
vocabulary rows, a block is copied aside, multiplied, and written over. All tokens then add up inside one GEMM, and no
memory is needed for the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED = 8  # 16 bytes of a 16-bit dtype


def capacity(total_dtype: torch.dtype, hidden: int, held: torch.dtype) -> int:
    """How many tokens' logits of dtype ``held`` fit in a [V, hidden] tensor of dtype ``total_dtype``.

    None where the tensor's rows are no whole number of such elements.
    """
    count, rest = divmod(hidden * total_dtype.itemsize, held.itemsize)
    return 0 if rest else count


def logits_inside(total: Tensor, tokens: int, held: torch.dtype) -> Tensor:
    """A [V, tokens] view of dtype ``held`` into the storage of a contiguous [V, H] tensor.

    Raises:
        ValueError: More tokens than fit.
    """
    if tokens > capacity(total.dtype, total.shape[1], held):
        raise ValueError(f"{tokens} tokens of {held} do not fit in rows of {total.shape[1]} {total.dtype}")
    return total.view(held)[:, :tokens]


def padded(columns: int) -> int:
    """Row stride of a temporary of so many columns: GEMMs are several times slower where rows are not aligned."""
    return -(-columns // _ALIGNED) * _ALIGNED


def rows_of(flat: Tensor, rows: int, columns: int) -> Tensor:
    """A [rows, columns] view of a flat buffer of at least ``rows * padded(columns)`` elements."""
    return flat.as_strided((rows, columns), (padded(columns), 1))
