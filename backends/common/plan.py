"""How a call is cut: blocks of vocabulary rows times tokens, and chunks of tokens whose logits are held whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headmux.backends.common.budget import MIB, budget_for

# Largest block of wide logits [rows, tokens] in bytes, and most tokens of one. On a CPU a block stays in the
# second-level cache between passes; on a GPU in half of the L2, and 2048 rows keep cuBLAS at its full rate.
_BLOCK_BYTES = {"cpu": 2 * MIB, "cuda": 32 * MIB}
_BLOCK_TOKENS = {"cpu": 512, "cuda": 8192}
_LEAST_ROWS = 64
_CHUNK_UNIT = 64
# a block is held up to three times: the logits, their exponentials, a product or a copy of stored rows
_COPIES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the pieces.

    Attributes:
        rows: Vocabulary rows of a block.
        tokens: Tokens of a block.
        chunk: Tokens whose logits are held whole, over the vocabulary, outside grad_weight.
    """

    rows: int
    tokens: int
    chunk: int

    def blocks(self, vocabulary: int) -> Iterator[slice]:
        """The blocks of vocabulary rows."""
        return pieces(vocabulary, self.rows)


def plan(
    tokens: int, vocabulary: int, hidden: int, *, wide_bytes: int, held_bytes: int, device_type: str, widened: bool
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
    """
    budget = budget_for(device_type)
    block = min(_BLOCK_BYTES.get(device_type, _BLOCK_BYTES["cuda"]), max(1, budget // (2 * _COPIES)))
    wide = max(1, min(tokens, _BLOCK_TOKENS.get(device_type, _BLOCK_TOKENS["cuda"])))
    wide = max(1, min(wide, block // (_LEAST_ROWS * wide_bytes)))
    per_row = wide * wide_bytes + (hidden * wide_bytes if widened else 0)
    rows = _rounded(min(vocabulary, max(1, block // per_row)), _LEAST_ROWS)
    left = max(0, budget - _COPIES * rows * per_row)
    chunk = _rounded(min(tokens, max(1, left // (vocabulary * held_bytes))), _CHUNK_UNIT)
    if tokens > chunk:  # as few chunks, as even as can be
        even = -(-tokens // -(-tokens // chunk))
        chunk = min(chunk, -(-even // _CHUNK_UNIT) * _CHUNK_UNIT)
    return Plan(rows, wide, chunk)


def pieces(total: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _rounded(value: int, unit: int) -> int:
    return value if value < unit else value - value % unit
