"""Triton backend: cuBLAS's products, and Triton between them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from headmux.backends.common import flce, jsd, linear_logp
from headmux.contract import Backend, Call
from headmux.requirements import capability, dtypes

if TYPE_CHECKING:
    from torch import Tensor

    from headmux.backends.common.jsd import Divergence
    from headmux.backends.common.labels import Labels
    from headmux.backends.common.softmax import Softmax
    from headmux.contract import Upstream


def _device(call: Call) -> str | None:
    if call.device.type == "cuda":
        return _capability(call)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return None
    return f"device {call.device.type} is not cuda, and TRITON_INTERPRET=1 is not set"


# what needs Triton is imported when it is used


def _softmax(*args: Any) -> Softmax:
    from headmux.backends.triton.softmax import TritonSoftmax

    return TritonSoftmax(*args)


def _divergence(args: Any) -> Divergence:
    from headmux.backends.triton.divergence import TritonDivergence

    return TritonDivergence(args)


def _admit(*args: Any) -> tuple[Labels, Tensor]:
    from headmux.backends.triton.launch import admit

    return admit(*args)


def _scale(
    gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...], upstream: Upstream
) -> tuple[Tensor | None, ...]:
    from headmux.backends.triton.launch import scaled

    return scaled(gradients, needs, upstream)


_capability = capability((8, 0))

backend = Backend(
    "triton",
    kernels={
        "flce": flce.kernel(_softmax, admit=_admit, scale=_scale),
        "jsd": jsd.kernel(_divergence, scale=_scale),
        "linear_logp": linear_logp.kernel(_softmax, admit=_admit),
    },
    requires=(_device, dtypes(torch.float32, torch.bfloat16, torch.float16)),
    imports=("triton",),
)
