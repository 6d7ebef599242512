"""NVIDIA CuTe DSL backend for Hopper. Logits are never written, but where two models' are compared, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headmux.backends.common import flce as common_flce
from headmux.backends.common import jsd as common_jsd
from headmux.backends.common import linear_logp as common_linear_logp
from headmux.backends.cutedsl import flce, linear_logp
from headmux.contract import Backend, Call, Kernel, Requirement
from headmux.requirements import capability, device, dtypes, option

if TYPE_CHECKING:
    from torch import Tensor

    from headmux.backends.common.jsd import Divergence
    from headmux.backends.common.labels import Labels
    from headmux.backends.common.softmax import Softmax
    from headmux.contract import Upstream


_DTYPES = (torch.bfloat16, torch.float16)


def _as_it_is(weight: str, compute: str) -> Requirement:
    def check(call: Call) -> str | None:
        have, wanted = call.dtype(weight), call.dtype(compute)
        return None if have == wanted else f"{weight} dtype {have} is not that of the products, {wanted}"

    return check


def _hidden(size: str) -> Requirement:
    def check(call: Call) -> str | None:
        hidden = call.size(size)  # TMA reads rows of whole 16 bytes
        return None if hidden % 8 == 0 and hidden > 0 else f"{size}={hidden} is not a multiple of 8 above 0"

    return check


def _no_student_softcap(call: Call) -> str | None:
    softcap = call.option("student_softcap")  # its slope needs the logits from before it
    return f"with gradients, student_softcap={softcap} is not one of None" if call.needs and softcap else None


def _gradients(**options: object) -> Requirement:
    """What calls for gradients must meet: a gradient that is a multiple of p - [j = y] for each token, in bfloat16."""
    checks = [
        dtypes(torch.bfloat16),
        *(option(name, value) for name, value in {"softcap": None, **options}.items()),
        lambda call: "gradients of bias are not supported" if "bias" in call.needs else None,
    ]

    def check(call: Call) -> str | None:
        if not call.needs:
            return None
        reasons = [reason for one in checks if (reason := one(call)) is not None]
        return f"with gradients, {'; '.join(reasons)}" if reasons else None

    return check


def _softmax(*args: Any) -> Softmax:
    from headmux.backends.cutedsl.softmax import CuteSoftmax

    return CuteSoftmax(*args)


def _divergence(*args: Any) -> Divergence:
    from headmux.backends.cutedsl.divergence import CuteDivergence

    return CuteDivergence(*args)


def _admit(*args: Any) -> tuple[Labels, Tensor]:
    from headmux.backends.cutedsl.launch import admit

    return admit(*args)


def _scale(
    gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...], upstream: Upstream
) -> tuple[Tensor | None, ...]:
    from headmux.backends.cutedsl.launch import scaled

    return scaled(gradients, needs, upstream)


def _kernel(forward: Callable[[Any], Any], full: Kernel, *requires: Requirement) -> Kernel:
    """Calls without gradients go to ``forward``, which keeps nothing."""
    return Kernel(
        lambda args: full.forward(args) if any(args.needs) else forward(args),
        full.backward,
        (*full.requires, *requires),
    )


backend = Backend(
    "cutedsl",
    kernels={
        "flce": _kernel(
            flce.forward,
            common_flce.kernel(_softmax, admit=_admit, scale=_scale),
            _as_it_is("weight", "compute"),
            option("label_smoothing", 0.0),
            option("return_predicted", False),
            _gradients(lse_square_scale=0.0),
        ),
        "linear_logp": _kernel(
            linear_logp.forward,
            common_linear_logp.kernel(_softmax, admit=_admit),
            _as_it_is("weight", "compute"),
            _gradients(return_entropy=False, return_lse=False),
        ),
        "jsd": common_jsd.kernel(
            _divergence,
            dtypes(*_DTYPES, role="teacher_compute"),
            _as_it_is("student_weight", "compute"),
            _as_it_is("teacher_weight", "teacher_compute"),
            _hidden("H_teacher"),
            _no_student_softcap,
            scale=_scale,
        ),
    },
    requires=(
        device("cuda"),
        capability((9, 0), below=(10, 0)),  # WGMMA and TMA kernels are built for exactly sm_90a
        dtypes(*_DTYPES),
        _hidden("H"),
    ),
    imports=("cutlass", "tvm_ffi", "cuda.bindings"),
)
