"""A backend for headmux in one file: fp32 flce in plain PyTorch, a few tokens at a time.

It runs what it declares and refuses the rest with reasons. ``pip install examples/chunked`` makes it known by the entry
point in setup.cfg; then ``HEADMUX_IMPL=chunked`` or ``impl="chunked"`` uses it, and
``python -m headmux.testing --backend chunked --require chunked`` shows that it keeps the contract.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headmux.backends.common.budget import budget_for
from headmux.contract import Backend, Kernel, Upstream
from headmux.ops.flce import FLCEArgs
from headmux.requirements import device, dtypes, option


def chunks(args: FLCEArgs) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Tokens, hidden states (0 where ignored), logits [n, V], safe labels, and which labels are out of range."""
    tokens, classes = args.input.shape[0], args.weight.shape[0]
    size = max(1, budget_for(args.input.device.type) // (4 * 4 * classes))  # four fp32 copies of a chunk's logits
    for start in range(0, tokens, size):
        rows = slice(start, start + size)
        valid = args.target[rows] != args.ignore_index
        x = torch.where(valid[:, None], args.input[rows], 0)
        z = x @ args.weight.T
        if args.bias is not None:
            z += args.bias
        label = args.target[rows].clamp(0, classes - 1)
        yield rows, x, z, label, valid & (label != args.target[rows])


def forward(args: FLCEArgs) -> tuple[tuple[Tensor | None, ...], None]:
    """Losses per token, exactly 0 where ignored and NaN where the label is out of range; nothing is kept."""
    loss = args.input.new_empty(args.input.shape[0])
    for rows, _, z, label, bad in chunks(args):
        nll = torch.logsumexp(z, 1) - z.gather(1, label[:, None])[:, 0]
        if args.ce_weight is not None:
            nll *= args.ce_weight[label]
        valid = args.target[rows] != args.ignore_index
        loss[rows] = torch.where(valid, torch.where(bad, torch.nan, nll), 0)
    return (loss, None, None), None


def backward(args: FLCEArgs, residual: None, upstream: Upstream) -> tuple[Tensor | None, ...]:
    """The gradients in ``args.needs``, from logits formed again."""
    need_input, need_weight, need_bias = args.needs
    g = upstream.rows[0]
    assert g is not None
    grad_input = torch.empty_like(args.input, memory_format=torch.contiguous_format) if need_input else None
    grad_weight = torch.zeros(args.weight.shape, device=g.device) if need_weight else None
    grad_bias = torch.zeros(args.weight.shape[0], device=g.device) if need_bias else None
    for rows, x, z, label, bad in chunks(args):
        d = torch.softmax(z, 1)
        d.scatter_add_(1, label[:, None], torch.full_like(d[:, :1], -1))
        scale = torch.where(bad, torch.nan, g[rows])
        d *= (scale if args.ce_weight is None else scale * args.ce_weight[label])[:, None]
        if grad_input is not None:
            grad_input[rows] = d @ args.weight
        if grad_weight is not None:
            grad_weight.addmm_(d.T, x)
        if grad_bias is not None:
            grad_bias += d.sum(0)
    return grad_input, grad_weight, grad_bias


plain = (option("softcap", None), option("label_smoothing", 0.0), option("lse_square_scale", 0.0))
plain += (option("logit_scale", 1.0), option("use_token_scaling", False))
plain += (option("return_z_loss", False), option("return_predicted", False))

backend = Backend(
    "chunked",
    {"flce": Kernel(forward, backward, plain)},
    requires=(device("cpu", "cuda"), dtypes(torch.float32, role="input"), dtypes(torch.float32)),
)
