"""NVIDIA CuTe DSL backend for Hopper: losses and log-probabilities without gradients. Logits are never written."""

from __future__ import annotations

import torch

from headmux.backends.cutedsl import flce, linear_logp
from headmux.contract import Backend, Call, Kernel
from headmux.requirements import capability, device, dtypes, no_gradients, option


def _weight_as_it_is(call: Call) -> str | None:
    weight, compute = call.dtype("weight"), call.dtype("compute")
    return None if weight == compute else f"weight dtype {weight} is not that of the products, {compute}"


def _hidden(call: Call) -> str | None:
    hidden = call.size("H")  # TMA reads rows of whole 16 bytes
    return None if hidden % 8 == 0 and hidden > 0 else f"H={hidden} is not a multiple of 8 above 0"


def _no_backward(*_: object) -> tuple[None, ...]:
    raise NotImplementedError("cutedsl forms no gradients")


backend = Backend(
    "cutedsl",
    kernels={
        "flce": Kernel(
            flce.forward, _no_backward, (option("label_smoothing", 0.0), option("return_predicted", False))
        ),
        "linear_logp": Kernel(linear_logp.forward, _no_backward),
    },
    requires=(
        device("cuda"),
        capability((9, 0), below=(10, 0)),  # WGMMA and TMA kernels are built for exactly sm_90a
        dtypes(torch.bfloat16, torch.float16),
        _weight_as_it_is,
        _hidden,
        no_gradients(),
    ),
    imports=("cutlass", "tvm_ffi", "cuda.bindings"),
)
