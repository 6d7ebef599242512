"""NVIDIA CuTe DSL backend. It has no kernels yet; its requirements are already told."""

from __future__ import annotations

from headmux.contract import Backend
from headmux.requirements import capability, device

backend = Backend(
    "cutedsl",
    kernels={},
    # WGMMA and TMA kernels are built for exactly sm_90a
    requires=(device("cuda"), capability((9, 0), below=(10, 0))),
    imports=("cutlass", "tvm_ffi", "cuda.bindings"),
)
