"""The tensors of one measured call: the same for every provider."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headmux.bench.shapes import Shape, Variant

IGNORE = -100
BETA = 0.5
_SEED = 20240
_SEQUENCES = 8


@dataclass
class Problem:
    """One call's inputs.

    Random data is x ~ N(0, 1), weight ~ N(0, 0.02), uniform labels. Data of a trained model has labels by Zipf's law
    and hidden states moved along their label's weight row, so that its logit is N(14, 4): some tokens sure, some not.
    Its teacher is near the student.

    Attributes:
        op: Name of the op.
        shape: Sizes.
        dtype: dtype of hidden states and weights.
        device: Device of every tensor.
        variant: How it is called.
        input: [N, H] hidden states (the student's), a leaf that requires a gradient unless the variant forms none, as a
            model's states do under ``torch.no_grad``.
        weight: [V, H], a leaf that requires a gradient, as a parameter does.
        target: [N] int64.
        upstream: Gradient that arrives, 0-dim or [N]; None for the loss's own backward.
        teacher_input: [N, H], for jsd.
        teacher_weight: [V, H], for jsd.
    """

    op: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    variant: Variant
    input: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    target: Tensor = field(init=False)
    upstream: Tensor | None = field(init=False, default=None)
    teacher_input: Tensor = field(init=False)
    teacher_weight: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n, h, v = self.shape.n, self.shape.h, self.shape.v
        make = torch.Generator(self.device).manual_seed(_SEED)

        def normal(*shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
            out = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
            return out.normal_(0.0, std, generator=make)

        x, w = normal(n, h), normal(v, h, std=0.02)
        trained = self.variant.trained
        if trained:
            ranks = torch.arange(v, device=self.device, dtype=torch.float32)
            labels = torch.multinomial(1 / (ranks + 2.7), n, replacement=True, generator=make)
            rows = w[labels].float()
            height = 14.0 + normal(n, 1, std=4.0, dtype=torch.float32)
            x = (x.float() + rows * (height / rows.square().sum(1, keepdim=True))).to(self.dtype)
        else:
            labels = torch.randint(0, v, (n,), device=self.device, generator=make)
        if self.variant.half:
            length = max(2, math.ceil(n / _SEQUENCES))
            place = torch.arange(n, device=self.device) % length
            labels = torch.where(place < length // 2, IGNORE, labels)
        if self.op == "jsd":
            if trained:
                self.teacher_input = x + normal(n, h, std=0.1)
                self.teacher_weight = w + normal(v, h, std=0.002)
            else:
                self.teacher_input, self.teacher_weight = normal(n, h), normal(v, h, std=0.02)
        self.input, self.weight, self.target = x.requires_grad_(self.variant.gradients), w.requires_grad_(True), labels
        if self.variant.upstream == "rows" or (self.op == "linear_logp" and self.variant.upstream == "default"):
            self.upstream = normal(n, dtype=self.wide)
        elif self.variant.upstream == "scaled":
            value = -1.0 / n if self.per_token else 0.5
            scalar = torch.full((), value, dtype=self.wide, device=self.device)
            self.upstream = scalar.expand(n) if self.per_token else scalar

    @property
    def wide(self) -> torch.dtype:
        """dtype of losses."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def per_token(self) -> bool:
        """Whether the call returns one value per token."""
        return self.op == "linear_logp" or self.variant.upstream == "rows"

    @property
    def reduction(self) -> str:
        """The reduction of flce and jsd."""
        return "none" if self.per_token else "mean"

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        """The tensors whose gradients are formed."""
        return self.input, self.weight

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, which every provider must return."""
        return sum(t.numel() * t.element_size() for t in self.leaves) if self.variant.gradients else 0

    def clear(self) -> None:
        """Gradients to None."""
        for leaf in self.leaves:
            leaf.grad = None
