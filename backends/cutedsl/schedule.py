"""Which logit tile a cluster works on when, and into which slot its statistics go.

A tile is a block of tokens times a column of vocabulary rows; each thread block of a cluster takes half of the tokens.
Tiles are numbered in groups of token blocks, within a group vocabulary first: the clusters that run at one time then
share few weight tiles, and the states of a group stay in the second-level cache while the weight streams past once a
group. Cluster c takes tiles c, c + clusters, ...

The two warpgroups of a thread block take its tiles in turn. So a token block of a group of ``height`` blocks meets the
same warpgroups again after ``period = workers / gcd(workers, height)`` columns, there being twice as many workers as
clusters. Column j goes into slot ``j % period``: a slot belongs to one worker, which folds its columns into it one
after the other, in the same order in each call.

Up to 128 tokens at the end that fill no more than half a block are a half block, whose tiles come last. There the
thread blocks of a cluster take the same tokens and neighbouring columns, and each has slots of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORKERS = 2
"""Warpgroups of a thread block that take tiles in turn."""

CLUSTER = 2
"""Thread blocks of a cluster."""

TOKENS = 128
"""Tokens of a thread block's tile."""

COLUMN = 192
"""Vocabulary rows of a thread block's tile."""

STAGES = 4
"""Stages of operands in shared memory."""

RING = 2 * STAGES
"""Entries of a ring of headmux.backends.cutedsl.claims. A claim is at most STAGES + 2 ahead of the last that every warp
has read: a tile's operands take a stage or more, which all warps must have passed on before."""

_GROUP_BYTES = 8 * 2**20  # hidden states of a group; from 4 to 22 MiB an H200's times differ by 2 %


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tiles of a call.

    Attributes:
        blocks: Token blocks of more than half a cluster's tokens.
        half: Whether a half block follows.
        columns: Columns of vocabulary rows.
        group: Token blocks of a group; the last group may have fewer.
        clusters: Clusters that run at one time.
    """

    blocks: int
    half: bool
    columns: int
    group: int
    clusters: int

    @classmethod
    def of(cls, tokens: int, vocabulary: int, hidden: int, multiprocessors: int) -> Schedule:
        """The schedule for so many tokens, vocabulary rows, hidden features (of 2 bytes) and multiprocessors."""
        blocks, half = divmod(-(-tokens // TOKENS), CLUSTER)
        columns = -(-vocabulary // COLUMN)
        groups = max(1, -(-blocks // max(2, _GROUP_BYTES // (CLUSTER * TOKENS * hidden * 2))))
        tiles = blocks * columns + half * -(-columns // CLUSTER)
        clusters = min(max(1, multiprocessors // CLUSTER), tiles)
        return cls(blocks, half > 0, columns, max(1, -(-blocks // groups)), clusters)

    def period(self, height: int) -> int:
        """After how many columns a token block of a group of ``height`` blocks meets the same worker again."""
        workers = WORKERS * self.clusters
        return workers // math.gcd(workers, height)

    @property
    def periods(self) -> tuple[int, int]:
        """The period of whole groups and that of the last one."""
        return self.period(self.group), self.period((self.blocks - 1) % self.group + 1)

    @property
    def slots(self) -> int:
        """Slots of a token, but for those of the half block."""
        return min(max(self.periods), self.columns)

    @property
    def size(self) -> int:
        """Slots of all tokens: of whole blocks, then of the half block, which has one for each running warpgroup."""
        return TOKENS * CLUSTER * (self.blocks * self.slots + (WORKERS * self.clusters if self.half else 0))
