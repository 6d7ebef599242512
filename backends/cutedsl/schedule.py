"""Which logit tile a cluster works on when, and into which slot its statistics go.

A tile is a block of tokens times a column of vocabulary rows. Tiles are numbered in groups of token blocks, within a
group vocabulary first: the clusters that run at one time then share few weight tiles, and the states of a group stay in
the second-level cache while the weight streams past once a group. Cluster c takes tiles c, c + clusters, ...

So a token block of a group of ``height`` blocks meets the same cluster again after
``period = clusters / gcd(clusters, height)`` columns. Column j goes into slot ``j % period``: a slot belongs to one
cluster, which folds its columns into it one after the other, in the same order in each call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CLUSTER = 2
"""Thread blocks of a cluster: neighbours in tokens, which share each weight tile."""

TOKENS = 128
"""Tokens of a thread block's tile."""

COLUMN = 256
"""Vocabulary rows of a tile."""

_GROUP_BYTES = 8 * 2**20  # hidden states of a group; from 4 to 32 MiB an H200's times differ by 2 %


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tiles of a call.

    Attributes:
        blocks: Blocks of tokens, each of a cluster's height.
        columns: Columns of vocabulary rows.
        group: Token blocks of a group; the last group may have fewer.
        clusters: Clusters that run at one time.
    """

    blocks: int
    columns: int
    group: int
    clusters: int

    @classmethod
    def of(cls, tokens: int, vocabulary: int, hidden: int, multiprocessors: int) -> Schedule:
        """The schedule for so many tokens, vocabulary rows, hidden features (of 2 bytes) and multiprocessors."""
        height = CLUSTER * TOKENS
        blocks, columns = -(-tokens // height), -(-vocabulary // COLUMN)
        groups = -(-blocks // max(1, _GROUP_BYTES // (height * hidden * 2)))
        clusters = min(max(1, multiprocessors // CLUSTER), blocks * columns)
        return cls(blocks, columns, -(-blocks // groups), clusters)

    def period(self, height: int) -> int:
        """After how many columns a token block of a group of ``height`` blocks meets the same cluster again."""
        return self.clusters // math.gcd(self.clusters, height)

    @property
    def periods(self) -> tuple[int, int]:
        """The period of whole groups and that of the last one."""
        return self.period(self.group), self.period((self.blocks - 1) % self.group + 1)

    @property
    def slots(self) -> int:
        """Slots of a token."""
        return min(max(self.periods), self.columns)
