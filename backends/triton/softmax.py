"""Softmax over the vocabulary with Triton between cuBLAS's products: each logit is read twice and written once.

Raw logits are kept in the operands' dtype, as the product leaves them. Everything from there on is fp32, and the logit
at each label is formed anew in fp32, so that its loss and its gradient p - 1 do not feel the rounding.
"""

from __future__ import annotations

from torch import Tensor

from headmux.backends.common.budget import MIB
from headmux.backends.common.softmax import Coefficients, Softmax, Statistics
from headmux.backends.triton import kernels
from headmux.backends.triton.launch import Transform, dots_at_labels, on_device, raw_logits, statistics, unit
from headmux.backends.triton.tuning import tuning


class TritonSoftmax(Softmax):
    """Raw logits, and kernels that look at them or turn them into their gradient."""

    # 2048 rows of 4096 tokens: grad_weight's products of two waves of tiles each
    block_bytes = 16 * MIB

    def prepare(self) -> None:
        """Keep raw logits; a block of them is all that is held beside."""
        self.held_dtype = self.block_dtype = self.head.dtype
        self.copies = 1

    def statistics(self, first: int = 0) -> Statistics | None:
        """One chunk's logits at a time."""
        found = [self.look(tokens, held)[0] for tokens, held in self.places.outside(first)]
        return Statistics.joined(found) if found else None

    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Transform]:
        """One product and one read of the logits."""
        assert held is not None
        labels = self.labels.index[tokens]
        dots = dots_at_labels(self.head, labels, tokens)
        raw_logits(self.head, tokens, held, self.plan)
        transform = Transform(self.head, tokens)
        return statistics(held, transform, self.wanted, labels, dots), transform

    def to_gradient(self, held: Tensor, state: Transform, statistics: Statistics, tokens: slice, by: Coefficients) -> None:
        """One read and one write of the logits."""
        vocabulary, count = held.shape
        weights = self.wanted.smoothed if isinstance(self.wanted.smoothed, Tensor) else None
        cut = tuning(held.device).gradient.cut(count, vocabulary)
        with on_device(held.device):
            kernels.to_gradient[(cut.programs,)](
                held, held.stride(0), count, vocabulary, self.labels.index[tokens], state.bias, state.divisors, weights,
                unit(held.dtype), state.scale, state.softcap, state.inverse, statistics.lse, statistics.target_logit,
                by.softmax.contiguous(), by.label.contiguous(), by.entropy, by.smoothing, cut.rows,
                EVEN=cut.even, R=cut.height, BN=cut.width, num_warps=cut.warps,
            )  # fmt: skip
