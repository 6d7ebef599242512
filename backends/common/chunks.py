"""Where the logits' gradient of each token is held until it enters the gradients, and in which order.

As many tokens as fit are held inside the storage of grad_weight (headmux.backends.common.storage), the others in one
buffer, a chunk after another. Each chunk in the buffer reads and writes all of grad_weight in one large product. Only
where the sum is to be rounded once does the first of them enter together with what lies inside, block by block: such
small products cost more than the pass that they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from headmux.backends.common.budget import current
from headmux.backends.common.head import Chunk, Gradients, Head, Steps
from headmux.backends.common.plan import Plan, even, pieces
from headmux.backends.common.storage import capacity, padded, rows_of, workspace

Fill = Callable[[slice, Tensor], "Tensor | None"]
"""``fill(tokens, held)`` leaves the logits' gradient of these tokens in ``held`` [V, n], but for a factor [n] that it
returns, if not None."""

Place = tuple[slice, Tensor]
"""Tokens, and room for their logits or the gradient of those, [V, n]."""


class Chunks:
    """Places for the tokens of one call.

    Attributes:
        plan: Its ``room`` is how many tokens the buffer holds at most.
        inside: How many tokens, from the first on, are held inside grad_weight.
    """

    def __init__(
        self,
        head: Head,
        needs: tuple[bool, ...],
        dtypes: tuple[torch.dtype, ...],
        accum_dtype: torch.dtype | None,
        held_dtype: torch.dtype,
        plan: Plan,
        steps: Steps,
    ) -> None:
        self._head, self._dtypes, self._held_dtype = head, dtypes, held_dtype
        self._tokens, self._hidden = head.input.shape
        self._once = accum_dtype is not None
        self.plan, self._steps = plan, steps
        self._total_dtype = dtypes[1]
        self.inside = self._room() if needs[1] else 0
        rest = self._tokens - self.inside
        if needs[1] and self._once and rest and self._total_dtype != head.wide:
            # An fp32 sum takes V * H * 4 bytes. Where the logits beyond the first H tokens are no more than that, they
            # are held instead, and everything is added up at once; else the sum's storage holds 2 H tokens.
            if current() is None and rest * held_dtype.itemsize <= self._hidden * head.wide.itemsize:
                self.plan = plan.holding(rest)
            elif rest > plan.chunk:
                self._total_dtype = head.wide
                self.inside = self._room()

    def workspace(self) -> tuple[Tensor, Tensor]:
        """An uninitialised grad_weight, and a place inside for the first ``inside`` tokens."""
        shape, rows = (self.plan.vocabulary, self._hidden), self.plan.rows(self.inside)
        return workspace(self._head.weight, shape, self._total_dtype, self.inside, self._held_dtype, rows)

    def outside(self, first: int = 0, prefer: int | None = None) -> Iterator[Place]:
        """Chunks of the tokens from ``first`` on, each with its place in one buffer, which is made when asked for.

        They are as few and as even as can be, or of ``prefer`` tokens where the buffer has room for one of those, but
        neither for two nor for all, and the last is no small rest.
        """
        count, room = self._tokens - first, self.plan.room
        if not count:
            return
        chunk = even(count, self.plan.chunk)
        if prefer and prefer <= room < min(2 * prefer, count) and not 0 < count % prefer < prefer // 3:
            chunk = prefer
        buffer = self._head.input.new_empty(self.plan.vocabulary * padded(chunk), dtype=self._held_dtype)
        for piece in pieces(count, chunk):
            size = piece.stop - piece.start
            yield slice(first + piece.start, first + piece.stop), rows_of(buffer, self.plan.vocabulary, size)

    def gradients(
        self,
        fill: Fill,
        needs: tuple[bool, ...],
        inside: tuple[Tensor, Tensor] | None = None,
        outside: Iterable[Place] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, chunk by chunk.

        Args:
            fill: Leaves a chunk's logit gradient in its place.
            needs: Which of them are needed.
            inside: A ``workspace`` that a forward made, or None.
            outside: The places of the other tokens, in any order, that a forward made, or None.
        """
        total, held = inside or (self.workspace() if self.inside else (None, None))
        if total is None and needs[1]:
            shape = (self.plan.vocabulary, self._hidden)
            total = self._head.weight.new_empty(shape, dtype=self._total_dtype)
        sums = Gradients(self._head, needs, self._dtypes, total, self.plan, self._steps)
        places = [] if held is None else [(slice(0, self.inside), held)]
        ready = []
        for tokens, place in chain(places, self.outside(self.inside) if outside is None else outside):
            ready.append(Chunk(tokens, place, fill(tokens, place)))
            if self._once and place is held and tokens.stop < self._tokens:
                continue
            sums.add(ready, inside=ready[0].gradient is held, once=self._once)
            ready = []
        return sums.result()

    def _room(self) -> int:
        return min(self._tokens, capacity(self._total_dtype, self._hidden, self._held_dtype))
