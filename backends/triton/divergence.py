"""The divergence of two softmaxes with Triton between cuBLAS's products.

Both models' fp32 logits are read for their logsumexp, for the loss, and for the gradient, which is written in the
operands' dtype. Where beta is 0 the gradient needs nothing of the loss, and one read gives both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headmux.backends.common.budget import MIB
from headmux.backends.common.head import Head, Steps
from headmux.backends.common.jsd import Divergence
from headmux.backends.common.storage import rows_of
from headmux.backends.triton.launch import Side, Transform, diverge, logsumexp, raw_logits, scale_rows
from headmux.backends.triton.tuning import BLOCK


class TritonDivergence(Divergence):
    """Three reads of the pair of logits, two where beta is 0."""

    steps = Steps(scale_rows=scale_rows)
    passes_over = True
    copies = 1

    @property
    def block_bytes(self) -> int:
        """As wide logits are counted, of which a block of 16-bit gradients holds half the bytes."""
        return 2 * BLOCK if self.student.dtype.itemsize == 2 else 32 * MIB

    def compare(
        self, tokens: slice, student: Tensor, teacher: Tensor, upstream: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Losses, and the gradient in ``out``."""
        beta = self.args.beta
        q, p = self._side(self.student, student, tokens), self._side(self.teacher, teacher, tokens)
        valid = None if self.valid is None else self.valid[tokens]
        if beta == 0.0:
            return diverge(q, p, beta, valid, loss=True, upstream=upstream, into=out)[0]
        found = diverge(q, p, beta, valid, loss=True)
        kl = found[-1]
        if out is not None:
            diverge(q, p, beta, valid, loss=False, upstream=upstream, kl=kl, into=out)
        return kl if beta == 1.0 else torch.lerp(kl, found[0], beta)

    def _side(self, head: Head, flat: Tensor, tokens: slice) -> Side:
        raw = rows_of(flat, self.vocabulary, tokens.stop - tokens.start)
        raw_logits(head, tokens, raw, self.plan)
        transform = Transform(head, tokens)
        return Side(raw, transform, logsumexp(raw, transform))
