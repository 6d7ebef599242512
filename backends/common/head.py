"""A linear head: blocks of its transformed logits, and its gradients from the logits' gradient.

Logits are kept token index last, [V, n], so that a block of vocabulary rows of them fits inside the same rows of
grad_weight (headmux.backends.common.storage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headmux.backends.common.gemm import accumulate, is_native, operand, product, wide_dtype
from headmux.backends.common.plan import Plan
from headmux.backends.common.storage import alone, rows_of, spread, vectors

MASKED = -1e30
"""Stands for a bias of -inf, which masks a class, so that differences of masked logits are 0 and not NaN."""


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states, weight and bias, and how the logits are transformed.

    Attributes:
        input: [N, H], 0 in rows of tokens that do not count, but where ``counts`` tells which those are.
        weight: [V, H].
        bias: [V] or None.
        dtype: dtype of the GEMMs' operands.
        scale: Factor of the logits.
        softcap: Bound of the scaled logits, or None.
        temperature: Divisor of what comes out, a number or [N].
        counts: [N], 0 for tokens that do not count and 1 for the others, or None.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    scale: float
    softcap: float | None
    temperature: float | Tensor
    counts: Tensor | None = None

    @property
    def wide(self) -> torch.dtype:
        """dtype of logits and statistics."""
        return wide_dtype(self.dtype)

    @property
    def widened(self) -> bool:
        """Whether GEMM operands are copied to a wider dtype first."""
        return not is_native(self.dtype, self.weight.device) or self.weight.dtype != self.dtype

    def right(self, tokens: slice) -> Tensor:
        """The operand of these tokens, [H, vectors(n)], whose other columns are zeros."""
        states = operand(self.input[tokens], self.dtype)
        return _zeros_after(states, vectors(states.shape[0], states.device)).t()

    def divisor(self, tokens: slice) -> float | Tensor:
        """The temperature of these tokens."""
        return self.temperature[tokens] if isinstance(self.temperature, Tensor) else self.temperature

    def logits(self, weight: Tensor, rows: slice, tokens: slice, right: Tensor, out: Tensor) -> Tensor:
        """Transformed wide logits of a block, [rows, tokens], in the flat ``out``, with padded rows.

        ``weight`` is the block of the weight at ``rows``, ``right`` what the method of that name returns.
        """
        z = rows_of(out, weight.shape[0], tokens.stop - tokens.start)
        product(operand(weight, self.dtype), right, out=spread(z))
        if self.bias is not None:
            z += self.bias[rows, None].to(self.wide).clamp(min=MASKED)
        if self.softcap is not None:
            z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            z.mul_(self.scale)
        divisor = self.divisor(tokens)
        if isinstance(divisor, Tensor) or divisor != 1.0:
            z.div_(divisor)
        return z

    def chain(self, tokens: slice) -> float | Tensor:
        """d logit / d product, but for the softcap's factor."""
        return self.scale / self.divisor(tokens)

    def chained(self, factors: Tensor, tokens: slice) -> Tensor:
        """[n] factors times ``chain``, without a launch where that is 1."""
        chain = self.chain(tokens)
        return factors * chain if isinstance(chain, Tensor) or chain != 1.0 else factors

    def softcap_factor(self, z: Tensor, tokens: slice) -> Tensor:
        """The softcap's part of d logit / d product, from transformed logits."""
        assert self.softcap is not None
        t = (z * (self.divisor(tokens) / self.softcap)).clamp_(-1.0, 1.0)
        return t.square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The logits' gradient of some tokens.

    Attributes:
        tokens: Which.
        gradient: [V, n], with respect to ``input @ weight.T``, but for ``factor``.
        factor: [n], what each token's column is still to be multiplied with, or None. Such a factor never meets the
            [V, n] elements: it scales the token's hidden state, and the row of its grad_input.
    """

    tokens: slice
    gradient: Tensor
    factor: Tensor | None = None


def _zeros_after(rows: Tensor, count: int) -> Tensor:
    """The rows and, if they are fewer than ``count``, rows of zeros."""
    more = count - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, more)) if more > 0 else rows


def _with_zeros(gradient: Tensor) -> Tensor:
    """[V, n] logits' gradient with its rows' other places, where there are now zeros."""
    found = spread(gradient)
    if found.shape != gradient.shape:
        found[:, gradient.shape[1] :].zero_()
    return found


def scale_rows(states: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, H] states times [n] factors, rounded once, in ``out`` or a new tensor."""
    return torch.mul(states, factors[:, None], out=torch.empty_like(states) if out is None else out)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of the gradients of which a backend may have better ones.

    Attributes:
        scale_rows: As ``scale_rows`` does.
        accumulate: As ``headmux.backends.common.gemm.accumulate`` does.
    """

    scale_rows: Callable[..., Tensor] = scale_rows
    accumulate: Callable[..., None] = accumulate


class Gradients:
    """Gradients of a head, summed over chunks of tokens.

    Attributes:
        total: [V, H], the running sum of grad_weight, in whose storage a first chunk's logits may lie; None if the
            weight needs no gradient.
    """

    def __init__(
        self,
        head: Head,
        needs: tuple[bool, ...],
        dtypes: tuple[torch.dtype, ...],
        total: Tensor | None,
        plan: Plan,
        steps: Steps,
    ) -> None:
        self._head, self._needs, self._dtypes, self._plan, self._steps = head, needs, dtypes, plan, steps
        self.total = total
        tokens, hidden = head.input.shape
        self._room: Tensor | None = None
        if needs[0]:
            self._room = head.input.new_empty((vectors(tokens, head.input.device), hidden), dtype=dtypes[0])
        self._bias: Tensor | None = None
        self._first = True

    def add(self, chunks: Sequence[Chunk], *, inside: bool = False, once: bool = False) -> None:
        """Add chunks of tokens, whose logits' gradient is lost.

        With ``inside``, that of the first chunk lies in the storage of ``total``; with ``once``, the sum over these
        chunks is rounded once.
        """
        head = self._head
        pairs = []
        for chunk in chunks:
            gradient = _with_zeros(chunk.gradient)
            if self._room is not None:
                self._input_gradient(*self._whole(chunk, gradient))
                if chunk.factor is not None:
                    out = self._room[chunk.tokens]
                    self._steps.scale_rows(out, chunk.factor, out)
            if self._needs[2]:
                assert chunk.factor is None, "a factor never meets the elements that are summed here"
                found = chunk.gradient.sum(1, dtype=head.wide)
                self._bias = found if self._bias is None else self._bias.add_(found)
            if self._needs[1]:
                pairs.append((gradient, self._states(chunk, gradient.shape[1])))
        if self.total is not None and pairs:
            rows = self._plan.rows(chunks[0].gradient.shape[1])
            self._steps.accumulate(
                self.total, pairs, head.dtype, first=self._first, rows=rows, inside=inside, once=once
            )
        self._first = False

    def _whole(self, chunk: Chunk, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The logits' gradient and the room of grad_input: of the last tokens, also that of columns of zeros."""
        assert self._room is not None
        start, stop = chunk.tokens.start, chunk.tokens.stop
        whole = start + gradient.shape[1]
        if stop == self._head.input.shape[0] and whole <= self._room.shape[0]:
            return gradient, self._room[start:whole]
        return chunk.gradient, self._room[start:stop]

    def _states(self, chunk: Chunk, count: int) -> Tensor:
        """[count, H]: the states of these tokens, times their factors; rows of zeros follow."""
        head = self._head
        states, factor = head.input[chunk.tokens].to(head.dtype), chunk.factor
        if factor is None and head.counts is not None:
            factor = head.counts[chunk.tokens]
        if factor is None:
            return _zeros_after(states, count)
        tokens, hidden = states.shape
        found = states.new_empty(count, hidden)
        self._steps.scale_rows(states, factor, found[:tokens])
        if tokens < count:
            found[tokens:].zero_()
        return found

    def _input_gradient(self, logit_gradient: Tensor, out: Tensor) -> None:
        head = self._head
        native = is_native(head.dtype, out.device)
        if native and logit_gradient.dtype == head.dtype:
            weight = head.weight.to(head.dtype)
            if out.dtype == head.dtype:
                torch.mm(logit_gradient.t(), weight, out=out)
            else:
                out.copy_(product(logit_gradient.t(), weight))
            return
        total = out if out.dtype == head.wide else torch.empty_like(out, dtype=head.wide)
        for i, rows in enumerate(self._plan.blocks(logit_gradient.shape[1])):
            left = operand(logit_gradient[rows], head.dtype).t()
            right = operand(head.weight[rows], head.dtype)
            if i == 0:
                product(left, right, out=total)
            elif left.dtype == head.wide:
                total.addmm_(left, right)
            else:
                torch.addmm(total, left, right, out_dtype=head.wide, out=total)
        if total is not out:
            out.copy_(total)

    def result(self) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias in their dtypes, None where not needed."""
        weight = None if self.total is None or not self._needs[1] else self.total.to(self._dtypes[1])
        found, shape = self._room, self._head.input.shape
        if found is not None and found.shape != shape:
            found = alone(found, shape)
        return (found, weight, None if self._bias is None else self._bias.to(self._dtypes[2]))
