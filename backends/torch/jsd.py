"""jsd in PyTorch: chunks of tokens whose student and teacher logits are both held in fp32.

The gradient is a difference of near-equal numbers, so neither model's logits are ever rounded to 16 bits; only the
gradient itself is, as an operand of its GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.head import Gradients, Head
from headmux.backends.common.labels import counted
from headmux.backends.common.plan import Plan, pieces, plan
from headmux.backends.common.residual import scaled
from headmux.backends.common.storage import padded, rows_of
from headmux.contract import Kernel, Upstream

if TYPE_CHECKING:
    from headmux.ops.jsd import JSDArgs


def forward(args: JSDArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    """Losses per token and, for a reduced loss, the gradients for an upstream of 1."""
    divergence = _Divergence(args)
    # in fp16 the gradients of a mean underflow before a loss scale arrives, so they wait for it
    if any(args.needs) and args.row_scale is not None and args.compute_dtype != torch.float16:
        loss, residual = divergence.run(args.row_scale)
        return (loss,), residual
    return (divergence.run(None)[0],), None


def backward(args: JSDArgs, residual: Any, upstream: Upstream) -> tuple[Tensor | None, ...]:
    """Gradients that the forward formed, or from the start."""
    if residual is not None:
        return scaled(residual, args.needs, upstream)
    (loss,) = upstream.rows
    gradients = _Divergence(args).run(loss)[1]
    assert gradients is not None
    return gradients


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Logits of a chunk of tokens, [V, n], and their logsumexp, for student (q) and teacher (p)."""

    tokens: slice
    student: Tensor
    teacher: Tensor
    student_lse: Tensor
    teacher_lse: Tensor


class _Divergence:
    def __init__(self, args: JSDArgs) -> None:
        self.args = args
        self.valid = None if args.target is None else args.target != args.ignore_index
        self.student = Head(
            counted(args.student_input, self.valid), args.student_weight, args.student_bias, args.compute_dtype,
            args.student_logit_scale, args.student_softcap, args.temperature,
        )
        self.teacher = Head(
            counted(args.teacher_input, self.valid), args.teacher_weight, args.teacher_bias, args.teacher_compute_dtype,
            args.teacher_logit_scale, args.teacher_softcap, args.temperature,
        )
        self.wide = torch.promote_types(self.student.wide, self.teacher.wide)
        self.tokens, hidden = self.student.input.shape
        self.vocabulary = self.student.weight.shape[0]
        self.plan: Plan = plan(
            self.tokens,
            self.vocabulary,
            max(hidden, self.teacher.input.shape[1]),
            wide_bytes=self.wide.itemsize,
            held_bytes=2 * self.wide.itemsize,
            device_type=self.student.weight.device.type,
            widened=self.student.widened or self.teacher.widened,
            copies=5,
        )

    def run(self, upstream: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
        """Losses per token and, for an upstream gradient per token, the gradients."""
        args = self.args
        gradients = None
        if upstream is not None:
            weight = args.student_weight
            total = None
            if args.needs[1]:
                one_chunk = self.plan.chunk >= self.tokens
                dtype = weight.dtype if args.accum_dtype is None or one_chunk else self.student.wide
                total = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            bias = weight if args.student_bias is None else args.student_bias
            dtypes = (args.student_input.dtype, weight.dtype, bias.dtype)
            gradients = Gradients(self.student, args.needs, dtypes, total, self.plan)
        losses = []
        for chunk in self._chunks():
            g = None if upstream is None else upstream[chunk.tokens]
            loss = self._loss(chunk, g)
            losses.append(loss if self.valid is None else torch.where(self.valid[chunk.tokens], loss, 0.0))
            if gradients is not None:
                gradients.add(chunk.student, chunk.tokens)
        found = torch.cat(losses).to(self.student.wide)
        return found, None if gradients is None else gradients.result()

    def _chunks(self) -> Iterator[_Chunk]:
        size = self.vocabulary * padded(self.plan.chunk)
        student = self.student.input.new_empty(size, dtype=self.student.wide)
        teacher = self.student.input.new_empty(size, dtype=self.teacher.wide)
        for tokens in pieces(self.tokens, self.plan.chunk):
            q, student_lse = self._logits(self.student, student, tokens)
            p, teacher_lse = self._logits(self.teacher, teacher, tokens)
            yield _Chunk(tokens, q, p, student_lse, teacher_lse)

    def _logits(self, head: Head, flat: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        right = head.right(tokens)
        count = right.shape[1]
        z = rows_of(flat, self.vocabulary, count)
        parts = []
        for rows in self.plan.blocks(count):
            head.logits(head.weight[rows], rows, tokens, right, flat[rows.start * padded(count) :])
            parts.append(torch.logsumexp(z[rows], dim=0))
        return z, torch.logsumexp(torch.stack(parts), dim=0)

    def _loss(self, chunk: _Chunk, upstream: Tensor | None) -> Tensor:
        """Losses of a chunk; with an upstream, its logits' gradient is left in ``chunk.student``."""
        beta = self.args.beta
        loss = torch.zeros_like(chunk.student_lse, dtype=self.wide)
        student_kl = torch.zeros_like(loss)  # KL(Q || M)
        for rows in self.plan.blocks(chunk.student.shape[1]):
            q, p = self._log_probabilities(chunk, rows)
            if beta == 0.0:
                loss += p.exp().mul_(p.sub_(q)).sum(0)
                continue
            m = self._mixture(q, p)
            if beta != 1.0:
                loss += p.exp().mul_(p - m).sum(0).mul_(beta)
            student_kl += q.exp().mul_(q.sub_(m)).sum(0)
        loss += (1.0 if beta == 1.0 else 1.0 - beta) * student_kl
        if upstream is not None:
            head, tokens = self.student, chunk.tokens
            for rows in self.plan.blocks(chunk.student.shape[1]):
                q, p = self._log_probabilities(chunk, rows)
                if beta == 0.0:
                    g = q.exp() - p.exp()
                else:
                    m = self._mixture(q, p)
                    g = q.exp().mul_(q.sub_(m).sub_(student_kl)).mul_(1.0 if beta == 1.0 else 1.0 - beta)
                g.mul_(upstream * head.chain(tokens))
                if head.softcap is not None:
                    g.mul_(head.softcap_factor(chunk.student[rows], tokens))
                chunk.student[rows].copy_(g)
        return loss

    def _log_probabilities(self, chunk: _Chunk, rows: slice) -> tuple[Tensor, Tensor]:
        q = chunk.student[rows].to(self.wide) - chunk.student_lse
        return q, chunk.teacher[rows].to(self.wide) - chunk.teacher_lse

    def _mixture(self, q: Tensor, p: Tensor) -> Tensor:
        """log M."""
        beta = self.args.beta
        if beta == 1.0:
            return p
        return torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))


kernel = Kernel(forward, backward)
