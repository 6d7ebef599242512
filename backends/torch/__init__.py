"""Pure PyTorch backend. It requires nothing and runs wherever PyTorch does: the last candidate of every order."""

from __future__ import annotations

from headmux.backends.torch import flce, jsd, linear_logp
from headmux.contract import Backend

backend = Backend(
    "torch",
    kernels={"flce": flce.kernel, "jsd": jsd.kernel, "linear_logp": linear_logp.kernel},
)
