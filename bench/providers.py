"""Who is measured: headmux's backends, plain PyTorch, and other libraries, each as it would be called by a user."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmux import registry
from headmux.bench import peers
from headmux.bench.peers import Unsupported
from headmux.bench.problem import BETA, IGNORE, Problem

Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Provider:
    """One way to compute an op.

    Attributes:
        name: Name in tables and records.
        group: What ``--peers`` selects it by: ``headmux``, ``pytorch``, ``compile``, ``torch-lce``, ``liger``, ``cce``
            or ``quack``.
        config: The configuration in words.
        build: From a problem, a function without arguments that returns the loss, or the values per token. It may raise
            anything: the text becomes the reason in that provider's row.
        exempt: Errors that the gate lets pass because the provider is approximate by design, with ``config`` saying so.
    """

    name: str
    group: str
    config: str
    build: Callable[[Problem], Forward]
    exempt: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is a headmux backend."""
        return self.group == "headmux"


GROUPS = ("pytorch", "compile", "torch-lce", "liger", "cce", "quack")


@contextlib.contextmanager
def masked_environment() -> Iterator[None]:
    """Hide the variables that choose backends: each provider is named, and Liger-Kernel raises on names it lacks."""
    prefixes = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND", "HEADMUX_IMPL")
    hidden = {k: os.environ.pop(k) for k in list(os.environ) if k.startswith(prefixes)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def providers(op: str, impl: str | None = None, peer_names: str = "all", *, half: bool = False) -> list[Provider]:
    """The providers of an op.

    Args:
        op: Name of the op.
        impl: Comma list of headmux backends; None for all; ``none`` for no backend.
        peer_names: ``all``, ``none``, ``eager`` (all that are not under torch.compile), or a comma list of names and
            groups.
        half: Half of the tokens are ignored: headmux is measured again where it is told how many are not.

    Raises:
        LookupError: An unknown name.
    """
    return [*_ours(impl, half), *_chosen(peers_of(op), peer_names)]


def peers_of(op: str) -> list[Provider]:
    """Every peer of an op."""
    found = [*_plain(op), *(Provider(*spec) for spec in peers.SPECS[op])]
    return found


def _chosen(known: list[Provider], names: str) -> list[Provider]:
    words = [w.strip().lower() for w in names.split(",") if w.strip()]
    wanted: set[str] = set()
    for word in words:
        if word == "none":
            continue
        hits = {p.name for p in known if word in ("all", p.name, p.group) or (word == "eager" and p.group != "compile")}
        if not hits and word not in GROUPS:
            raise LookupError(f"no peer is named {word!r}; known: all, none, eager, {', '.join(GROUPS)}, "
                              + ", ".join(p.name for p in known))
        wanted |= hits
    return [p for p in known if p.name in wanted]


# ------------------------------------------------------------------------------------------------ headmux


def named(impl: str | None) -> list[str]:
    """Backends in a comma list: all without one, no backend for ``none``.

    Raises:
        LookupError: An unknown name.
    """
    if impl is None:
        return list(registry.names())
    return [registry.resolve(n) for n in impl.split(",") if n.strip() and n.strip().lower() != "none"]


def _ours(impl: str | None, half: bool) -> list[Provider]:
    found = []
    for name in named(impl):
        for bounded in (False, True) if half else (False,):
            for accum in (None, torch.float32):
                suffix, config = "", f"impl={name}"
                if accum is not None:
                    suffix, config = "-f32acc", f"{config}, accum_dtype=torch.float32"
                if bounded:
                    suffix, config = f"{suffix}-valid", f"{config}, max_valid_tokens=the number of tokens that count"
                found.append(Provider(f"headmux-{name}{suffix}", "headmux", config, _headmux(name, accum, bounded)))
    return found


def _headmux(name: str, accum: torch.dtype | None, bounded: bool) -> Callable[[Problem], Forward]:
    def build(p: Problem) -> Forward:
        if accum is not None and p.dtype in (torch.float32, torch.float64):
            same = f"headmux-{name}{'-valid' if bounded else ''}"
            raise Unsupported(f"the same as {same} for {str(p.dtype).removeprefix('torch.')}")
        op = registry.get_op(p.op)
        if p.op == "jsd":
            options: dict[str, Any] = {
                "beta": BETA, "reduction": p.reduction, "accum_dtype": accum, "impl": name,
                "student_softcap": p.shape.softcap, "teacher_softcap": p.shape.softcap,
            }
            args: tuple[Tensor, ...] = (p.input, p.weight, p.teacher_input, p.teacher_weight, p.target)
        else:
            options = {"softcap": p.shape.softcap, "accum_dtype": accum, "impl": name}
            if p.op == "flce":
                options["reduction"] = p.reduction
            elif p.variant.half:
                options["ignore_index"] = IGNORE
            args = (p.input, p.weight, p.target)
        if bounded:
            options["max_valid_tokens"] = int((p.target != IGNORE).sum())
        found = op.explain(*args, **options)
        if found.backend is None:
            raise Unsupported("; ".join(found.reasons[name]))
        return lambda: op(*args, **options)

    return build


# ------------------------------------------------------------------------------------------------ plain PyTorch


def _plain(op: str) -> list[Provider]:
    found = []
    for compiled in (False, True):
        for wide in (False, True):
            if op == "jsd":
                what = "log_softmax, logaddexp of " + ("fp32 copies of the logits" if wide else "logits in their dtype")
            else:
                what = ("F.cross_entropy" if op == "flce" else "log_softmax and gather") + " of " + (
                    "logits.float()" if wide else "logits in their dtype")
            found.append(Provider(
                "pytorch" + ("-float" if wide else "") + ("-compile" if compiled else ""),
                "compile" if compiled else "pytorch",
                ("torch.compile of " if compiled else "") + what,
                _pytorch(wide=wide, compiled=compiled),
            ))
    return found


def _pytorch(*, wide: bool, compiled: bool) -> Callable[[Problem], Forward]:
    def build(p: Problem) -> Forward:
        if wide and p.dtype in (torch.float32, torch.float64):
            raise Unsupported(f"the same as pytorch for {str(p.dtype).removeprefix('torch.')}")
        function = _PLAIN[p.op]
        if compiled:
            function = torch.compile(function, dynamic=False)
        tensors: tuple[Tensor, ...] = (p.input, p.weight, p.target)
        if p.op == "jsd":
            tensors = (*tensors, p.teacher_input, p.teacher_weight)
        softcap, reduction, half = p.shape.softcap, p.reduction, p.variant.half
        return lambda: function(*tensors, softcap=softcap, reduction=reduction, half=half, wide=wide)

    return build


def _logits(x: Tensor, w: Tensor, softcap: float | None, wide: bool) -> Tensor:
    z = F.linear(x, w)
    if wide:
        z = z.float()
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _plain_flce(
    x: Tensor, w: Tensor, y: Tensor, *, softcap: float | None, reduction: str, half: bool, wide: bool
) -> Tensor:
    del half
    return F.cross_entropy(_logits(x, w, softcap, wide), y, ignore_index=IGNORE, reduction=reduction)


def _plain_logp(
    x: Tensor, w: Tensor, y: Tensor, *, softcap: float | None, reduction: str, half: bool, wide: bool
) -> Tensor:
    del reduction
    logp = torch.log_softmax(_logits(x, w, softcap, wide), -1)
    if not half:
        return logp.gather(-1, y[:, None]).squeeze(-1)
    valid = y != IGNORE
    return torch.where(valid, logp.gather(-1, y.clamp(min=0)[:, None]).squeeze(-1), 0.0)


def _plain_jsd(
    x: Tensor, w: Tensor, y: Tensor, tx: Tensor, tw: Tensor, *, softcap: float | None, reduction: str, half: bool,
    wide: bool,
) -> Tensor:
    del half
    q = torch.log_softmax(_logits(x, w, softcap, wide), -1)
    p = torch.log_softmax(_logits(tx, tw, softcap, wide), -1)
    m = torch.logaddexp(p + math.log(BETA), q + math.log1p(-BETA))
    loss = BETA * F.kl_div(m, p, reduction="none", log_target=True).sum(-1)
    loss = loss + (1 - BETA) * F.kl_div(m, q, reduction="none", log_target=True).sum(-1)
    valid = y != IGNORE
    loss = torch.where(valid, loss, 0.0)
    return loss if reduction == "none" else loss.sum() / valid.sum()


_PLAIN: dict[str, Callable[..., Tensor]] = {"flce": _plain_flce, "jsd": _plain_jsd, "linear_logp": _plain_logp}
