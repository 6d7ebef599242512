"""The divergence of two softmaxes in PyTorch, by blocks of vocabulary rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headmux.backends.common.head import Head
from headmux.backends.common.jsd import Divergence
from headmux.backends.common.storage import padded, rows_of


class TorchDivergence(Divergence):
    """Two passes over held logits: losses, then gradients."""

    copies = 5

    def compare(
        self, tokens: slice, student: Tensor, teacher: Tensor, upstream: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Losses, and the gradient in ``out``."""
        beta = self.args.beta
        q_logits, q_top, q_sum = self._logits(self.student, student, tokens)
        p_logits, _, p_sum = self._logits(self.teacher, teacher, tokens)

        def log_probabilities(rows: slice) -> tuple[Tensor, Tensor]:
            return q_logits[rows] - q_sum, p_logits[rows] - p_sum

        blocks = list(self.plan.blocks(tokens.stop - tokens.start))
        loss = torch.zeros_like(q_sum)
        student_kl = torch.zeros_like(loss)  # KL(Q || M)
        for rows in blocks:
            q, p = log_probabilities(rows)
            if beta == 0.0:
                loss += p.exp().mul_(p.sub_(q)).sum(0)
                continue
            m = self._mixture(q, p)
            if beta != 1.0:
                loss += p.exp().mul_(p - m).sum(0).mul_(beta)
            student_kl += q.exp().mul_(q.sub_(m)).sum(0)
        loss += (1.0 if beta == 1.0 else 1.0 - beta) * student_kl
        if upstream is None or out is None:
            return loss
        head = self.student
        for rows in blocks:
            q, p = log_probabilities(rows)
            if beta == 0.0:
                g = q.exp() - p.exp()
            else:
                m = self._mixture(q, p)
                g = q.exp().mul_(q.sub_(m).sub_(student_kl)).mul_(1.0 if beta == 1.0 else 1.0 - beta)
            g.mul_(upstream * head.chain(tokens))
            if head.softcap is not None:
                g.mul_(head.softcap_factor(q_logits[rows] + q_top, tokens))
            out[rows].copy_(g)
        return loss

    def _logits(self, head: Head, flat: Tensor, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Logits less each token's largest, that, and the logarithm of the sum of their exponentials.

        A logsumexp in one number is rounded to an ulp of the largest logit, which may be more than a divergence.
        """
        right, count = head.right(tokens), tokens.stop - tokens.start
        z = rows_of(flat, self.vocabulary, count)
        blocks = list(self.plan.blocks(count))
        tops = []
        for rows in blocks:
            room = flat[rows.start * padded(count) :]
            if head.wide == self.wide:
                head.logits(head.weight[rows], rows, tokens, right, room)
            else:
                narrow = room.new_empty((rows.stop - rows.start) * padded(count), dtype=head.wide)
                z[rows].copy_(head.logits(head.weight[rows], rows, tokens, right, narrow))
            tops.append(z[rows].amax(0))
        top = torch.stack(tops).amax(0)
        total = torch.zeros_like(top)
        for rows in blocks:
            total += z[rows].sub_(top).exp().sum(0)
        return z, top, total.log_()

    def _mixture(self, q: Tensor, p: Tensor) -> Tensor:
        """log M."""
        beta = self.args.beta
        if beta == 1.0:
            return p
        return torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
