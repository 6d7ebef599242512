"""Softmax over the vocabulary in PyTorch.

Blocks of wide logits are made, looked at, and either dropped or kept: under a softcap as they are, else as exponentials
e = exp(z - m), m being the token's largest logit of that block, in the operands' dtype: p = e * exp(m - lse) then needs
no second look at the logits and no second exponential, and a rounded e holds z to 0.004 in bf16 whatever the size of z,
where a rounded z of 30 is off by 0.06.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headmux.backends.common.chunks import Place
from headmux.backends.common.labels import Labels
from headmux.backends.common.plan import pieces
from headmux.backends.common.softmax import Coefficients, Softmax, Statistics, shifted
from headmux.backends.common.storage import padded

# fp16 exponentials are scaled into the upper end of their range: the smallest kept is e^-26 instead of e^-16
_FP16_GAIN = 2.0**14


class TorchSoftmax(Softmax):
    """Blocks of logits through PyTorch's own operations."""

    def prepare(self) -> None:
        """Keep exponentials, but where logits are still needed after an exponential has underflowed."""
        head, wanted = self.head, self.wanted
        self.block_dtype = head.wide
        # a softcap's derivative at its bound needs the logit more exactly than a rounded exponential gives it
        self._as_logits = head.softcap is not None
        self._plain = head.softcap is None and wanted.smoothed is None
        self.held_dtype = head.wide if self._as_logits else head.dtype
        self._gain = _FP16_GAIN if self.held_dtype == torch.float16 else 1.0
        # on a GPU a sum over the block's rows takes two more of it
        self.copies = 3 if self._plain and not wanted.entropy else 5

    def survey(self, tokens: slice, places: Iterator[Place]) -> Statistics:
        """Blocks are dropped once looked at, so the logits are never held."""
        return self.look(tokens, None)[0]

    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Tensor]:
        """Statistics of these tokens and the largest logit of each block, [blocks, n]."""
        rows = self.plan.rows(tokens.stop - tokens.start)
        parts = [
            self._look_at(shifted(c, tokens.start), rows, None if held is None else held[:, c])
            for c in pieces(tokens.stop - tokens.start, self.plan.tokens)
        ]
        return Statistics.joined([s for s, _ in parts]), torch.cat([o for _, o in parts], dim=1)

    def _look_at(self, tokens: slice, rows_per_block: int, held: Tensor | None) -> tuple[Statistics, Tensor]:
        head, wanted = self.head, self.wanted
        labels = self.labels[tokens]
        right, count = head.right(tokens), tokens.stop - tokens.start
        blocks = list(pieces(self.vocabulary, rows_per_block))

        def per_block() -> Tensor:
            return right.new_empty((len(blocks), count), dtype=head.wide)

        buffer = right.new_empty(rows_per_block * padded(count), dtype=head.wide)
        offsets, sums, at_label = per_block(), per_block(), per_block()
        moments = per_block() if wanted.entropy else None
        smoothed = per_block() if wanted.smoothed is not None else None
        best = at_label.new_empty(at_label.shape, dtype=torch.int64) if wanted.best else None
        places = (labels.index - torch.arange(0, self.vocabulary, rows_per_block, device=right.device)[:, None])
        places.clamp_(0, rows_per_block - 1)
        if len(blocks) > 1:
            places[-1].clamp_(max=blocks[-1].stop - blocks[-1].start - 1)
        # views made once: on a GPU this loop is bound by the host
        offset, total, place, label = (t.unbind(0) for t in (offsets, sums, places[:, None], at_label[:, None]))
        weights = head.weight.split(rows_per_block)
        kept = None if held is None else held.split(rows_per_block)

        for i, rows in enumerate(blocks):
            z = head.logits(weights[i], rows, tokens, right, buffer)
            torch.gather(z, 0, place[i], out=label[i])
            if best is not None:
                torch.max(z, 0, out=(offset[i], best[i]))
                best[i] += rows.start
            else:
                torch.amax(z, 0, out=offset[i])
            if smoothed is not None:
                self._smooth(z, rows, smoothed[i])
            if kept is not None and self._as_logits:
                kept[i].copy_(z)
            z.sub_(offset[i])
            if moments is not None:
                e = torch.exp(z)
                torch.sum(e, 0, out=total[i])
                torch.sum(z.clamp_(min=-1e4).mul_(e), 0, out=moments[i])
            else:
                e = z.exp_()
                torch.sum(e, 0, out=total[i])
            if kept is not None and not self._as_logits:
                if self._gain == 1.0:
                    kept[i].copy_(e)
                else:
                    torch.mul(e, self._gain, out=kept[i])

        top = offsets.amax(0)
        lse = top + (sums * torch.exp(offsets - top)).sum(0).log_()
        entropy = None
        if moments is not None:
            entropy = (torch.exp(offsets - lse) * (sums * (lse - offsets) - moments)).sum(0)
        if best is not None:
            best = best.gather(0, offsets.max(0, keepdim=True).indices)[0] if len(blocks) > 1 else best[0]
        label_block = torch.div(labels.index, rows_per_block, rounding_mode="floor")
        return Statistics(
            lse=lse,
            target_logit=at_label.gather(0, label_block[None])[0],
            entropy=entropy,
            best=best,
            smoothed=None if smoothed is None else smoothed.sum(0),
        ), offsets

    def _smooth(self, z: Tensor, rows: slice, out: Tensor) -> None:
        weights = self.wanted.smoothed
        if isinstance(weights, Tensor):
            torch.mv(z.t(), weights[rows], out=out)
        else:
            torch.sum(z, 0, out=out)

    def to_gradient(self, held: Tensor, state: Tensor, statistics: Statistics, tokens: slice, by: Coefficients) -> None:
        """A factor per token and block, and what the options add."""
        offsets = state
        head = self.head
        lse, chain = statistics.lse, head.chain(tokens)
        factors = torch.exp(offsets - lse).div_(self._gain)
        softmax = by.softmax * chain
        plain = by.entropy is None and self._plain
        if plain:
            factors *= softmax
        parts, factor = held.split(self.plan.rows(held.shape[1])), factors.unbind(0)
        for i, rows in enumerate(self.plan.blocks(held.shape[1])):
            part = parts[i]
            if plain:
                part.mul_(factor[i])
            else:
                part.copy_(self._general(part, rows, factor[i], lse, tokens, by, chain))
        labels = self.labels[tokens]
        at_label = self._at_label(statistics, labels, tokens, by, chain)[None].to(held.dtype)
        if held.itemsize == 2:  # as bits: of 16-bit numbers on a CPU, PyTorch makes an fp32 copy of all
            held, at_label = held.view(torch.int16), at_label.view(torch.int16)
        held.scatter_(0, labels.index[None], at_label)

    def _general(
        self, part: Tensor, rows: slice, factor: Tensor, lse: Tensor, tokens: slice, by: Coefficients,
        chain: float | Tensor,
    ) -> Tensor:
        head = self.head
        wide = part.to(head.wide)
        p = torch.exp(wide - lse) if self._as_logits else wide * factor
        g = p * by.softmax
        if by.entropy is not None:
            g.add_(torch.xlogy(p, p).mul_(by.entropy))
        if by.smoothing is not None:
            weights = self.wanted.smoothed
            g.sub_(by.smoothing * weights[rows, None] if isinstance(weights, Tensor) else by.smoothing)
        if self._as_logits:
            g.mul_(head.softcap_factor(wide, tokens))
        return g.mul_(chain)

    def _at_label(
        self, statistics: Statistics, labels: Labels, tokens: slice, by: Coefficients, chain: float | Tensor
    ) -> Tensor:
        """The gradient at each token's label, formed in the wide dtype before it is rounded."""
        z = statistics.target_logit
        logp = z - statistics.lse
        p = logp.exp()
        g = p * by.softmax - by.label
        if by.entropy is not None:
            g += torch.xlogy(p, p) * by.entropy
        if by.smoothing is not None:
            weights = self.wanted.smoothed
            g -= by.smoothing * weights[labels.index] if isinstance(weights, Tensor) else by.smoothing
        if self.head.softcap is not None:
            g *= self.head.softcap_factor(z, tokens)
        return g * chain
