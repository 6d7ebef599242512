"""Which tokens enter an op's kernels, where those that do not count can be left out.

On the CPU a look at the labels is free, so just the tokens that count enter. Elsewhere it would stop the host: there
``max_valid_tokens`` says how many count at most, and that many enter, those that count first and others behind them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headmux.ops._op import Op

_looking: ContextVar[bool] = ContextVar("headmux_looking", default=True)


@contextlib.contextmanager
def without_looking() -> Iterator[None]:
    """Within the block, tokens on the CPU are left out only as they are on a GPU: kernels there meet ignored ones."""
    token = _looking.set(False)
    try:
        yield
    finally:
        _looking.reset(token)


@dataclass(frozen=True, slots=True)
class Picked:
    """The tokens that enter.

    Attributes:
        index: [k] int64, their places: of those that count first, each kind in its order.
        valid: [N] bool, the tokens that count.
        poison: 0-dim, NaN if one that counts is left out, else 1.
    """

    index: Tensor
    valid: Tensor
    poison: Tensor

    def rows(self, rows: Tensor) -> Tensor:
        """[k] factors of these tokens from [N]."""
        return rows.index_select(0, self.index) * self.poison

    def outputs(self, op: Op, rows: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Outputs [N] from [k]: of a token that is left out what an ignored one has, but NaN if it counts."""
        found: list[Tensor | None] = []
        for out, r in zip(op.outputs, rows, strict=True):
            if r is not None:
                full = r.new_full(self.valid.shape, -1 if out.integer else 0)
                full = full if out.integer else full.masked_fill_(self.valid, torch.nan)
                r = full.index_copy_(0, self.index, r)
            found.append(r)
        return tuple(found)

    def gradients(self, op: Op, found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of all tokens from those of these: 0 for the others, but NaN if one that counts is left out."""

        def full(g: Tensor) -> Tensor:
            rest = g.new_empty(self.valid.shape + g.shape[1:]).copy_(self.poison - 1)
            return rest.index_copy_(0, self.index, g)

        return tuple([
            full(g) if g is not None and role in op.token_fields else g
            for role, g in zip(op.gradients, found, strict=True)
        ])


def pick(op: Op, args: Any) -> Picked | None:
    """The tokens that enter, or None if all do."""
    device = getattr(args, op.tensor_fields[0]).device
    looks = device.type == "cpu" and _looking.get()
    if args.max_valid_tokens is None and not looks:  # nor is a launch spent on the question
        return None
    valid = op.valid(args)
    if valid is None:
        return None
    total = valid.shape[0]
    count = max(1, int(valid.sum())) if looks else args.max_valid_tokens
    if count >= total:
        return None
    order = torch.argsort((~valid).view(torch.uint8), stable=True)
    return Picked(order[:count], valid, torch.where(valid.sum() > count, torch.nan, 1.0))


def entering(op: Op, args: Any, picked: Picked | None) -> Any:
    """The kernels' arguments, of these tokens alone."""
    if picked is None:
        return args if args.max_valid_tokens is None else dataclasses.replace(args, max_valid_tokens=None)
    fields = {f: t.index_select(0, picked.index) for f in op.token_fields if (t := getattr(args, f)) is not None}
    if "row_scale" in fields:
        fields["row_scale"] = fields["row_scale"] * picked.poison
    return dataclasses.replace(args, max_valid_tokens=None, **fields)
