"""jsd from a backend's comparison of two models' logits: chunks of tokens whose logits are both held in fp32.

The gradient is a difference of near-equal numbers, so neither model's logits are ever rounded to 16 bits; only the
gradient itself is, as an operand of its products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headmux.backends.common.chunks import Chunks
from headmux.backends.common.head import Head, Steps
from headmux.backends.common.labels import counted
from headmux.backends.common.plan import Plan, even, pieces, plan
from headmux.backends.common.residual import Scale, scaled
from headmux.backends.common.storage import padded
from headmux.contract import Kernel, Requirement, Upstream

if TYPE_CHECKING:
    from headmux.ops.jsd import JSDArgs


class Divergence(ABC):
    """The divergence between two heads' softmax, for one call.

    Attributes:
        wide: dtype of the logits.
        plan: Its ``chunk`` is how many tokens' pairs of logits are held at once, at most.
        passes_over: Whether ``compare`` passes over tokens that do not count, whatever their states hold.
    """

    copies: int
    block_bytes: int | None = None
    passes_over = False
    steps = Steps()

    def __init__(self, args: JSDArgs) -> None:
        self.args = args
        self.valid = None if args.target is None else args.target != args.ignore_index
        self.student = Head(
            self._admit(args.student_input), args.student_weight, args.student_bias, args.compute_dtype,
            args.student_logit_scale, args.student_softcap, args.temperature,
        )
        self.teacher = Head(
            self._admit(args.teacher_input), args.teacher_weight, args.teacher_bias, args.teacher_compute_dtype,
            args.teacher_logit_scale, args.teacher_softcap, args.temperature,
        )
        if self.passes_over and self.valid is not None:
            self.student = replace(self.student, counts=self.valid.to(self.student.wide))
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
            copies=self.copies,
            block_bytes=self.block_bytes,
            share=2,
        )

    def _admit(self, states: Tensor) -> Tensor:
        return states if self.passes_over else counted(states, self.valid)

    @abstractmethod
    def compare(
        self, tokens: slice, student: Tensor, teacher: Tensor, upstream: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Losses [n] of these tokens.

        Args:
            tokens: Which.
            student: Room for their logits, flat, of at least ``V * padded(n)`` wide elements.
            teacher: As much for the teacher's.
            upstream: [n], the gradients that arrive at the losses, or None.
            out: [V, n], where the gradient with respect to ``student_input @ student_weight.T`` is left, or None.
        """

    def run(self, upstream: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
        """Losses per token and, for an upstream gradient per token, the gradients."""
        args, dtype = self.args, self.student.dtype
        losses: list[Tensor] = []
        if upstream is None:
            fill, places = self._fill(self.tokens, None, losses), None
            fill(slice(0, self.tokens), None)
        else:
            bias = args.student_weight if args.student_bias is None else args.student_bias
            dtypes = (args.student_input.dtype, args.student_weight.dtype, bias.dtype)
            places = Chunks(self.student, args.needs, dtypes, args.accum_dtype, dtype, self.plan, self.steps)
            if places.inside < self.tokens:
                # half of the pairs' room holds gradients that do not fit inside grad_weight: fewer, larger sums
                held = min(self.tokens, self._beyond * 2 * self.wide.itemsize // dtype.itemsize)
                cut = self.plan.holding(held)
                places = Chunks(self.student, args.needs, dtypes, args.accum_dtype, dtype, cut, self.steps)
            fill = self._fill(places.inside, upstream, losses)
        gradients = None if places is None else places.gradients(fill, args.needs)
        loss = torch.cat(losses) if len(losses) > 1 else losses[0]
        loss = loss.to(self.student.wide)
        return loss if self.valid is None else torch.where(self.valid, loss, 0.0), gradients

    @property
    def _beyond(self) -> int:
        """How many tokens' pairs are held at once where their gradients take half of the room."""
        return max(1, self.plan.chunk // 2)

    def _fill(
        self, inside: int, upstream: Tensor | None, losses: list[Tensor]
    ) -> Callable[[slice, Tensor | None], None]:
        def fill(tokens: slice, held: Tensor | None) -> None:
            count = tokens.stop - tokens.start
            size = even(count, self.plan.chunk if tokens.stop <= inside else self._beyond)
            room = self.vocabulary * padded(size)
            student, teacher = (self.student.input.new_empty(room, dtype=self.wide) for _ in range(2))
            for piece in pieces(count, size):
                here = slice(tokens.start + piece.start, tokens.start + piece.stop)
                g = None if upstream is None else upstream[here]
                losses.append(self.compare(here, student, teacher, g, None if held is None else held[:, piece]))

        return fill


MakeDivergence = Callable[["JSDArgs"], Divergence]
"""Makes a divergence: a subclass, or a function that imports it first."""


def kernel(make: MakeDivergence, *requires: Requirement, scale: Scale = scaled) -> Kernel:
    """The kernel of a backend that supplies a divergence and, if it has a better one, a way to scale gradients."""
    return Kernel(partial(_forward, make), partial(_backward, make, scale), requires)


def _forward(make: MakeDivergence, args: JSDArgs) -> tuple[tuple[Tensor | None, ...], Any]:
    # in fp16 the gradients of a mean underflow before a loss scale arrives, so they wait for it
    together = any(args.needs) and args.row_scale is not None and args.compute_dtype != torch.float16
    loss, gradients = make(args).run(args.row_scale if together else None)
    return (loss,), gradients


def _backward(
    make: MakeDivergence, scale: Scale, args: JSDArgs, residual: Any, upstream: Upstream
) -> tuple[Tensor | None, ...]:
    if residual is not None:
        return scale(residual, args.needs, upstream)
    (loss,) = upstream.rows
    gradients = make(args).run(loss)[1]
    assert gradients is not None
    return gradients
