"""Pure PyTorch backend. It requires nothing and runs wherever PyTorch does: the last candidate of every order."""

from __future__ import annotations

from headmux.backends.common import flce, jsd, linear_logp
from headmux.backends.torch.divergence import TorchDivergence
from headmux.backends.torch.softmax import TorchSoftmax
from headmux.contract import Backend

backend = Backend(
    "torch",
    kernels={
        "flce": flce.kernel(TorchSoftmax),
        "jsd": jsd.kernel(TorchDivergence),
        "linear_logp": linear_logp.kernel(TorchSoftmax),
    },
)
