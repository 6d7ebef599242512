"""The softmax over the vocabulary of a linear head, as flce and linear_logp need it: what is asked of it, and the order
of work that every backend shares. A backend supplies two steps, ``look`` and ``to_gradient``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headmux.backends.common.budget import MIB
from headmux.backends.common.chunks import Chunks, Place
from headmux.backends.common.head import Head, Steps
from headmux.backends.common.labels import Labels
from headmux.backends.common.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which statistics beside the logsumexp and the target's logit are needed.

    Attributes:
        entropy: The entropy.
        best: The index of the largest logit.
        smoothed: Sum over the vocabulary of the logits times these [V] weights; a float stands for equal ones.
        proportional: The gradient will be a multiple of p - [j = y] for each token: ``Coefficients.softmax`` and
            ``label`` are the same, and there is nothing else.
    """

    entropy: bool = False
    best: bool = False
    smoothed: Tensor | float | None = None
    proportional: bool = False


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


class Softmax(ABC):
    """The softmax of a head's logits, for one call.

    A backend's subclass holds the logits of a chunk of tokens in a form of its own, [V, n], of dtype ``held_dtype``.
    Where they are only looked at, and more than one chunk of them, it may prefer chunks of ``looked_at`` tokens.
    """

    held_dtype: torch.dtype
    block_dtype: torch.dtype
    copies: int
    block_bytes: int | None = None
    looked_at: int | None = None
    steps = Steps()

    def __init__(
        self,
        head: Head,
        labels: Labels,
        wanted: Wanted,
        needs: tuple[bool, ...],
        dtypes: tuple[torch.dtype, ...],
        accum_dtype: torch.dtype | None,
    ) -> None:
        self.head, self.labels, self.wanted, self.needs = head, labels, wanted, needs
        self.tokens, self.hidden = head.input.shape
        self.vocabulary = head.weight.shape[0]
        self.prepare()
        cut = plan(
            self.tokens,
            self.vocabulary,
            self.hidden,
            wide_bytes=self.block_dtype.itemsize,
            held_bytes=self.held_dtype.itemsize,
            device_type=head.weight.device.type,
            widened=head.widened,
            copies=self.copies,
            block_bytes=self.block_bytes,
        )
        self.places = Chunks(self.head, needs, dtypes, accum_dtype, self.held_dtype, cut, self.steps)
        self._kept: tuple[tuple[Tensor, Tensor] | None, list[Place], dict[int, tuple[Statistics, Any]]] | None = None

    @property
    def plan(self) -> Plan:
        """How the call is cut."""
        return self.places.plan

    @abstractmethod
    def prepare(self) -> None:
        """Set ``held_dtype``, and of how many blocks of logits, ``copies``, of which ``block_dtype`` there is room."""

    def hold_as_operands(self) -> None:
        """Hold logits in the operands' dtype, where their product leaves them; nothing of their size is held beside."""
        self.held_dtype = self.block_dtype = self.head.dtype
        self.copies = 1
        # As few blocks as 64 MiB allow, with scaled states and partial statistics beside, but where logits are held in
        # a buffer, as many tokens as that can hold. Blocks of 16 MiB, of 2048 rows at 4096 tokens and H = 4096, are
        # products of two waves of tiles each, smaller ones are slower.
        states = self.head.input.numel() * self.held_dtype.itemsize
        most = 48 * MIB - states if self.needs[1] and self.tokens <= self.hidden else 0
        self.block_bytes = min(32 * MIB, max(16 * MIB, most))

    @abstractmethod
    def look(self, tokens: slice, held: Tensor | None) -> tuple[Statistics, Any]:
        """Statistics of these tokens, and what ``to_gradient`` needs; with ``held`` [V, n], keep their logits there."""

    @abstractmethod
    def to_gradient(
        self, held: Tensor, state: Any, statistics: Statistics, tokens: slice, by: Coefficients
    ) -> Tensor | None:
        """Turn kept logits [V, n] into the gradient with respect to ``input @ weight.T``, in place.

        Where a factor [n] is returned, the gradient is ``held`` times that.
        """

    @abstractmethod
    def survey(self, tokens: slice, places: Iterator[Place]) -> Statistics:
        """Statistics of these tokens, nothing kept; ``places`` cuts them, each with room for its logits."""

    def statistics(self) -> Statistics:
        """Statistics of every token, nothing kept."""
        return self.survey(slice(0, self.tokens), self.places.outside(prefer=self.looked_at))

    def keep(self) -> Statistics:
        """Statistics of every token. Logits stay inside the future grad_weight and, of the last tokens that do not fit
        there, in the buffer.

        ``gradients`` then starts from them, once, and forms the others again.
        """
        first = self.places.inside
        inside = self.places.workspace() if first else None
        places = list(self.places.outside(first))
        kept: dict[int, tuple[Statistics, Any]] = {}
        parts = []

        def look(tokens: slice, held: Tensor) -> None:
            kept[tokens.start] = self.look(tokens, held)
            parts.append(kept[tokens.start][0])

        if inside is not None:
            look(slice(0, first), inside[1])
        if len(places) > 1:
            parts.append(self.survey(slice(first, places[-1][0].start), iter(places[:-1])))
        if places:
            look(*places[-1])
        self._kept = inside, places[::-1], kept
        return Statistics.joined(parts)

    def gradients(
        self, coefficients: CoefficientsOf, needs: tuple[bool, ...]
    ) -> tuple[Statistics, tuple[Tensor | None, ...]]:
        """Statistics and the gradients needed, of every token in one pass over chunks of tokens."""
        inside, places, kept = self._kept or (None, None, {})
        self._kept = None
        found = {}

        def fill(tokens: slice, held: Tensor) -> Tensor | None:
            statistics, state = kept.pop(tokens.start, None) or self.look(tokens, held)
            found[tokens.start] = statistics
            return self.to_gradient(held, state, statistics, tokens, coefficients(statistics, tokens))

        gradients = self.places.gradients(fill, needs, inside, places)
        return Statistics.joined([found[start] for start in sorted(found)]), gradients


MakeSoftmax = Callable[..., Softmax]
"""Makes a softmax from what ``Softmax.__init__`` takes: a subclass, or a function that imports it first."""


def shifted(piece: slice, by: int) -> slice:
    """The slice ``by`` further on."""
    return slice(piece.start + by, piece.stop + by)
