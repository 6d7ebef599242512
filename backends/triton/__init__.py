"""Triton backend: cuBLAS's products, and Triton between them. It has no kernel for jsd yet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from headmux.backends.common import flce, linear_logp
from headmux.contract import Backend, Call
from headmux.requirements import capability, dtypes

if TYPE_CHECKING:
    from headmux.backends.common.softmax import Softmax


def _device(call: Call) -> str | None:
    if call.device.type == "cuda":
        return _capability(call)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return None
    return f"device {call.device.type} is not cuda, and TRITON_INTERPRET=1 is not set"


def _softmax(*args: Any) -> Softmax:
    from headmux.backends.triton.softmax import TritonSoftmax

    return TritonSoftmax(*args)


_capability = capability((8, 0))

backend = Backend(
    "triton",
    kernels={"flce": flce.kernel(_softmax), "linear_logp": linear_logp.kernel(_softmax)},
    requires=(_device, dtypes(torch.float32, torch.bfloat16, torch.float16)),
    imports=("triton",),
)
