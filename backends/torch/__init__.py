"""Pure PyTorch backend. It requires nothing and runs wherever PyTorch does: the last candidate of every order."""

from __future__ import annotations

from headmux.backends.common import flce, linear_logp
from headmux.backends.torch import jsd
from headmux.backends.torch.softmax import TorchSoftmax
from headmux.contract import Backend

backend = Backend(
    "torch",
    kernels={"flce": flce.kernel(TorchSoftmax), "jsd": jsd.kernel, "linear_logp": linear_logp.kernel(TorchSoftmax)},
)
