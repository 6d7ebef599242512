"""Softmax over the vocabulary whose exponentials the product itself leaves: logits are never written, read or rounded.

It knows gradients that are a multiple of p - [j = y] for each token, no others: ``Wanted.proportional``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headmux.backends.common.chunks import Place
from headmux.backends.common.head import Steps
from headmux.backends.common.softmax import Coefficients, Softmax, Statistics
from headmux.backends.cutedsl.launch import accumulate, scale_rows
from headmux.backends.cutedsl.statistics import aligned, exponentials, statistics


class CuteSoftmax(Softmax):
    """Exponentials from one product."""

    steps = Steps(scale_rows=scale_rows, accumulate=accumulate)

    def prepare(self) -> None:
        """Keep exponentials."""
        head = self.head
        self.head = replace(
            head,
            input=aligned(head.input.to(head.dtype)),
            weight=aligned(head.weight),
            counts=None if self.labels.valid is None else self.labels.counts,
        )
        self.hold_as_operands()

    def survey(self, tokens: slice, places: Iterator[Place]) -> Statistics:
        """From a product that leaves nothing."""
        labels = self.labels[tokens]
        target = labels.masked(labels.index, -1)
        found = statistics(
            self.head.input[tokens], self.head.weight, self.head.bias, target, ignore_index=-1, scale=self.head.scale,
            softcap=None, temperature=self.head.divisor(tokens),
        )  # fmt: skip
        return Statistics(found.lse, found.logp + found.lse, None, None, None)

    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Tensor]:
        """One product, and its state: [n] what makes p - [j = y] of the exponentials."""
        assert held is not None
        assert self.wanted.proportional
        labels = self.labels[tokens]
        lse, logit, factors = exponentials(
            self.head.input[tokens], self.head.weight, self.head.bias, labels.index, labels.counts, held,
            scale=self.head.scale, temperature=self.head.divisor(tokens),
        )  # fmt: skip
        return Statistics(lse, logit, None, None, None), factors

    def to_gradient(
        self, held: Tensor, state: Tensor, statistics: Statistics, tokens: slice, by: Coefficients
    ) -> Tensor | None:
        """Nothing is left to do but to scale them."""
        return self.head.chained(state * by.softmax, tokens).to(torch.float32)
