"""The softmax over the vocabulary of a linear head, as flce and linear_logp need it: what is asked of it, and the order
of work that every backend shares. A backend supplies two steps, ``look`` and ``to_gradient``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headmux.backends.common.chunks import Chunks
from headmux.backends.common.head import Gradients, Head
from headmux.backends.common.labels import Labels
from headmux.backends.common.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which statistics beside the logsumexp and the target's logit are needed.

    Attributes:
        entropy: The entropy.
        best: The index of the largest logit.
        smoothed: Sum over the vocabulary of the logits times these [V] weights; a float stands for equal ones.
    """

    entropy: bool = False
    best: bool = False
    smoothed: Tensor | float | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Per token, in the wide dtype; None if not wanted. Finite for tokens with a label out of range."""

    lse: Tensor
    target_logit: Tensor
    entropy: Tensor | None
    best: Tensor | None
    smoothed: Tensor | None

    @classmethod
    def joined(cls, parts: list[Statistics]) -> Statistics:
        """The statistics of consecutive tokens."""
        if len(parts) == 1:
            return parts[0]
        columns = [[getattr(p, f) for p in parts] for f in ("lse", "target_logit", "entropy", "best", "smoothed")]
        return cls(*(None if c[0] is None else torch.cat(c) for c in columns))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The gradient of a token's loss with respect to its logit z_j, per token:

    ``p_j * (softmax + entropy * log p_j) - smoothing * u_j - label * [j = y]``, u being ``Wanted.smoothed``.
    """

    softmax: Tensor
    label: Tensor
    entropy: Tensor | None = None
    smoothing: Tensor | None = None


CoefficientsOf = Callable[[Statistics, slice], Coefficients]


@dataclass(frozen=True, slots=True)
class Kept:
    """Logits that a forward keeps for its backward in the storage of the future grad_weight."""

    places: Chunks
    total: Tensor
    held: Tensor
    state: Any
    statistics: Statistics


class Softmax(ABC):
    """The softmax of a head's logits, for one call.

    A backend's subclass holds the logits of a chunk of tokens in a form of its own, [V, n], of dtype ``held_dtype``.
    """

    held_dtype: torch.dtype
    copies: int
    block_bytes: int | None = None

    def __init__(
        self,
        head: Head,
        labels: Labels,
        wanted: Wanted,
        needs: tuple[bool, ...],
        dtypes: tuple[torch.dtype, ...],
        accum_dtype: torch.dtype | None,
    ) -> None:
        self.head, self.labels, self.wanted, self.needs, self.dtypes = head, labels, wanted, needs, dtypes
        self.tokens, self.hidden = head.input.shape
        self.vocabulary = head.weight.shape[0]
        self.prepare()
        cut = plan(
            self.tokens,
            self.vocabulary,
            self.hidden,
            wide_bytes=head.wide.itemsize,
            held_bytes=self.held_dtype.itemsize,
            device_type=head.weight.device.type,
            widened=head.widened,
            copies=self.copies,
            block_bytes=self.block_bytes,
        )
        self.places = Chunks(head, needs, dtypes, accum_dtype, self.held_dtype, cut)

    @property
    def plan(self) -> Plan:
        """How the call is cut."""
        return self.places.plan

    @abstractmethod
    def prepare(self) -> None:
        """Set ``held_dtype``, and ``copies``: how many blocks of wide logits are held at once."""

    @abstractmethod
    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Any]:
        """Statistics of these tokens, and what ``to_gradient`` needs; with ``held`` [V, n], keep their logits there."""

    @abstractmethod
    def to_gradient(self, held: Tensor, state: Any, statistics: Statistics, tokens: slice, by: Coefficients) -> None:
        """Turn kept logits [V, n] into the gradient with respect to ``input @ weight.T``, in place."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Statistics of every token, nothing kept."""

    def can_keep(self) -> bool:
        """Whether the forward can keep every token's logits for the backward without memory of its own."""
        return self.places.inside == self.tokens

    def keep(self) -> Kept:
        """Statistics of every token, and their logits inside the future grad_weight."""
        total, held = self.places.workspace()
        statistics, state = self.look(slice(0, self.tokens), held)
        return Kept(self.places, total, held, state, statistics)

    def finish(self, kept: Kept, coefficients: CoefficientsOf) -> tuple[Tensor | None, ...]:
        """Gradients from what a forward kept, which is consumed."""
        every = slice(0, self.tokens)
        self.places = kept.places  # the blocks in which the logits were kept
        sums = Gradients(self.head, self.needs, self.dtypes, kept.total, self.plan)
        self.to_gradient(kept.held, kept.state, kept.statistics, every, coefficients(kept.statistics, every))
        sums.add([(every, kept.held)], inside=True)
        return sums.result()

    def gradients(self, coefficients: CoefficientsOf) -> tuple[Statistics, tuple[Tensor | None, ...]]:
        """Statistics and gradients of every token in one pass over chunks of tokens."""
        found = []

        def fill(tokens: slice, held: Tensor) -> None:
            statistics, state = self.look(tokens, held)
            self.to_gradient(held, state, statistics, tokens, coefficients(statistics, tokens))
            found.append(statistics)

        gradients = self.places.gradients(fill)
        return Statistics.joined(found), gradients


MakeSoftmax = Callable[..., Softmax]
"""Makes a softmax from what ``Softmax.__init__`` takes: a subclass, or a function that imports it first."""


def shifted(piece: slice, by: int) -> slice:
    """The slice ``by`` further on."""
    return slice(piece.start + by, piece.stop + by)
