"""Fused linear generalized Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

With student and teacher logits over the same vocabulary, each divided by the temperature, Q = softmax(student),
P = softmax(teacher), and M = beta * P + (1 - beta) * Q (Agarwal et al. 2024, "On-Policy Distillation of Language
Models", equation 1):

    loss = beta * KL(P || M) + (1 - beta) * KL(Q || M)        for 0 < beta < 1
    loss = KL(P || Q) for beta = 0,  KL(Q || P) for beta = 1

The ends are other functions, not limits: the interior tends to 0 like beta * KL(P || Q). The gradient with respect to
student logit j, before the chain through temperature and softcap, is

    (1 - beta) * Q_j * (log(Q_j / M_j) - KL(Q || M));   Q_j - P_j for beta = 0;   beta = 1 is the first with M = P

There is no factor of temperature^2: Hinton et al. (2015) scale by it to balance a mix with a hard-label loss, and only
the caller knows whether there is such a mix. The teacher gets no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.labels import counted
from headmux.contract import Pairs
from headmux.ops import _checks, _reduction
from headmux.ops._op import Op, Output, Request, flattened, logits


@dataclass(frozen=True)
class JSDArgs:
    """What a backend's kernels get. Tensors are flattened over tokens and checked; none may be written.

    Attributes:
        student_input: [N, H] hidden states, any strides. Rows of ignored tokens may hold anything, NaN included.
        student_weight: [V, H], any strides.
        student_bias: [V] or None.
        teacher_input: [N, H_teacher], likewise.
        teacher_weight: [V, H_teacher].
        teacher_bias: [V] or None.
        target: [N] int64 or None. Only compared with ``ignore_index``, never an index.
        row_scale: [N], for a reduced loss: what each token's loss is multiplied with before the sum, 0 where ignored.
            None if losses stay per token. The kernel returns unscaled losses either way; it may use the scale to form
            gradients in the forward.
        compute_dtype: dtype of the student's matrix products' operands. Differs from ``student_input.dtype`` only
            under autocast; gradients keep the dtypes of the tensors they belong to.
        teacher_compute_dtype: The same for the teacher.
        needs: Whether the gradients of the student's input, weight and bias are wanted.
        max_valid_tokens: Never seen by a kernel: tokens are left out before.

    The other options are those of ``jsd``. Outputs: (loss [N],), exactly 0 where ignored.
    """

    student_input: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    teacher_input: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    target: Tensor | None
    row_scale: Tensor | None
    compute_dtype: torch.dtype
    teacher_compute_dtype: torch.dtype
    needs: tuple[bool, ...] = (False, False, False)
    beta: float = 0.5
    temperature: float = 1.0
    ignore_index: int = -100
    student_logit_scale: float = 1.0
    student_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_softcap: float | None = None
    accum_dtype: torch.dtype | None = None
    max_valid_tokens: int | None = None


class JSD(Op):
    """``jsd(student_input, student_weight, teacher_input, teacher_weight, target=None, ...)``: distillation loss.

    Args:
        student_input: [..., H] hidden states: float32, bfloat16, float16 or float64.
        student_weight: [V, H], of the same dtype unless autocast is on.
        teacher_input: [..., H_teacher] with the same leading shape; the hidden size may differ.
        teacher_weight: [V, H_teacher], of the dtype of ``teacher_input``; the vocabulary may not differ.
        target: [...] integer labels, only to tell the tokens that count from ``ignore_index``; None if all count.
        student_bias: [V], in fp32 or the dtype of the weight.
        teacher_bias: [V], likewise.
        beta: Weight of the teacher in the mixture, in [0, 1]. 0 is KL(teacher || student), 1 KL(student || teacher).
        temperature: Number above 0 that divides both models' logits. No factor of temperature^2 is applied.
        ignore_index: Label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``.
        num_items: Divisor of the mean instead, a number or a 0-dim tensor on any device.
        student_logit_scale: Factor of the student's logits, not 0.
        student_softcap: Bound c of the student's logits, ``c * tanh(z / c)``, above 0.
        teacher_logit_scale: The same for the teacher.
        teacher_softcap: The same for the teacher.
        accum_dtype: ``torch.float32`` sums weight gradients over chunks of tokens in fp32 and rounds once; None may
            round once a chunk, to the parameter's dtype.
        max_valid_tokens: An upper bound, at least 1, of how many tokens have a target other than ``ignore_index``, for
            a caller who knows one on the host, such as a data collator; needs a ``target``. Only so many tokens are
            computed, which saves the others' time without waiting for the device. On the CPU ignored tokens are left
            out anyway.
        impl: Comma list of backends to try in order; one name is strict.

    Returns:
        The loss in fp32 (fp64 for fp64 students), 0-dim or shaped like the leading dimensions for ``"none"``. A mean
        over no token is 0.0 with zero gradients. Gradients reach the student only; a teacher that requires one gets
        none.

    Raises:
        TypeError: Wrong type or dtype, or an unknown keyword.
        ValueError: Wrong shape, device or option, vocabularies that differ, or, on the CPU or under
            ``HEADMUX_CHECK=1``, more tokens that count than ``max_valid_tokens`` (otherwise those left out, and all
            gradients, become NaN).
        UnknownNameError: ``impl`` or the environment names no backend.
        UnsupportedCallError: No allowed backend runs this call.
    """

    name = "jsd"
    args_type = JSDArgs
    gradients = ("student_input", "student_weight", "student_bias")
    outputs = (Output("loss"),)
    shapes: ClassVar = {
        "student_input": ("N", "H"),
        "student_weight": ("V", "H"),
        "teacher_input": ("N", "H_teacher"),
        "teacher_weight": ("V", "H_teacher"),
        "target": ("N",),
        "student_bias": ("V",),
        "teacher_bias": ("V",),
        "num_items": (),
    }
    token_fields = ("student_input", "teacher_input", "target", "row_scale")

    def __call__(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        found: Tensor = self._call(
            student_input, student_weight, teacher_input, teacher_weight, target, student_bias, teacher_bias, **options
        )
        return found

    def request(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        num_items: float | Tensor | None = None,
        student_logit_scale: float = 1.0,
        student_softcap: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_softcap: float | None = None,
        accum_dtype: torch.dtype | None = None,
        max_valid_tokens: int | None = None,
    ) -> Request:
        student_input = _checks.hidden("student_input", student_input)
        student_weight = _checks.vocabulary("student_weight", student_weight, "student_input", student_input)
        compute = _checks.compute_dtype("student_input", student_input, "student_weight", student_weight)
        teacher_input = _checks.hidden("teacher_input", teacher_input, student_input)
        teacher_weight = _checks.vocabulary("teacher_weight", teacher_weight, "teacher_input", teacher_input)
        teacher_compute = _checks.compute_dtype("teacher_input", teacher_input, "teacher_weight", teacher_weight)
        if teacher_input.shape[:-1] != student_input.shape[:-1]:
            raise ValueError(
                f"teacher_input has shape {tuple(teacher_input.shape)} and student_input {tuple(student_input.shape)}: "
                "all but the last dimension must be equal"
            )
        if teacher_weight.shape[0] != student_weight.shape[0]:
            raise ValueError(
                f"the vocabularies differ: student_weight has shape {tuple(student_weight.shape)}, teacher_weight "
                f"{tuple(teacher_weight.shape)}; cut or map the weights to the common tokens first"
            )
        if student_bias is not None:
            _checks.vector("student_bias", student_bias, "student_weight", student_weight, compute)
        if teacher_bias is not None:
            _checks.vector("teacher_bias", teacher_bias, "teacher_weight", teacher_weight, teacher_compute)
            teacher_bias = teacher_bias.detach()
        _reduction.check(reduction, num_items)
        ignore_index = _checks.integer("ignore_index", ignore_index)
        labels = None if target is None else _checks.target(target, student_input)
        max_valid_tokens = _checks.most_tokens("max_valid_tokens", max_valid_tokens)
        if max_valid_tokens is not None and labels is None:
            raise ValueError(f"max_valid_tokens={max_valid_tokens} needs a target: without one every token counts")
        shape = student_input.shape[:-1]
        states = flattened(student_input)
        valid = states.new_ones(states.shape[:1], dtype=torch.bool) if labels is None else labels != ignore_index
        args = JSDArgs(
            student_input=states,
            student_weight=student_weight,
            student_bias=student_bias,
            teacher_input=flattened(teacher_input.detach()),
            teacher_weight=teacher_weight.detach(),
            teacher_bias=teacher_bias,
            target=labels,
            row_scale=_reduction.row_scale(reduction, valid, wide_dtype(compute), num_items=num_items),
            compute_dtype=compute,
            teacher_compute_dtype=teacher_compute,
            beta=_checks.number("beta", beta, low=0.0, high=1.0),
            temperature=_checks.number("temperature", temperature, low=0.0, open_low=True),
            ignore_index=ignore_index,
            student_logit_scale=_checks.nonzero("student_logit_scale", student_logit_scale),
            student_softcap=_checks.softcap("student_softcap", student_softcap),
            teacher_logit_scale=_checks.nonzero("teacher_logit_scale", teacher_logit_scale),
            teacher_softcap=_checks.softcap("teacher_softcap", teacher_softcap),
            accum_dtype=_checks.accumulation(accum_dtype),
            max_valid_tokens=max_valid_tokens,
        )

        def finish(outputs: tuple[Tensor | None, ...]) -> Tensor:
            (loss,) = outputs
            assert loss is not None
            return loss if args.row_scale is not None else loss.reshape(shape)

        return Request(args, finish)

    def valid(self, args: JSDArgs) -> Tensor | None:
        return None if args.target is None else args.target != args.ignore_index

    def sizes(self, args: JSDArgs) -> Pairs:
        n, h = args.student_input.shape
        return (("N", n), ("H", h), ("H_teacher", args.teacher_input.shape[1]), ("V", args.student_weight.shape[0]))

    def rows(self, args: JSDArgs) -> tuple[Tensor | None, ...]:
        valid = self.valid(args)
        student = logits(
            counted(args.student_input, valid), args.student_weight, args.student_bias, args.compute_dtype,
            logit_scale=args.student_logit_scale, softcap=args.student_softcap, temperature=args.temperature,
        )
        teacher = logits(
            counted(args.teacher_input, valid), args.teacher_weight, args.teacher_bias, args.teacher_compute_dtype,
            logit_scale=args.teacher_logit_scale, softcap=args.teacher_softcap, temperature=args.temperature,
        )
        q = torch.log_softmax(student, dim=1)
        p = torch.log_softmax(teacher.to(student.dtype), dim=1)
        if args.beta == 0.0:
            loss = _kl(p, q)
        elif args.beta == 1.0:
            loss = _kl(q, p)
        else:
            m = torch.logaddexp(p + math.log(args.beta), q + math.log1p(-args.beta))
            loss = args.beta * _kl(p, m) + (1 - args.beta) * _kl(q, m)
        return (loss if valid is None else torch.where(valid, loss, 0.0),)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(1)


jsd = JSD()
