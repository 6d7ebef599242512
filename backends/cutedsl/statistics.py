"""Statistics of a head's logits from the kernels: scalars, buffers and the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headmux.backends.common.head import MASKED
from headmux.backends.cutedsl.build import Config, kernel
from headmux.backends.cutedsl.schedule import COLUMN, Schedule
from headmux.devices import multiprocessors

_LOG2E = math.log2(math.e)
_ALIGNED = 16  # bytes, of rows that TMA reads


class Statistics(NamedTuple):
    """Per token, in fp32, 0 where it does not count.

    Attributes:
        logp: Log-probability of the label, NaN where that is out of range.
        lse: Logsumexp.
        entropy: Entropy, or None.
    """

    logp: Tensor
    lse: Tensor
    entropy: Tensor | None


def statistics(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    ignore_index: int | None,
    scale: float,
    softcap: float | None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
) -> Statistics:
    """Statistics of each token's logits.

    Args:
        input: [N, H] bf16 or fp16; copied if its rows are not aligned. Rows of ignored tokens may hold anything.
        weight: [V, H], of the same dtype; copied if its rows are not aligned.
        bias: [V] or None.
        target: [N] int64.
        ignore_index: Target of tokens that do not count, or None.
        scale: Factor of the logits.
        softcap: Bound of the scaled logits, or None.
        temperature: Divisor of what comes out, a number or [N].
        entropy: Also return the entropy.
    """
    found = Statistics(_per_token(input), _per_token(input), _per_token(input) if entropy else None)
    if input.shape[0]:
        _launch(
            input, weight, bias, target, found, [None] * 5, scale=scale, softcap=softcap, temperature=temperature,
            ignore_index=ignore_index,
        )  # fmt: skip
    return found


def logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    held: Tensor,
    *,
    scale: float,
    softcap: float | None,
    temperature: float = 1.0,
) -> Tensor:
    """Leave each token's logits in units of log 2.

    Args:
        input: As ``statistics`` takes it.
        weight: The same.
        bias: The same.
        held: [V, N] fp32, where the logits go; rows start at multiples of 8 elements.
        scale: As ``statistics`` takes it.
        softcap: The same.
        temperature: Divisor of what comes out.

    Returns:
        [2, N] fp32: the two parts of the logsumexp, the largest logit and the logarithm of the sum of exponentials
        against it, in units of log 2.
    """
    lse = input.new_empty((2, input.shape[0]), dtype=torch.float32)
    _launch(
        input, weight, bias, None, (None, lse, None), [held, *[None] * 4], scale=scale, softcap=softcap,
        temperature=temperature, ignore_index=None, store=True,
    )  # fmt: skip
    return lse


def exponentials(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    counts: Tensor,
    held: Tensor,
    *,
    scale: float,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leave exponentials e of each token's logits, and minus the sum of the others in place of the target's.

    Args:
        input: As ``statistics`` takes it, bf16.
        weight: The same.
        bias: The same.
        target: [N] int64, each in range.
        counts: [N] fp32, 0 for tokens that do not count: their exponentials are 0.
        held: [V, N] bf16, where the exponentials go; rows start at multiples of 16 bytes, and what lies between a row's
            end and the next such multiple is written too.
        scale: Factor of the logits.
        temperature: Divisor of what comes out, a number or [N].

    Returns:
        Per token, in fp32, 0 where it does not count: the logsumexp, the logit at the target, and the factor that makes
        p - [j = target] of what ``held`` has.
    """
    tokens, vocabulary = input.shape[0], weight.shape[0]
    found = Statistics(_per_token(input), _per_token(input), None)
    used = input.new_empty((-(-vocabulary // COLUMN), tokens), dtype=torch.float32)
    more = input.new_empty((3, tokens), dtype=torch.float32)
    kept = [held, counts, _per_token(input), used, more]
    _launch(
        input, weight, bias, target, found, kept, scale=scale, softcap=None, temperature=temperature,
        ignore_index=None, keep=True,
    )  # fmt: skip
    return found.lse, found.logp, more[2]


def _per_token(like: Tensor) -> Tensor:
    return like.new_empty(like.shape[0], dtype=torch.float32)


def _launch(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    found: tuple[Tensor | None, ...],
    kept: Sequence[Tensor | None],
    *,
    scale: float,
    softcap: float | None,
    temperature: float | Tensor,
    ignore_index: int | None,
    keep: bool = False,
    store: bool = False,
) -> None:
    tokens, hidden = input.shape
    vocabulary = weight.shape[0]
    inner, outer = _factors(scale, softcap, bias is not None)
    padded = vocabulary + -vocabulary % COLUMN
    shift = None
    if bias is not None:
        shift = input.new_empty(padded, dtype=torch.float32)  # what is beyond the vocabulary never matters
        shift[:vocabulary].copy_(bias).clamp_(min=MASKED).mul_(inner)
    elif softcap is None and inner != 1.0:
        shift = input.new_zeros(padded, dtype=torch.float32)
    factors = outer * _LOG2E / temperature
    one, each = (1.0, factors) if isinstance(factors, Tensor) else (factors, None)
    slots, schedule = _schedule(tokens, vocabulary, hidden, input.device)
    entropy = found[2] is not None
    partials = input.new_empty((3 if entropy else 2, slots), dtype=torch.float32)
    config = Config(input.dtype, shift is not None, softcap is not None, entropy, each is not None, keep, store)
    with torch.cuda.device(input.device):
        kernel(config)(
            aligned(input), aligned(weight), shift, None if target is None else target.contiguous(), each, partials,
            *found, *kept, inner, one, ignore_index or 0, int(ignore_index is not None), *schedule,
        )  # fmt: skip


def _factors(scale: float, softcap: float | None, bias: bool) -> tuple[float, float]:
    """What products are multiplied with inside, before bias and softcap, and what the result is multiplied with.

    The kernel takes tanh(a) as 1 - 2 / (1 + 2^x) with x = 2 a log2(e), and finds the largest logit before it multiplies
    with the outer factor, which therefore must be above 0.
    """
    if softcap is not None:
        return 2 * _LOG2E * scale / softcap, softcap
    return (scale, 1.0) if bias or scale < 0 else (1.0, scale)


def aligned(rows: Tensor) -> Tensor:
    """The matrix, or a copy, with rows of neighbouring elements that start at multiples of 16 bytes."""
    step = _ALIGNED // rows.itemsize
    strides = rows.stride()
    whole = strides[1] == 1 and strides[0] >= rows.shape[1] and strides[0] % step == 0
    if whole and rows.data_ptr() % _ALIGNED == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _schedule(tokens: int, vocabulary: int, hidden: int, device: torch.device) -> tuple[int, tuple[int, ...]]:
    """How many slots all tokens take, and what the kernels are told of the schedule."""
    found = Schedule.of(tokens, vocabulary, hidden, multiprocessors(device))
    return found.size, (found.group, *found.periods, found.slots, found.clusters)
