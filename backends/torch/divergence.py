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
        q_logits, q_lse = self._logits(self.student, student, tokens)
        p_logits, p_lse = self._logits(self.teacher, teacher, tokens)

        def log_probabilities(rows: slice) -> tuple[Tensor, Tensor]:
            return q_logits[rows] - q_lse, p_logits[rows] - p_lse

        blocks = list(self.plan.blocks(tokens.stop - tokens.start))
        loss = torch.zeros_like(q_lse)
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
                g.mul_(head.softcap_factor(q_logits[rows], tokens))
            out[rows].copy_(g)
        return loss

    def _logits(self, head: Head, flat: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        right = head.right(tokens)
        count = right.shape[1]
        z = rows_of(flat, self.vocabulary, count)
        parts = []
        for rows in self.plan.blocks(count):
            room = flat[rows.start * padded(count) :]
            if head.wide == self.wide:
                head.logits(head.weight[rows], rows, tokens, right, room)
            else:
                narrow = room.new_empty((rows.stop - rows.start) * padded(count), dtype=head.wide)
                z[rows].copy_(head.logits(head.weight[rows], rows, tokens, right, narrow))
            parts.append(torch.logsumexp(z[rows], dim=0))
        return z, torch.logsumexp(torch.stack(parts), dim=0)

    def _mixture(self, q: Tensor, p: Tensor) -> Tensor:
        """log M."""
        beta = self.args.beta
        if beta == 1.0:
            return p
        return torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
