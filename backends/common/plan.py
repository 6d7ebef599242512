"""How a call is cut: blocks of vocabulary rows times tokens, and chunks of tokens whose logits are held whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headmux.backends.common.budget import MIB, budget_for
from headmux.backends.common.storage import ALIGNED

# Largest block of wide logits [rows, tokens] in bytes, and most tokens of one. On a CPU a block stays in the
# second-level cache between passes; on a GPU fewer blocks mean fewer launches, and 2048 rows keep cuBLAS at full rate.
_BLOCK_BYTES = {"cpu": 2 * MIB, "cuda": 34 * MIB}
_BLOCK_TOKENS = {"cpu": 512, "cuda": 8192}
_LEAST_ROWS = 64
# kept for each token of each block: two or three statistics, the logit at the label and its place
_STATISTICS_BYTES = 24
# tokens of whole tiles of a matrix product, or at least of half its smallest: a part of a tile takes as long as a whole
_CHUNK_UNITS = (256, 128, 64)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the pieces.

    Attributes:
        block: Bytes of a block: its wide logits and, where GEMMs need that, its widened weight rows.
        row: Bytes of a widened weight row, 0 if rows are used as they are.
        wide: Bytes of a wide logit.
        tokens: Most tokens of a block.
        room: Most tokens whose logits can be held whole, over the vocabulary, outside grad_weight.
        chunk: Of those, as many as make whole tiles of a matrix product.
        vocabulary: V.
    """

    block: int
    row: int
    wide: int
    tokens: int
    room: int
    chunk: int
    vocabulary: int

    def rows(self, tokens: int) -> int:
        """Vocabulary rows of a block of so many tokens (at most ``tokens`` of the plan are formed at once)."""
        per_row = min(tokens, self.tokens) * self.wide + self.row
        return _rounded(min(self.vocabulary, max(1, self.block // per_row)), _LEAST_ROWS)

    def holding(self, tokens: int) -> Plan:
        """The same, with room for so many tokens, in one chunk."""
        return replace(self, room=tokens, chunk=tokens)

    def blocks(self, tokens: int) -> Iterator[slice]:
        """The blocks of vocabulary rows for so many tokens."""
        return pieces(self.vocabulary, self.rows(tokens))


def plan(
    tokens: int,
    vocabulary: int,
    hidden: int,
    *,
    wide_bytes: int,
    held_bytes: int,
    device_type: str,
    widened: bool,
    copies: int = 3,
    block_bytes: int | None = None,
    share: int = 1,
) -> Plan:
    """Cut a call so that its temporaries fit the budget.

    Args:
        tokens: N.
        vocabulary: V.
        hidden: H.
        wide_bytes: Bytes of a logit in the statistics' dtype.
        held_bytes: Bytes held for each logit of a chunk.
        device_type: Kind of device.
        widened: Whether blocks of the weight are copied to a wider dtype first, where GEMMs need that.
        copies: How many blocks are held at once: the logits, their exponentials, products.
        block_bytes: Largest block of wide logits in bytes; None for the device's default.
        share: Factor of the default budget, for an op that holds the logits of several models.
    """
    budget = budget_for(device_type, share)
    block = block_bytes or _BLOCK_BYTES.get(device_type, _BLOCK_BYTES["cuda"])
    block = min(block, max(1, budget // (2 * copies)))
    most = max(1, min(tokens, _BLOCK_TOKENS.get(device_type, _BLOCK_TOKENS["cuda"])))
    most = max(1, min(most, block // (_LEAST_ROWS * wide_bytes)))
    # fewer tokens make blocks of more rows: the statistics of all blocks stay under a quarter of the budget
    most = max(1, min(most, math.isqrt(budget * block // (4 * wide_bytes * _STATISTICS_BYTES * vocabulary))))
    left = max(0, budget - copies * block)
    room = min(tokens, max(ALIGNED, _rounded(left // (vocabulary * held_bytes), ALIGNED)))
    chunk = room
    if room < tokens:
        chunk = _rounded(room, _CHUNK_UNITS[0] if room >= _CHUNK_UNITS[0] else _CHUNK_UNITS[-1])
    return Plan(block, hidden * wide_bytes if widened else 0, wide_bytes, most, room, chunk, vocabulary)


def pieces(total: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def even(total: int, most: int) -> int:
    """The size of as few pieces of at most ``most`` as can be, as even as whole tiles, or else padded rows, allow."""
    if total <= most:
        return max(1, total)
    size = -(-total // -(-total // most))
    rounded = (-(-size // unit) * unit for unit in (*_CHUNK_UNITS, ALIGNED))
    return next((found for found in rounded if found <= most), _rounded(most, ALIGNED))


def _rounded(value: int, unit: int) -> int:
    return value if value < unit else value - value % unit
