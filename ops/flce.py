"""Fused linear cross entropy: the loss of ``input @ weight.T`` against labels, without holding the logits.

For a token with label y, logits z (after ``logits`` in headmux.ops._op), p = softmax(z), lse = logsumexp(z), class
weights w (1 without ``ce_weight``), label smoothing e over V classes:

    nll_j = lse - z_j
    loss  = (1 - e) * w_y * nll_y  +  e / V * sum_j w_j * nll_j  +  lse_square_scale * lse^2

the first two terms as ``torch.nn.functional.cross_entropy`` defines them, the last the z-loss of PaLM (Chowdhery et al.
2022, section 5), which class weights do not touch. Its gradient with respect to z_j is

    p_j * (a + 2 * lse_square_scale * lse)  -  (1 - e) * w_y * [j = y]  -  e / V * w_j,
    a = (1 - e) * w_y + e / V * sum_j w_j

A token whose label is ``ignore_index`` contributes exactly 0 to the loss and to every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor

from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.labels import counted
from headmux.contract import Pairs
from headmux.ops import _autograd, _checks, _reduction
from headmux.ops._op import Op, Output, Request, flattened, logits


@dataclass(frozen=True)
class FLCEArgs:
    """What a backend's kernels get. Tensors are flattened over tokens and checked; none may be written.

    Attributes:
        input: [N, H] hidden states, any strides. Rows of ignored tokens may hold anything, NaN included.
        weight: [V, H], any strides.
        bias: [V] or None.
        target: [N] int64. Values outside [0, V) other than ``ignore_index`` must give NaN, never a finite number, and
            must never be used as an index.
        ce_weight: [V] class weights in fp32 (fp64 for fp64 inputs), or None.
        row_scale: [N], for a reduced loss: what each token's loss is multiplied with before the sum, 0 where ignored.
            None if losses stay per token. The kernel returns unscaled losses either way; it may use the scale to form
            gradients in the forward.
        compute_dtype: dtype of the matrix products' operands. Differs from ``input.dtype`` only under autocast;
            gradients keep the dtypes of the tensors they belong to.
        needs: Whether the gradients of input, weight and bias are wanted.
        return_z_loss: Return ``lse_square_scale * lse^2`` per token as the second output.
        max_valid_tokens: Never seen by a kernel: tokens are left out before.
        return_predicted: Return the index of the largest logit per token (int64, the first of equals, -1 where ignored)
            as the third output.

    The other options are those of ``flce``. Outputs: (loss [N], z_loss [N] or None, predicted [N] or None).
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    ce_weight: Tensor | None
    row_scale: Tensor | None
    compute_dtype: torch.dtype
    needs: tuple[bool, ...] = (False, False, False)
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    use_token_scaling: bool = False
    accum_dtype: torch.dtype | None = None
    return_z_loss: bool = False
    return_predicted: bool = False
    max_valid_tokens: int | None = None


class FLCEOutput(NamedTuple):
    """The loss and what was asked for beside it; None for the rest. Only ``loss`` is differentiable.

    Attributes:
        loss: 0-dim, or shaped like ``target`` for ``reduction="none"``. It includes the z-loss.
        z_loss: The z-loss part, reduced like the loss.
        token_accuracy: Share of the tokens that count whose largest logit is at the label (0.0 if none counts); for
            ``reduction="none"`` 1.0 or 0.0 per token.
        predicted_tokens: Index of the largest logit, shaped like ``target``, -1 where ignored.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class FLCE(Op):
    """``flce(input, weight, target, bias=None, *, ...)``: cross entropy of a linear layer, without the [N, V] logits.

    Args:
        input: [..., H] hidden states: float32, bfloat16, float16 or float64.
        weight: [V, H], of the same dtype unless autocast is on.
        target: [...] integer labels in [0, V), or ``ignore_index``.
        bias: [V], in fp32 or the dtype of the weight.
        ce_weight: [V] weight of each class, as ``weight`` of ``F.cross_entropy``.
        ignore_index: Label of tokens that do not count.
        lse_square_scale: Factor of the z-loss, at least 0.
        label_smoothing: Share of the target probability spread over all classes, in [0, 1].
        reduction: ``"mean"`` over the tokens that count (weighted by ``ce_weight``), ``"sum"``, or ``"none"``.
        num_items: Divisor of the mean instead, a number or a 0-dim tensor on any device: under gradient accumulation,
            the number of tokens of the whole batch.
        logit_scale: Factor of the logits, not 0.
        softcap: Bound c of the logits, ``c * tanh(z / c)``, above 0.
        accum_dtype: ``torch.float32`` sums weight gradients over chunks of tokens in fp32 and rounds once; None may
            round once a chunk, to the parameter's dtype.
        use_token_scaling: Multiply each token's loss by its label's probability, taken as a constant.
        token_weight: [...] factor of each token's loss. It does not change the mean's divisor. Differentiable.
        max_valid_tokens: An upper bound, at least 1, of how many tokens have a target other than ``ignore_index``, for
            a caller who knows one on the host, such as a data collator. Only so many tokens are computed, which saves
            the others' time without waiting for the device. On the CPU ignored tokens are left out anyway.
        return_z_loss: Return the z-loss too.
        return_token_accuracy: Return the accuracy too.
        return_predicted_tokens: Return the predicted tokens too.
        impl: Comma list of backends to try in order; one name is strict.

    Returns:
        The loss, in fp32 (fp64 for fp64 inputs), or ``FLCEOutput`` when any ``return_*`` is set. A mean over no token
        is 0.0 with zero gradients.

    Raises:
        TypeError: Wrong type or dtype, or an unknown keyword.
        ValueError: Wrong shape, device, option, or, on the CPU or under ``HEADMUX_CHECK=1``, a label out of range
            (otherwise the token becomes NaN) or more tokens that count than ``max_valid_tokens`` (otherwise those left
            out, and all gradients, become NaN).
        UnknownNameError: ``impl`` or the environment names no backend.
        UnsupportedCallError: No allowed backend runs this call.
    """

    name = "flce"
    args_type = FLCEArgs
    gradients = ("input", "weight", "bias")
    outputs = (
        Output("loss"),
        Output("z_loss", differentiable=False),
        Output("predicted", differentiable=False, reduced=False, integer=True),
    )
    shapes: ClassVar = {
        "input": ("N", "H"),
        "weight": ("V", "H"),
        "target": ("N",),
        "bias": ("V",),
        "ce_weight": ("V",),
        "token_weight": ("N",),
        "num_items": (),
    }
    token_fields = ("input", "target", "row_scale")

    @overload
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        *,
        ce_weight: Tensor | None = ...,
        ignore_index: int = ...,
        lse_square_scale: float = ...,
        label_smoothing: float = ...,
        reduction: str = ...,
        num_items: float | Tensor | None = ...,
        logit_scale: float = ...,
        softcap: float | None = ...,
        accum_dtype: torch.dtype | None = ...,
        use_token_scaling: bool = ...,
        token_weight: Tensor | None = ...,
        max_valid_tokens: int | None = ...,
        return_z_loss: Literal[False] = ...,
        return_token_accuracy: Literal[False] = ...,
        return_predicted_tokens: Literal[False] = ...,
        impl: str | None = ...,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        *,
        ce_weight: Tensor | None = ...,
        ignore_index: int = ...,
        lse_square_scale: float = ...,
        label_smoothing: float = ...,
        reduction: str = ...,
        num_items: float | Tensor | None = ...,
        logit_scale: float = ...,
        softcap: float | None = ...,
        accum_dtype: torch.dtype | None = ...,
        use_token_scaling: bool = ...,
        token_weight: Tensor | None = ...,
        max_valid_tokens: int | None = ...,
        return_z_loss: bool = ...,
        return_token_accuracy: bool = ...,
        return_predicted_tokens: bool = ...,
        impl: str | None = ...,
    ) -> Tensor | FLCEOutput: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def request(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        num_items: float | Tensor | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        token_weight: Tensor | None = None,
        max_valid_tokens: int | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Request:
        input = _checks.hidden("input", input)
        weight = _checks.vocabulary("weight", weight, "input", input)
        compute = _checks.compute_dtype("input", input, "weight", weight)
        labels = _checks.target(target, input)
        wide = wide_dtype(compute)
        if bias is not None:
            _checks.vector("bias", bias, "weight", weight, compute)
        if ce_weight is not None:
            ce_weight = _checks.vector("ce_weight", ce_weight, "weight", weight, compute)
            _checks.no_gradient("ce_weight", ce_weight)
            ce_weight = ce_weight.to(wide).contiguous()
        if token_weight is not None:
            token_weight = _checks.floating("token_weight", token_weight, input)
            if token_weight.shape != input.shape[:-1]:
                raise ValueError(
                    f"token_weight has shape {tuple(token_weight.shape)}, but an input of shape {tuple(input.shape)} "
                    f"needs {tuple(input.shape[:-1])}"
                )
            token_weight = token_weight.reshape(-1)
        _reduction.check(reduction, num_items)
        ignore_index = _checks.integer("ignore_index", ignore_index)
        metrics = _checks.flag("return_token_accuracy", return_token_accuracy)
        predicted = _checks.flag("return_predicted_tokens", return_predicted_tokens)

        valid = labels != ignore_index
        # a gradient of token_weight needs the losses per token: then the sum over tokens is left to autograd
        outside = token_weight is not None and _differentiated(token_weight)
        label_weight = None if ce_weight is None else ce_weight[labels.clamp(0, weight.shape[0] - 1)]
        scale = _reduction.row_scale(
            reduction,
            valid,
            wide,
            label_weight=label_weight,
            token_weight=None if outside else token_weight,
            num_items=num_items,
        )
        args = FLCEArgs(
            input=flattened(input),
            weight=weight,
            bias=bias,
            target=labels,
            ce_weight=ce_weight,
            row_scale=None if outside else scale,
            compute_dtype=compute,
            ignore_index=ignore_index,
            lse_square_scale=_checks.number("lse_square_scale", lse_square_scale, low=0.0),
            label_smoothing=_checks.number("label_smoothing", label_smoothing, low=0.0, high=1.0),
            logit_scale=_checks.nonzero("logit_scale", logit_scale),
            softcap=_checks.softcap("softcap", softcap),
            use_token_scaling=_checks.flag("use_token_scaling", use_token_scaling),
            accum_dtype=_checks.accumulation(accum_dtype),
            return_z_loss=_checks.flag("return_z_loss", return_z_loss),
            return_predicted=metrics or predicted,
            max_valid_tokens=_checks.most_tokens("max_valid_tokens", max_valid_tokens),
        )
        shape = target.shape

        def finish(outputs: tuple[Tensor | None, ...]) -> Tensor | FLCEOutput:
            loss, z_loss, best = outputs
            assert loss is not None
            if args.row_scale is None:
                loss, z_loss = [
                    r if r is None else _per_token(r, valid, token_weight, scale, shape) for r in (loss, z_loss)
                ]
            assert loss is not None
            if not (return_z_loss or metrics or predicted):
                return loss
            return FLCEOutput(
                loss,
                None if z_loss is None else z_loss.detach(),
                _accuracy(best, labels, valid, reduction, wide, shape) if metrics and best is not None else None,
                best.reshape(shape) if predicted and best is not None else None,
            )

        return Request(args, finish)

    def present(self, args: FLCEArgs) -> tuple[bool, ...]:
        return (True, args.return_z_loss, args.return_predicted)

    def valid(self, args: FLCEArgs) -> Tensor:
        return args.target != args.ignore_index

    def sizes(self, args: FLCEArgs) -> Pairs:
        return (("N", args.input.shape[0]), ("H", args.input.shape[1]), ("V", args.weight.shape[0]))

    def check_values(self, args: FLCEArgs) -> None:
        super().check_values(args)
        _checks.labels_in_range(args.target, args.ignore_index, args.weight.shape[0])

    def rows(self, args: FLCEArgs) -> tuple[Tensor | None, ...]:
        valid = self.valid(args)
        classes = args.weight.shape[0]
        z = logits(counted(args.input, valid), args.weight, args.bias, args.compute_dtype,
                   logit_scale=args.logit_scale, softcap=args.softcap)
        label = args.target.clamp(0, classes - 1)
        lse = torch.logsumexp(z, dim=1)
        nll = lse - z.gather(1, label[:, None])[:, 0]
        loss = nll if args.ce_weight is None else nll * args.ce_weight[label]
        if args.label_smoothing:
            every = lse * classes - z.sum(1) if args.ce_weight is None else ((lse[:, None] - z) * args.ce_weight).sum(1)
            loss = (1 - args.label_smoothing) * loss + args.label_smoothing / classes * every
        z_loss = args.lse_square_scale * lse * lse
        loss = loss + z_loss
        if args.use_token_scaling:
            p = torch.exp(-nll).detach()
            loss, z_loss = loss * p, z_loss * p
        bad = (args.target != label) & valid
        loss, z_loss = (torch.where(valid, torch.where(bad, torch.nan, r), 0.0) for r in (loss, z_loss))
        return (
            loss,
            z_loss if args.return_z_loss else None,
            torch.where(valid, z.argmax(1), -1) if args.return_predicted else None,
        )


def _differentiated(weight: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return weight.requires_grad and torch.is_grad_enabled()
    return _autograd.transformed() or (weight.requires_grad and torch.is_grad_enabled())


def _per_token(
    rows: Tensor, valid: Tensor, token_weight: Tensor | None, scale: Tensor | None, shape: torch.Size
) -> Tensor:
    if token_weight is not None:
        rows = torch.where(valid, rows * token_weight.to(rows.dtype), 0.0)
    return rows.reshape(shape) if scale is None else (rows * scale).sum()


def _accuracy(
    best: Tensor, labels: Tensor, valid: Tensor, reduction: str, dtype: torch.dtype, shape: torch.Size
) -> Tensor:
    hit = ((best == labels) & valid).to(dtype)
    hit = torch.where((best < 0) & valid, torch.nan, hit)  # left out by max_valid_tokens, though it counts
    return hit.reshape(shape) if reduction == "none" else hit.sum() / valid.sum().clamp(min=1)


flce = FLCE()
