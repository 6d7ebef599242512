"""Targets as kernels written in PyTorch use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of N tokens.

    Attributes:
        index: [N] int64, safe to index the vocabulary with: clamped into range.
        valid: [N] bool, the tokens that count; None if all do.
        bad: [N] bool, tokens that count whose label is out of range. They must give NaN.
    """

    index: Tensor
    valid: Tensor | None
    bad: Tensor

    @classmethod
    def of(cls, target: Tensor, ignore_index: int | None, classes: int) -> Labels:
        """Sort labels into usable, ignored and out of range."""
        index = target.clamp(0, classes - 1)
        bad = index != target
        valid = None
        if ignore_index is not None:
            valid = target != ignore_index
            bad &= valid
        return cls(index, valid, bad)

    def __getitem__(self, tokens: slice) -> Labels:
        valid = None if self.valid is None else self.valid[tokens]
        return Labels(self.index[tokens], valid, self.bad[tokens])

    def masked(self, rows: Tensor, other: float = 0.0) -> Tensor:
        """Rows with ``other`` where a token does not count."""
        return rows if self.valid is None else torch.where(self.valid, rows, other)

    def poisoned(self, rows: Tensor) -> Tensor:
        """Rows with NaN where a label is out of range."""
        return torch.where(self.bad, torch.nan, rows)


def counted(states: Tensor, valid: Tensor | None) -> Tensor:
    """Hidden states [N, H] with 0 where a token does not count, so that nothing of it can reach a gradient."""
    return states if valid is None else torch.where(valid[:, None], states, 0)
