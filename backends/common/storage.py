"""The workspace inside grad_weight: logits of tokens held where the gradient will be written.

grad_weight has V * H elements and nobody reads it before the end, so the logits of up to H tokens fit into its storage,
token index last: S [V, n], row by row. The gradient is formed from them block by block of vocabulary rows, each block
one matrix product over all tokens, written where no logits lie that are still to be read. For that S lies at the end of
the storage, and the storage is a little longer than the gradient:

    storage   |0 ............................... V*H|......|
    gradient  |row 0|row 1| ...             |row V-1|
    S                   |row 0|row 1| ...                  |

So no logits memory is needed but that excess, nothing is copied aside, and all tokens add up inside one product. The
first block is as large as what lies before S, the share 1 - n / H of the vocabulary; each later one is n / H times as
large as the one before, but never smaller than the excess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from headmux.devices import multiprocessors

ALIGNED = 16
"""Elements: rows of temporaries are a multiple, 32 bytes of a 16-bit dtype, and what Triton's vector loads need."""

_VECTOR = 8  # elements: 16 bytes of a 16-bit dtype, which a GPU's matrix products load at once
_SINGLE = ("cpu",)  # kinds of devices that need no whole vectors
_BYTES = 128
_TILE = (128, 256)  # rows and columns of a tile of a matrix product
_LAUNCH = 1 / 16  # what a product costs beside its tiles, in waves of them


def capacity(total_dtype: torch.dtype, hidden: int, held: torch.dtype) -> int:
    """How many tokens' logits of dtype ``held`` fit in a [V, hidden] tensor of dtype ``total_dtype``."""
    return hidden * total_dtype.itemsize // held.itemsize


def workspace(
    like: Tensor, shape: tuple[int, int], dtype: torch.dtype, tokens: int, held: torch.dtype, rows: int
) -> tuple[Tensor, Tensor]:
    """An uninitialised [V, H] tensor, and a [V, tokens] one of dtype ``held`` in its storage, which ``blocks`` cuts.

    Args:
        like: A tensor on the device.
        shape: (V, H).
        dtype: dtype of the first.
        tokens: At most ``capacity`` of them.
        held: dtype of the second.
        rows: How many rows of the second the storage is longer than the first.

    Raises:
        ValueError: More tokens than fit.
    """
    vocabulary, hidden = shape
    room = capacity(dtype, hidden, held)
    if tokens > room:
        raise ValueError(f"{tokens} tokens of {held} do not fit in rows of {hidden} {dtype}")
    stride = min(padded(tokens), room)
    wide, narrow = hidden * dtype.itemsize, stride * held.itemsize
    start = vocabulary * (wide - narrow) + max(min(rows, vocabulary) * narrow, wide)
    start = -(-start // _BYTES) * _BYTES
    end = max(vocabulary * wide, start + vocabulary * narrow)
    storage = like.new_empty(-(-end // _BYTES) * _BYTES // dtype.itemsize, dtype=dtype)
    inside = storage.view(held).as_strided((vocabulary, tokens), (stride, 1), start // held.itemsize)
    return alone(storage, shape), inside


def alone(storage: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a tensor's storage, which is not a view of it: autograd would treat it as one."""
    rows, columns = shape
    return storage.new_empty(0).set_(storage.untyped_storage(), 0, (rows, columns), (columns, 1))


def blocks(total: Tensor, inside: Tensor, most: int | None = None) -> Iterator[slice]:
    """Blocks of rows, in the order in which they may be written to the first tensor of ``workspace`` once the same rows
    of the second have been read: as few as is fast, or of at most so many rows.
    """
    vocabulary, columns = total.shape
    processors = multiprocessors(total.device)
    wide, narrow = total.stride(0) * total.itemsize, inside.stride(0) * inside.itemsize
    start = inside.storage_offset() * inside.itemsize
    low = 0
    while low < vocabulary:
        high = (start + low * narrow) // wide
        if high < vocabulary:
            high = low + whole(high - low, columns, processors)
        high = min(high, vocabulary, vocabulary if most is None else low + most)
        yield slice(low, high)
        low = high


@lru_cache(maxsize=1024)
def whole(rows: int, columns: int, processors: int) -> int:
    """At most so many rows, of which a product with so many columns takes the least time for each.

    Every processor computes a tile at a time, so a wave of fewer tiles takes as long as a full one.
    """
    most, across = rows // _TILE[0], -(-columns // _TILE[1])
    if not most:
        return rows
    last = -(-most * across // processors)
    heights = [(min(most, wave * processors // across), wave) for wave in range(max(1, last - 8), last + 1)]
    return max((height / (wave + _LAUNCH), height) for height, wave in heights)[1] * _TILE[0]


def apart(total: Tensor, inside: Tensor, rows: int) -> bool:
    """Whether no block of so many rows of the first tensor of ``workspace`` covers any of the same rows, or of later
    ones, of the second.
    """
    vocabulary = total.shape[0]  # the last block comes nearest
    wide, narrow = total.stride(0) * total.itemsize, inside.stride(0) * inside.itemsize
    start = inside.storage_offset() * inside.itemsize
    return start + max(vocabulary - rows, 0) * narrow >= vocabulary * wide


def padded(columns: int) -> int:
    """Row stride of a temporary of so many columns: GEMMs are several times slower where rows are not aligned."""
    return -(-columns // ALIGNED) * ALIGNED


def vectors(columns: int, device: torch.device) -> int:
    """How many columns a product takes in place of so many: on a GPU, any that are no whole vectors are slow."""
    return columns if device.type in _SINGLE else -(-columns // _VECTOR) * _VECTOR


def places(rows: Tensor) -> int:
    """How many columns each of the rows of a temporary has places for: as many as it has columns, or padded ones."""
    columns = padded(rows.shape[1])
    return columns if rows.stride(0) >= columns else rows.shape[1]


def spread(rows: Tensor) -> Tensor:
    """The rows of a temporary with as many of their places as a product takes."""
    columns = vectors(rows.shape[1], rows.device)
    if columns == rows.shape[1] or columns > rows.stride(0):
        return rows
    return rows.as_strided((rows.shape[0], columns), rows.stride())


def rows_of(flat: Tensor, rows: int, columns: int) -> Tensor:
    """A [rows, columns] view of a flat buffer of at least ``rows * padded(columns)`` elements."""
    return flat.as_strided((rows, columns), (padded(columns), 1), flat.storage_offset())
