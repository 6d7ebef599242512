"""The divergence of two softmaxes, from products that leave logits and the two parts of their log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headmux.backends.common.budget import MIB
from headmux.backends.common.head import Head, Steps
from headmux.backends.common.jsd import Divergence
from headmux.backends.common.storage import padded, rows_of
from headmux.backends.cutedsl.build import Comparison, kernel
from headmux.backends.cutedsl.launch import accumulate, scale_rows
from headmux.backends.cutedsl.statistics import aligned, logits
from headmux.devices import multiprocessors

if TYPE_CHECKING:
    from headmux.ops.jsd import JSDArgs

BLOCKS = {(True, False): 2, (True, True): 2, (False, True): 16}
"""Thread blocks of a multiprocessor, for sums, for both, for the gradient. Sums of few, long walks merge faster."""

_THREADS, _TOKENS = 256, 4  # as headmux.backends.cutedsl.diverge has them
_WIDEST = 128  # threads side by side: 2 KiB of a row


class CuteDivergence(Divergence):
    """Two reads of the pair of logits, one where beta is 0."""

    steps = Steps(scale_rows=scale_rows, accumulate=accumulate)
    passes_over = True
    copies = 1
    # 2048 rows of 4096 tokens, as wide_bytes counts them
    block_bytes = 32 * MIB

    def __init__(self, args: JSDArgs) -> None:
        super().__init__(args)
        self.student, self.teacher = (
            replace(head, input=aligned(head.input.to(head.dtype)), weight=aligned(head.weight))
            for head in (self.student, self.teacher)
        )

    def compare(
        self, tokens: slice, student: Tensor, teacher: Tensor, upstream: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Losses, and the gradient in ``out``."""
        beta, chain = self.args.beta, self.student.scale / self.args.temperature
        q, p = self._logits(self.student, student, tokens), self._logits(self.teacher, teacher, tokens)
        place = out if out is None or _fits(out) else _beside(out)
        into = place if beta == 0.0 else None
        found = diverge(q, p, beta, chain=chain, loss=True, upstream=upstream, into=into)
        assert found is not None
        kl = found[-1]
        if place is not None and beta != 0.0:
            diverge(q, p, beta, chain=chain, loss=False, upstream=upstream, kl=kl, into=place)
        if place is not None and place is not out:
            assert out is not None
            out.copy_(place)
        return torch.lerp(kl, found[0], beta) if len(found) == 2 else kl

    def _logits(self, head: Head, flat: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        held = rows_of(flat, self.vocabulary, tokens.stop - tokens.start)
        lse = logits(
            head.input[tokens], head.weight, head.bias, held, scale=head.scale, softcap=head.softcap,
            temperature=self.args.temperature,
        )  # fmt: skip
        return held, lse


def diverge(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], beta: float, *, chain: float, loss: bool,
    upstream: Tensor | None = None, kl: Tensor | None = None, into: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """One read of a pair of logits: for ``loss`` their sums, and with ``into`` [V, n] the student's gradient there.

    Logits [V, n] come with their log-sum-exp [2, n], as ``headmux.backends.cutedsl.statistics.logits`` leaves both. The
    gradient is for ``upstream`` [n], and needs ``kl`` [n], the student's sum, where beta is not 0; rows of ``into``
    start at multiples of 4 elements.

    Returns:
        [k, n], the teacher's sum unless beta is 1, and the student's unless it is 0; None without ``loss``.
    """
    (q, q_lse), (p, p_lse) = student, teacher
    between = 0.0 < beta < 1.0
    blocks = BLOCKS[loss, into is not None] * multiprocessors(q.device)
    width, columns, parts = cut(*q.shape, blocks)
    sums = None
    if loss:
        sums = torch.empty((1 + between, parts, q.shape[1]), dtype=torch.float32, device=q.device)
    config = Comparison(None if between else beta, loss, None if into is None else into.dtype)
    with torch.cuda.device(q.device):
        kernel(config)(
            q, p, q_lse, p_lse, sums, None if into is None else upstream, kl, into, beta, 1.0 - beta, chain,
            width, columns, parts,
        )  # fmt: skip
    return None if sums is None else sums.sum(1)


def cut(vocabulary: int, tokens: int, blocks: int) -> tuple[int, int, int]:
    """For so many classes, tokens and thread blocks: how many threads stand side by side, in how many columns the
    thread blocks do, and how many of a column share the classes.
    """
    fours = -(-tokens // _TOKENS)
    width = min(_WIDEST, 1 << (fours - 1).bit_length())
    columns = -(-fours // width)
    return width, columns, max(1, min(blocks // columns, -(-vocabulary // (_THREADS // width))))


def _fits(rows: Tensor) -> bool:
    """Whether rows start at multiples of 4 elements, as many as are stored at once."""
    return rows.stride(0) % _TOKENS == 0 and rows.data_ptr() % (_TOKENS * rows.itemsize) == 0


def _beside(rows: Tensor) -> Tensor:
    """A tensor of the same shape whose rows do: chunks of fewer tokens than that begin anywhere."""
    count, columns = rows.shape
    return rows_of(rows.new_empty(count * padded(columns)), count, columns)

