"""Log-probability of the selected token under a linear head, without holding the logits.

With z the logits divided by the temperature and lse = logsumexp(z):

    logp    = z_y - lse
    entropy = lse - sum_j softmax(z)_j * z_j

and their gradients with respect to z_j, with p = softmax(z):

    d logp    = [j = y] - p_j
    d entropy = -p_j * (log p_j + entropy)
    d lse     = p_j

``logp[i]`` belongs to ``target[i]``: nothing is shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor

from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.labels import counted
from headmux.contract import Pairs
from headmux.ops import _checks
from headmux.ops._op import Op, Output, Request, flattened, logits


@dataclass(frozen=True)
class LinearLogpArgs:
    """What a backend's kernels get. Tensors are flattened over tokens and checked; none may be written.

    Attributes:
        input: [N, H] hidden states, any strides. Rows of ignored tokens may hold anything, NaN included.
        weight: [V, H], any strides.
        bias: [V] or None.
        target: [N] int64. Values outside [0, V) other than ``ignore_index`` must give NaN, never a finite number, and
            must never be used as an index.
        token_temperature: [N] in fp32 (fp64 for fp64 inputs), or None for ``temperature``. NaN where it is not a
            number above 0 (checked on the CPU).
        compute_dtype: dtype of the matrix products' operands. Differs from ``input.dtype`` only under autocast;
            gradients keep the dtypes of the tensors they belong to.
        needs: Whether the gradients of input, weight and bias are wanted.
        max_valid_tokens: Never seen by a kernel: tokens are left out before.

    The other options are those of ``linear_logp``. Outputs: (logp [N], entropy [N] or None, lse [N] or None), each
    exactly 0 where ignored.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    token_temperature: Tensor | None
    compute_dtype: torch.dtype
    needs: tuple[bool, ...] = (False, False, False)
    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    ignore_index: int | None = None
    accum_dtype: torch.dtype | None = None
    return_entropy: bool = False
    return_lse: bool = False
    max_valid_tokens: int | None = None


class LogpOutput(NamedTuple):
    """Log-probabilities and what was asked for beside them, shaped like ``target``, all differentiable.

    Attributes:
        logp: Log-probability of each token.
        entropy: Entropy of the distribution over the vocabulary, in nats.
        lse: logsumexp of the logits (divided by the temperature).
    """

    logp: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None


class LinearLogp(Op):
    """``linear_logp(input, weight, target, bias=None, *, ...)``: log-probability of each target token.

    Args:
        input: [..., H] hidden states: float32, bfloat16, float16 or float64.
        weight: [V, H], of the same dtype unless autocast is on.
        target: [...] integer tokens in [0, V), or ``ignore_index``.
        bias: [V], in fp32 or the dtype of the weight.
        temperature: Number above 0, or a tensor of them that broadcasts to the shape of ``target``. Not differentiable.
        logit_scale: Factor of the logits, not 0.
        softcap: Bound c of the logits, ``c * tanh(z / c)``, above 0, before the temperature.
        ignore_index: Target of tokens that do not count, or None. Their outputs are exactly 0.
        max_valid_tokens: An upper bound, at least 1, of how many tokens have a target other than ``ignore_index``, for
            a caller who knows one on the host, such as a data collator; needs an ``ignore_index``. Only so many tokens
            are computed, which saves the others' time without waiting for the device. On the CPU ignored tokens are
            left out anyway.
        return_entropy: Return the entropy too.
        return_lse: Return the logsumexp too.
        accum_dtype: ``torch.float32`` sums weight gradients over chunks of tokens in fp32 and rounds once; None may
            round once a chunk, to the parameter's dtype.
        impl: Comma list of backends to try in order; one name is strict.

    Returns:
        ``logp`` shaped like ``target`` in fp32 (fp64 for fp64 inputs), or ``LogpOutput`` when any ``return_*`` is set.

    Raises:
        TypeError: Wrong type or dtype, or an unknown keyword.
        ValueError: Wrong shape, device, option, or, on the CPU or under ``HEADMUX_CHECK=1``, a target or temperature
            out of range (otherwise the token becomes NaN) or more tokens that count than ``max_valid_tokens``
            (otherwise those left out, and all gradients, become NaN).
        UnknownNameError: ``impl`` or the environment names no backend.
        UnsupportedCallError: No allowed backend runs this call.
    """

    name = "linear_logp"
    args_type = LinearLogpArgs
    gradients = ("input", "weight", "bias")
    outputs = (Output("logp", reduced=False), Output("entropy", reduced=False), Output("lse", reduced=False))
    shapes: ClassVar = {
        "input": ("N", "H"),
        "weight": ("V", "H"),
        "target": ("N",),
        "bias": ("V",),
        "temperature": ("N",),
    }
    token_fields = ("input", "target", "token_temperature")

    @overload
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        *,
        temperature: float | Tensor = ...,
        logit_scale: float = ...,
        softcap: float | None = ...,
        ignore_index: int | None = ...,
        max_valid_tokens: int | None = ...,
        return_entropy: Literal[False] = ...,
        return_lse: Literal[False] = ...,
        accum_dtype: torch.dtype | None = ...,
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
        temperature: float | Tensor = ...,
        logit_scale: float = ...,
        softcap: float | None = ...,
        ignore_index: int | None = ...,
        max_valid_tokens: int | None = ...,
        return_entropy: bool = ...,
        return_lse: bool = ...,
        accum_dtype: torch.dtype | None = ...,
        impl: str | None = ...,
    ) -> Tensor | LogpOutput: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def request(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        ignore_index: int | None = None,
        max_valid_tokens: int | None = None,
        return_entropy: bool = False,
        return_lse: bool = False,
        accum_dtype: torch.dtype | None = None,
    ) -> Request:
        input = _checks.hidden("input", input)
        weight = _checks.vocabulary("weight", weight, "input", input)
        compute = _checks.compute_dtype("input", input, "weight", weight)
        labels = _checks.target(target, input)
        if bias is not None:
            _checks.vector("bias", bias, "weight", weight, compute)
        per_token = None
        if isinstance(temperature, Tensor):
            per_token = _token_temperature(temperature, input, target.shape, wide_dtype(compute))
        max_valid_tokens = _checks.most_tokens("max_valid_tokens", max_valid_tokens)
        if max_valid_tokens is not None and ignore_index is None:
            raise ValueError(
                f"max_valid_tokens={max_valid_tokens} needs an ignore_index: without one every token counts"
            )
        args = LinearLogpArgs(
            input=flattened(input),
            weight=weight,
            bias=bias,
            target=labels,
            token_temperature=per_token,
            compute_dtype=compute,
            temperature=1.0 if per_token is not None else _checks.number(
                "temperature", temperature, low=0.0, open_low=True),
            logit_scale=_checks.nonzero("logit_scale", logit_scale),
            softcap=_checks.softcap("softcap", softcap),
            ignore_index=None if ignore_index is None else _checks.integer("ignore_index", ignore_index),
            accum_dtype=_checks.accumulation(accum_dtype),
            return_entropy=_checks.flag("return_entropy", return_entropy),
            return_lse=_checks.flag("return_lse", return_lse),
            max_valid_tokens=max_valid_tokens,
        )
        shape = target.shape

        def finish(outputs: tuple[Tensor | None, ...]) -> Tensor | LogpOutput:
            logp, entropy, lse = (None if o is None else o.reshape(shape) for o in outputs)
            assert logp is not None
            return LogpOutput(logp, entropy, lse) if return_entropy or return_lse else logp

        return Request(args, finish)

    def present(self, args: LinearLogpArgs) -> tuple[bool, ...]:
        return (True, args.return_entropy, args.return_lse)

    def valid(self, args: LinearLogpArgs) -> Tensor | None:
        return None if args.ignore_index is None else args.target != args.ignore_index

    def sizes(self, args: LinearLogpArgs) -> Pairs:
        return (("N", args.input.shape[0]), ("H", args.input.shape[1]), ("V", args.weight.shape[0]))

    def check_values(self, args: LinearLogpArgs) -> None:
        super().check_values(args)
        _checks.labels_in_range(args.target, args.ignore_index, args.weight.shape[0])
        if args.token_temperature is not None:
            _checks.temperatures_in_range(args.token_temperature, self.valid(args))

    def rows(self, args: LinearLogpArgs) -> tuple[Tensor | None, ...]:
        valid = self.valid(args)
        temperature: float | Tensor = args.temperature
        if args.token_temperature is not None:
            temperature = args.token_temperature
            if valid is not None:
                temperature = torch.where(valid, temperature, 1.0)
        z = logits(counted(args.input, valid), args.weight, args.bias, args.compute_dtype,
                   logit_scale=args.logit_scale, softcap=args.softcap, temperature=temperature)
        label = args.target.clamp(0, args.weight.shape[0] - 1)
        logp = torch.log_softmax(z, dim=1)
        selected = torch.where(args.target == label, logp.gather(1, label[:, None])[:, 0], torch.nan)
        entropy = -(logp.exp() * logp).sum(1) if args.return_entropy else None
        lse = torch.logsumexp(z, dim=1) if args.return_lse else None
        return tuple(
            o if o is None or valid is None else torch.where(valid, o, 0.0) for o in (selected, entropy, lse)
        )


def _token_temperature(value: Tensor, states: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    checked = _checks.floating("temperature", value, states)
    _checks.no_gradient("temperature", checked)
    try:
        full = checked.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"temperature has shape {tuple(checked.shape)}, which does not broadcast to target's {tuple(shape)}"
        ) from error
    flat = full.detach().reshape(-1).to(dtype)
    if flat.device.type == "cpu":
        return flat
    return torch.where(torch.isfinite(flat) & (flat > 0), flat, torch.nan)


linear_logp = LinearLogp()
