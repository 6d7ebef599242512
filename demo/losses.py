"""Each loss twice: through headmux, and as one writes it in plain PyTorch from the [N, V] logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmux import get_op
from headmux.contract import Selection

IGNORE = -100
BETA = 0.5
ENTROPY_BONUS = 0.003


@dataclass(frozen=True)
class Loss:
    """A loss of hidden states [B, T, H], the head's weight [V, H] and whatever else its batch holds.

    Attributes:
        op: Name of headmux's op.
        headmux: The loss through that op.
        plain: The same by hand.
        explain: Which backend runs it, and why.
    """

    op: str
    headmux: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    explain: Callable[..., Selection]


def cross_entropy(impl: str | None) -> Loss:
    """Batch: targets [B, T]."""
    flce = get_op("flce")

    def plain(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(states, weight).flatten(0, 1), target.flatten())

    return Loss("flce", _with(flce, impl), plain, _with(flce.explain, impl))


def distillation(impl: str | None) -> Loss:
    """Batch: the teacher's hidden states and weight. The Jensen-Shannon divergence of the two, mean over tokens."""
    jsd = get_op("jsd")

    def plain(states: Tensor, weight: Tensor, teacher_states: Tensor, teacher_weight: Tensor) -> Tensor:
        q = F.linear(states, weight).float().log_softmax(-1)
        p = F.linear(teacher_states, teacher_weight).float().log_softmax(-1)
        m = torch.logaddexp(p + math.log(BETA), q + math.log1p(-BETA))
        loss = BETA * F.kl_div(m, p, reduction="none", log_target=True).sum(-1)
        loss = loss + (1 - BETA) * F.kl_div(m, q, reduction="none", log_target=True).sum(-1)
        return loss.mean()

    return Loss("jsd", _with(jsd, impl, beta=BETA), plain, _with(jsd.explain, impl, beta=BETA))


def scoring(impl: str | None) -> Loss:
    """Batch: targets [B, T]. Log-probability of each."""
    logp = get_op("linear_logp")

    def plain(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.linear(states, weight).float().log_softmax(-1).gather(-1, target[..., None])[..., 0]

    return Loss("linear_logp", _with(logp, impl), plain, _with(logp.explain, impl))


def policy_gradient(impl: str | None) -> Loss:
    """Batch: targets [B, T] with ``IGNORE`` on the prompt, and the advantage [B] of each row."""
    logp = get_op("linear_logp")
    options: dict[str, Any] = {"ignore_index": IGNORE, "return_entropy": True}

    def objective(selected: Tensor, entropy: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        return -(advantage[:, None] * selected + ENTROPY_BONUS * entropy).sum() / (target != IGNORE).sum()

    def headmux(states: Tensor, weight: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        out: Any = logp(states, weight, target, impl=impl, **options)
        return objective(out.logp, out.entropy, target, advantage)

    def plain(states: Tensor, weight: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
        every = F.linear(states, weight).float().log_softmax(-1)
        selected = every.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        entropy = -(every.exp() * every).sum(-1)
        counts = target != IGNORE
        return objective(selected * counts, entropy * counts, target, advantage)

    def explain(states: Tensor, weight: Tensor, target: Tensor, advantage: Tensor) -> Selection:
        del advantage
        return logp.explain(states, weight, target, impl=impl, **options)

    return Loss("linear_logp", headmux, plain, explain)


def _with(function: Callable[..., Any], impl: str | None, **options: Any) -> Callable[..., Any]:
    def call(*args: Tensor) -> Any:
        return function(*args, impl=impl, **options)

    return call
