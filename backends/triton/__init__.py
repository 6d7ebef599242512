"""Triton backend. It has no kernels yet; its requirements are already told."""

from __future__ import annotations

import os

import torch

from headmux.contract import Backend, Call
from headmux.requirements import capability, dtypes


def _device(call: Call) -> str | None:
    if call.device.type == "cuda":
        return _capability(call)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return None
    return f"device {call.device.type} is not cuda, and TRITON_INTERPRET=1 is not set"


_capability = capability((8, 0))

backend = Backend(
    "triton",
    kernels={},
    requires=(_device, dtypes(torch.float32, torch.bfloat16, torch.float16)),
    imports=("triton",),
)
