"""Softmax over the vocabulary with Triton between cuBLAS's products.

Raw logits are kept in the operands' dtype, as the product leaves them. Everything from there on is fp32, and the logit
at each label is formed anew in fp32, so that its loss and its gradient do not feel the rounding.

Where a token's gradient is a multiple of p - [j = y], the forward turns its bf16 logits into exponentials, each read
and written once, and the backward only scales rows of hidden states (``headmux.backends.common.head.Gradients``).
Otherwise they are read for the statistics, and read and written for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headmux.backends.common.chunks import Place
from headmux.backends.common.head import Steps
from headmux.backends.common.labels import Labels
from headmux.backends.common.softmax import Coefficients, Softmax, Statistics
from headmux.backends.triton.launch import (
    Transform,
    dots_at_labels,
    exponentials,
    raw_logits,
    scale_rows,
    statistics,
    to_gradient,
)
from headmux.backends.triton.tuning import BLOCK, LOOKED_AT


@dataclass(frozen=True, slots=True)
class Raw:
    """What raw logits need to become their gradient: their transform, [n] the raw logit at each label, and [3, n] 1 - p
    there and the logsumexp in two numbers.
    """

    transform: Transform
    dots: Tensor
    rest_lse: Tensor


class TritonSoftmax(Softmax):
    """Raw logits, and kernels that look at them or turn them into their gradient."""

    steps = Steps(scale_rows=scale_rows)

    def prepare(self) -> None:
        """Keep raw logits."""
        if self.labels.valid is not None:
            self.head = replace(self.head, counts=self.labels.counts)
        self.hold_as_operands()
        if self.held_dtype.itemsize == 2:
            self.block_bytes = BLOCK
            self.looked_at = LOOKED_AT

    def survey(self, tokens: slice, places: Iterator[Place]) -> Statistics:
        """One chunk's logits at a time."""
        return Statistics.joined([
            statistics(*self._logits(tokens, held), self.wanted, *self._at_labels(tokens))[0]
            for tokens, held in places
        ])

    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Raw | Tensor]:
        """One product, and one pass over the logits."""
        assert held is not None
        labels, dots = self._at_labels(tokens)
        raw, transform = self._logits(tokens, held)
        # fp16 has no room for exponentials against what is not the largest logit, nor for products with them; in fp32
        # scaled states would take more than all else beside the gradients, to spare one read next to slow products
        roomy = held.dtype == torch.bfloat16 and self.head.input.dtype != torch.float16
        if self.wanted.proportional and roomy and self.head.softcap is None:
            return exponentials(raw, transform, labels, dots)
        found, rest_lse = statistics(raw, transform, self.wanted, labels, dots)
        return found, Raw(transform, dots, rest_lse)

    def to_gradient(
        self, held: Tensor, state: Raw | Tensor, statistics: Statistics, tokens: slice, by: Coefficients
    ) -> Tensor | None:
        """Nothing is left to do for exponentials but to scale them; else one read and one write of the logits."""
        labels = self.labels[tokens]
        if isinstance(state, Tensor):
            return self.head.chained(state * by.softmax, tokens)
        weights = self.wanted.smoothed if isinstance(self.wanted.smoothed, Tensor) else None
        to_gradient(held, state.transform, labels, state.dots, state.rest_lse, by, weights)
        return None

    @cached_property
    def _dots(self) -> Tensor:
        """[N] fp32: the raw logit at each label, of all chunks in one launch."""
        return dots_at_labels(self.head, self.labels.index)

    def _at_labels(self, tokens: slice) -> tuple[Labels, Tensor]:
        return self.labels[tokens], self._dots[tokens]

    def _logits(self, tokens: slice, held: Tensor) -> tuple[Tensor, Transform]:
        raw_logits(self.head, tokens, held, self.plan)
        return held, Transform(self.head, tokens)
