"""One of two processes of test_training: DDP over gloo, and a DTensor weight."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing import assert_close

from headmux import get_op

flce = get_op("flce")


class Model(nn.Module):
    """A body that changes nothing, and a head."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6, bias=False, dtype=torch.float64)
        self.head = nn.Parameter(weight.clone())
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(6))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The summed loss of these tokens."""
        return flce(self.body(x), self.head, t, reduction="sum")


def main(folder: Path) -> None:
    """Write this rank's gradient of the head to the folder."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    x, w, t = torch.load(folder / "data.pt")
    model = nn.parallel.DistributedDataParallel(Model(w))
    rows = slice(0, 3) if rank == 0 else slice(3, 8)
    model(x[rows], t[rows]).backward()
    torch.save(model.module.head.grad, folder / f"{rank}.pt")

    whole = distribute_tensor(w, init_device_mesh("cpu", (2,)), [Replicate()])
    with pytest.raises(TypeError, match=r"weight is a DTensor of shape \(17, 6\).*full_tensor"):
        flce(x, whole, t)
    assert_close(flce(x, whole.full_tensor(), t), flce(x, w, t))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
