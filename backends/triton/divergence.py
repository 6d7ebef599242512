"""The divergence of two softmaxes with Triton between cuBLAS's products.

Both models' fp32 logits are read for their logsumexp, for the loss, and for the gradient, which is written in the
operands' dtype. Where beta is 0 the gradient needs nothing of the loss, and one read gives both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmux.backends.common.budget import MIB
from headmux.backends.common.head import Head
from headmux.backends.common.jsd import Divergence
from headmux.backends.common.softmax import Wanted
from headmux.backends.common.storage import rows_of
from headmux.backends.triton import kernels
from headmux.backends.triton.launch import Transform, on_device, raw_logits, scale_rows, statistics
from headmux.backends.triton.tuning import MOST_REGISTERS, tuning

if TYPE_CHECKING:
    from headmux.ops.jsd import JSDArgs


class TritonDivergence(Divergence):
    """Three reads of the pair of logits, two where beta is 0."""

    scale_rows = staticmethod(scale_rows)
    copies = 1
    # 2048 rows of 4096 tokens, as wide_bytes counts them
    block_bytes = 32 * MIB

    def __init__(self, args: JSDArgs) -> None:
        super().__init__(args)
        if self.valid is not None:
            self.student = replace(self.student, counts=self.valid.to(self.student.wide))

    def admit(self, states: Tensor) -> Tensor:
        """The states as they are: kernels pass over what is not valid."""
        return states

    def compare(
        self, tokens: slice, student: Tensor, teacher: Tensor, upstream: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Losses, and the gradient in ``out``."""
        beta = self.args.beta
        q, q_transform, q_lse = self._logits(self.student, student, tokens)
        p, p_transform, p_lse = self._logits(self.teacher, teacher, tokens)
        valid = None if self.valid is None else self.valid[tokens]
        vocabulary, count = q.shape

        def diverge(*, loss: bool, kl: Tensor | None = None, into: Tensor | None = None) -> Tensor:
            tiles = tuning(q.device)
            cut = (tiles.compare if into is None else tiles.diverge).cut(q)
            of_teacher, of_student = loss and beta != 1.0, loss and beta != 0.0
            partials = torch.empty((of_teacher + of_student, cut.parts, count), dtype=torch.float32, device=q.device)
            with on_device(q.device):
                kernels.diverge[(cut.programs,)](
                    q, p, q.stride(0), count, vocabulary, valid,
                    q_transform.bias, q_transform.scale, q_transform.softcap,
                    p_transform.bias, p_transform.scale, p_transform.softcap, q_transform.inverse,
                    q_lse, p_lse, beta if 0.0 < beta < 1.0 else None,
                    None if into is None else upstream, kl, into, 0 if into is None else into.stride(0),
                    partials, cut.rows, cut.parts,
                    TEACHER=of_teacher, STUDENT=of_student, EVEN=cut.even, R=cut.height, BN=cut.width,
                    num_warps=cut.warps, maxnreg=MOST_REGISTERS,
                )  # fmt: skip
            return partials.sum(1)

        if beta == 0.0:
            return diverge(loss=True, into=out)[0]
        found = diverge(loss=True)
        kl = found[-1]
        if out is not None:
            diverge(loss=False, kl=kl, into=out)
        return kl if beta == 1.0 else torch.lerp(kl, found[0], beta)

    def _logits(self, head: Head, flat: Tensor, tokens: slice) -> tuple[Tensor, Transform, Tensor]:
        raw = rows_of(flat, self.vocabulary, tokens.stop - tokens.start)
        raw_logits(head, tokens, raw, self.plan)
        transform = Transform(head, tokens)
        return raw, transform, statistics(raw, transform, Wanted())[0].lse
