"""Other libraries, called the way their documentation says. Each import waits until the provider is built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headmux.bench.problem import BETA, IGNORE, Problem

Forward = Callable[[], Tensor]
Build = Callable[[Problem], Forward]


class Unsupported(Exception):
    """A provider cannot run a problem, and the text says why."""


def _no_softcap(p: Problem, who: str) -> None:
    if p.shape.softcap is not None:
        raise Unsupported(f"{who} has no softcap")


def _no_rows(p: Problem, who: str) -> None:
    if p.per_token:
        raise Unsupported(f"{who} has no reduction='none'")


def _cuda(p: Problem, who: str) -> None:
    if p.device.type != "cuda":
        raise Unsupported(f"{who} needs a GPU, and the tensors are on {p.device.type}")


# ------------------------------------------------------------------------------------------------ PyTorch's own


def _torch_lce(p: Problem) -> Forward:
    function: Any = getattr(F, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise Unsupported(f"torch {torch.__version__} has no chunked F.linear_cross_entropy (2.13 has)")
    _no_softcap(p, "F.linear_cross_entropy")
    _no_rows(p, "the chunked F.linear_cross_entropy")
    x, w, y, reduction = p.input, p.weight, p.target, p.reduction
    chunked = options()
    return lambda: function(x, w, y, reduction=reduction, ignore_index=IGNORE, options=chunked)


# ------------------------------------------------------------------------------------------------ Liger-Kernel


def _liger_flce(accum: torch.dtype | None, *, logp: bool = False) -> Build:
    def build(p: Problem) -> Forward:
        _cuda(p, "Liger-Kernel")
        function = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction

        # bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, z_loss, accum_dtype
        options = (None, None, IGNORE, 0.0, 0.0, p.reduction, p.shape.softcap, False, accum)
        x, w, y = p.input, p.weight, p.target

        def forward() -> Tensor:
            loss: Tensor = function.apply(x, w, y, *options)[0]
            return -loss if logp else loss

        return forward

    return build


def _liger_functional(p: Problem) -> Forward:
    _cuda(p, "Liger-Kernel")
    function = import_module("liger_kernel.functional").fused_linear_cross_entropy

    x, w, y, softcap, reduction = p.input, p.weight, p.target, p.shape.softcap, p.reduction
    return lambda: function(x, w, y, ignore_index=IGNORE, reduction=reduction, softcap=softcap)[0]


def _liger_sm90_flce(p: Problem) -> Forward:
    _cuda(p, "Liger-Kernel")
    _no_softcap(p, "Liger-Kernel's SM90 class")
    _no_rows(p, "Liger-Kernel's SM90 class")
    module = import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    function = module.LigerFusedLinearCrossEntropySM90Function

    x, w, y, reduction = p.input, p.weight, p.target, p.reduction
    return lambda: function.apply(x, w, y, IGNORE, reduction)


def _liger_jsd(accum: torch.dtype | None) -> Build:
    def build(p: Problem) -> Forward:
        _cuda(p, "Liger-Kernel")
        _no_softcap(p, "Liger-Kernel's fused_linear_jsd")
        _no_rows(p, "Liger-Kernel's fused_linear_jsd")
        function = import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction

        args = (p.input, p.weight, p.teacher_input, p.teacher_weight, p.target, BETA, IGNORE, 1.0, accum)
        return lambda: function.apply(*args)

    return build


def _liger_chunked_jsd(*, compiled: bool) -> Build:
    def build(p: Problem) -> Forward:
        _no_softcap(p, "Liger-Kernel's chunked_loss")
        _no_rows(p, "Liger-Kernel's chunked_loss")
        function = import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss

        module = function(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA, ignore_index=IGNORE, compiled=compiled
        )
        args = (p.input, p.weight, p.teacher_input, p.teacher_weight, p.target)
        return lambda: module(*args)

    return build


def _liger_logp(p: Problem) -> Forward:
    _cuda(p, "Liger-Kernel")
    _no_softcap(p, "Liger-Kernel's fused_linear_scaled_cross_entropy")
    function = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    x, w, y = p.input, p.weight, p.target
    return lambda: -function.apply(x, w, y, 1.0, IGNORE)


def _liger_logp_fallback(p: Problem) -> Forward:
    _no_softcap(p, "Liger-Kernel's fused_linear_scaled_cross_entropy")
    function = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")._FusedLinearPPOFallbackFunction

    x, w, y = p.input, p.weight, p.target
    return lambda: -function.apply(x, w, y, 1.0, IGNORE, False)


# ------------------------------------------------------------------------------------------------ others


def _cce(eps: str | None, *, logp: bool = False) -> Build:
    def build(p: Problem) -> Forward:
        _cuda(p, "cut-cross-entropy")
        function = import_module("cut_cross_entropy").linear_cross_entropy

        x, w, y, softcap, reduction = p.input, p.weight, p.target, p.shape.softcap, p.reduction

        def forward() -> Tensor:
            loss: Tensor = function(
                x, w, y, ignore_index=IGNORE, softcap=softcap, reduction=reduction, filter_eps=eps
            )
            return -loss if logp else loss

        return forward

    return build


def _quack(scaled_exp: bool | None) -> Build:
    def build(p: Problem) -> Forward:
        _cuda(p, "QuACK")
        _no_softcap(p, "QuACK's chunked_linear_cross_entropy")
        _no_rows(p, "QuACK's chunked_linear_cross_entropy")
        function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

        x, w, y = p.input, p.weight, p.target
        return lambda: function(
            x, w, y, ignore_index=IGNORE, reduction="mean", tuned=False, use_scaled_exp=scaled_exp
        )

    return build


_F32 = torch.float32
_FILTER = ("err_weight", "err_weight_untargeted")
_FILTERED = "filter_eps='high': gradients of improbable tokens are dropped by design, so dW is let past the gate"

SPECS: dict[str, list[tuple[Any, ...]]] = {
    "flce": [
        ("torch-lce", "torch-lce", "F.linear_cross_entropy, LinearCrossEntropyOptions()", _torch_lce),
        ("liger", "liger", "LigerFusedLinearCrossEntropyFunction, as its Loss module calls it", _liger_flce(None)),
        ("liger-f32acc", "liger", "the same with accum_dtype=torch.float32", _liger_flce(_F32)),
        ("liger-functional", "liger", "functional.fused_linear_cross_entropy, its choice of kernel", _liger_functional),
        ("liger-sm90", "liger", "LigerFusedLinearCrossEntropySM90Function of ops.cutedsl", _liger_sm90_flce),
        ("cce", "cce", _FILTERED, _cce("high"), _FILTER),
        ("cce-nofilter", "cce", "filter_eps=None", _cce(None)),
        ("quack", "quack", "chunked_linear_cross_entropy, its choice of pipeline, tuned=False", _quack(None)),
        ("quack-base", "quack", "the same with use_scaled_exp=False", _quack(False)),
    ],
    "jsd": [
        ("liger", "liger", "LigerFusedLinearJSDFunction", _liger_jsd(None)),
        ("liger-f32acc", "liger", "the same with accum_dtype=torch.float32", _liger_jsd(_F32)),
        ("liger-chunked", "liger", "chunked_loss.LigerFusedLinearJSDLoss, compiled=False",
         _liger_chunked_jsd(compiled=False)),
        ("liger-chunked-compile", "compile", "the same with compiled=True", _liger_chunked_jsd(compiled=True)),
    ],
    "linear_logp": [
        ("liger-logp", "liger", "LigerFusedLinearScaledCrossEntropyFunction (its SM90 class on Hopper)", _liger_logp),
        ("liger-logp-portable", "liger", "its portable fallback", _liger_logp_fallback),
        ("liger-flce-none", "liger", "LigerFusedLinearCrossEntropyFunction, reduction='none'",
         _liger_flce(None, logp=True)),
        ("cce", "cce", f"reduction='none', {_FILTERED}", _cce("high", logp=True), _FILTER),
        ("cce-nofilter", "cce", "reduction='none', filter_eps=None", _cce(None, logp=True)),
    ],
}
"""Op name to (name, group, config, build[, exempt]) of each peer."""
