"""Targets as kernels use them, and hidden states of which nothing that is ignored can reach a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of N tokens.

    Attributes:
        index: [N] int64, safe to index the vocabulary with: clamped into range.
        valid: [N] bool, the tokens that count; None if all do.
        counts: [N], 1 for a token that counts, 0 for one that does not, NaN for one that counts and whose label is out
            of range.
    """

    index: Tensor
    valid: Tensor | None
    counts: Tensor

    @classmethod
    def of(
        cls, target: Tensor, ignore_index: int | None, classes: int, dtype: torch.dtype = torch.float32
    ) -> Labels:
        """Sort labels into usable, ignored and out of range; ``counts`` of that dtype."""
        index = target.clamp(0, classes - 1)
        counts = torch.ones(target.shape, dtype=dtype, device=target.device)
        counts.masked_fill_(index != target, torch.nan)
        valid = None
        if ignore_index is not None:
            valid = target != ignore_index
            counts.masked_fill_(~valid, 0.0)
        return cls(index, valid, counts)

    def __getitem__(self, tokens: slice) -> Labels:
        if tokens == slice(0, self.index.shape[0]):  # most calls are one chunk
            return self
        valid = None if self.valid is None else self.valid[tokens]
        return Labels(self.index[tokens], valid, self.counts[tokens])

    def masked(self, rows: Tensor, other: float = 0.0) -> Tensor:
        """Rows with ``other`` where a token does not count."""
        return rows if self.valid is None else torch.where(self.valid, rows, other)

    def poisoned(self, rows: Tensor) -> Tensor:
        """Finite rows with 0 where a token does not count, and NaN where its label is out of range."""
        return rows * self.counts


Admit = Callable[[Tensor, Tensor, "int | None", int, torch.dtype], tuple[Labels, Tensor]]
"""Admits tokens, as ``admit`` does."""


def admit(
    states: Tensor, target: Tensor, ignore_index: int | None, classes: int, dtype: torch.dtype
) -> tuple[Labels, Tensor]:
    """Labels of tokens and their hidden states [N, H], 0 where a token does not count; ``counts`` of that dtype."""
    labels = Labels.of(target, ignore_index, classes, dtype)
    return labels, counted(states, labels.valid)


def counted(states: Tensor, valid: Tensor | None) -> Tensor:
    """Hidden states [N, H] with 0 where a token does not count, so that nothing of it can reach a gradient."""
    return states if valid is None else torch.where(valid[:, None], states, 0)
