"""The one place where kernels meet autograd, torch.compile and torch.func.

Two ways lead to a backend. Eager calls go through two ``autograd.Function``s, the op and its gradient, whose
second-order and forward-mode rules are those of the plain PyTorch reference. Under ``torch.compile``, ``torch.export``,
and for fake and meta tensors the call is one opaque ``torch.library.custom_op``. Selection happens inside either body,
so a change of the environment needs no recompile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_legacy_batchedtensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from headmux.backends.common import budget
from headmux.backends.common.gemm import wide_dtype
from headmux.contract import Kernel, Upstream
from headmux.ops import _picked, _reduction

if TYPE_CHECKING:
    from headmux.ops._op import Op
    from headmux.ops._picked import Picked

Tensors = tuple["Tensor | None", ...]


def apply(op: Op, args: Any, impl: str | None) -> Tensors:
    """Run an op on checked arguments: its outputs in order, reduced where it reduces, None where not asked for."""
    args = with_needs(op, args)
    first = getattr(args, op.tensor_fields[0])
    flat = [getattr(args, f) for f in (*op.tensor_fields, *op.static_fields)]
    if torch.compiler.is_compiling() or first.is_meta or isinstance(first, FakeTensor):
        found = op.raw(*flat, impl or "")
    elif any(args.needs) or transformed():
        found = _apply(_Forward, op, impl, *flat)
    else:
        found = _forward(op, args, impl)[0]
    outputs: Iterator[Tensor] = iter(found)
    every = [(out, next(outputs) if there else None) for there, out in zip(op.present(args), op.outputs, strict=True)]
    return tuple([t if t is None or out.differentiable else t.detach() for out, t in every])


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, which for torch.func inspects the signature anew in every call: 60 us."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def with_needs(op: Op, args: Any) -> Any:
    """The arguments with the gradients that autograd will ask for. An exported graph forms none ahead of its use."""
    tensors = [getattr(args, f) for f in op.gradients]
    on = torch.is_grad_enabled() and not torch.compiler.is_exporting()
    needs = tuple([on and t is not None and t.requires_grad for t in tensors])
    return dataclasses.replace(args, needs=needs) if needs != args.needs else args


def reduce_rows(op: Op, args: Any, rows: Tensors) -> Tensors:
    """Outputs per token to the op's outputs: the weighted sum over tokens where it reduces."""
    scale = _row_scale(args)
    return tuple([
        r if r is None or not out.reduced else _reduction.reduce(r, scale)
        for out, r in zip(op.outputs, rows, strict=True)
    ])


def _row_scale(args: Any) -> Tensor | None:
    return getattr(args, "row_scale", None)


class _Box:
    """What a forward leaves to its backward outside autograd's sight: the kernel, the tokens it got, its residual and
    its budget.

    The residual is given away once: kernels turn it into the gradients in place. A repeated backward makes a new one.
    """

    __slots__ = ("_inner", "_picked", "_residual", "_spent", "budget", "kernel")

    def __init__(
        self, kernel: Kernel, residual: Any, picked: Picked | None = None, inner: Any = None, *, spent: bool = False
    ) -> None:
        self.kernel = kernel
        self.budget = budget.current()
        self._residual = residual
        self._picked = picked
        # a copy of the states, which a residual holds too, but for one of gradients
        held = picked is not None and residual is not None and not isinstance(residual, tuple)
        self._inner = inner if held else None
        self._spent = spent

    def take(self, op: Op, args: Any) -> tuple[Picked | None, Any, Any]:
        """Which tokens entered, the kernel's arguments, and its residual, from the forward or, if that was given away,
        from another forward.
        """
        if self._spent:
            picked = _picked.pick(op, args)
            inner = _picked.entering(op, args, picked)
            return picked, inner, self.kernel.forward(inner)[1]
        inner, residual = self._inner, self._residual
        self._inner = self._residual = None
        self._spent = residual is not None
        if inner is None:
            return self._picked, _picked.entering(op, args, self._picked), residual
        return self._picked, dataclasses.replace(inner, needs=args.needs), residual


def _plain(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """No autocast: the op casts its operands itself."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _forward(op: Op, args: Any, impl: str | None) -> tuple[list[Tensor], _Box]:
    first = getattr(args, op.tensor_fields[0])
    op.check_values(args)
    kernel = op.select(args, impl).kernel
    with _plain(first.device), torch.no_grad():
        if first.shape[0] == 0:
            rows: Tensors = tuple(
                _empty_output(op, args, i, reduced=False) if there else None for i, there in enumerate(op.present(args))
            )
            return _given(reduce_rows(op, args, rows)), _Box(kernel, None)
        picked = _picked.pick(op, args)
        inner = _picked.entering(op, args, picked)
        rows, residual = kernel.forward(inner)
        if picked is not None:
            rows = picked.outputs(op, rows)
        outputs = _given(reduce_rows(op, args, rows))
        # views made without gradients could not be changed in place with them
        return [o.clone() if o._is_view() else o for o in outputs], _Box(kernel, residual, picked, inner)


def _backward(op: Op, args: Any, box: _Box, upstream: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of the roles in ``args.needs``; ``upstream`` has one entry for each output that is there."""
    first = getattr(args, op.tensor_fields[0])
    roles = [r for r, need in zip(op.gradients, args.needs, strict=True) if need]
    if first.shape[0] == 0 or all(g is None for g in upstream):
        return [torch.zeros_like(getattr(args, r), memory_format=torch.contiguous_format) for r in roles]
    with _plain(first.device), budget.budget_bytes(box.budget), torch.no_grad():
        picked, inner, residual = box.take(op, args)
        found = box.kernel.backward(inner, residual, _upstream(op, args, upstream, picked))
        if picked is not None:
            found = picked.gradients(op, found)
        return [g for g, need in zip(found, args.needs, strict=True) if need and g is not None]


def _upstream(op: Op, args: Any, given: Sequence[Tensor | None], picked: Picked | None) -> Upstream:
    scale, wide = _row_scale(args), wide_dtype(args.compute_dtype)
    left = iter(given)
    arrived = [next(left) if there else None for there in op.present(args)]
    arrived = [
        None if g is None or not out.differentiable else g.to(wide) for g, out in zip(arrived, op.outputs, strict=True)
    ]

    def rows() -> Tensors:
        valid = op.valid(args)
        found: list[Tensor | None] = []
        for g, out in zip(arrived, op.outputs, strict=True):
            if g is not None:
                g = scale * g if scale is not None and out.reduced else g
                g = g if valid is None else torch.where(valid, g, 0.0)
                g = g.contiguous() if picked is None else picked.rows(g)
            found.append(g)
        return tuple(found)

    reduced = [g for g, out in zip(arrived, op.outputs, strict=True) if g is not None and out.reduced]
    return Upstream(rows, reduced[-1] if scale is not None and reduced else None)


def _given(values: Tensors) -> list[Tensor]:
    return [v for v in values if v is not None]


def _empty_output(op: Op, args: Any, index: int, *, reduced: bool) -> Tensor:
    first: Tensor = getattr(args, op.tensor_fields[0])
    out = op.outputs[index]
    wide = wide_dtype(args.compute_dtype)
    shape = () if reduced and out.reduced and _row_scale(args) is not None else (first.shape[0],)
    return first.new_empty(shape, dtype=torch.int64 if out.integer else wide)


def _unflatten(op: Op, flat: Sequence[Any]) -> Any:
    return op.args_type(**dict(zip((*op.tensor_fields, *op.static_fields), flat, strict=True)))


def _narrowed(op: Op, flat: Sequence[Any], needs: Sequence[bool]) -> Any:
    return dataclasses.replace(_unflatten(op, flat), needs=tuple(needs))


# ---------------------------------------------------------------------------------------------------- eager


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(op: Op, impl: str | None, *flat: Any) -> tuple[Any, ...]:
        outputs, box = _forward(op, _unflatten(op, flat), impl)
        return (*outputs, box)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.op, ctx.impl, *flat = inputs
        *outputs, ctx.box = output
        count = len(ctx.op.tensor_fields)
        ctx.static = flat[count:]
        ctx.save_for_backward(*flat[:count])
        ctx.save_for_forward(*flat[:count])
        args = _unflatten(ctx.op, flat)
        there = [out for out, p in zip(ctx.op.outputs, ctx.op.present(args), strict=True) if p]
        ctx.mark_non_differentiable(*[o for o, out in zip(outputs, there, strict=True) if not out.differentiable])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        op: Op = ctx.op
        count = len(op.gradients)
        needs = tuple(ctx.needs_input_grad[2 : 2 + count])
        saved = ctx.saved_tensors  # unpacked once: a checkpoint allows no more

        def pull(*upstream: Tensor | None) -> Tensors:
            return cast("Tensors", _apply(
                _Backward, op, ctx.box, len(upstream), needs, *upstream, *saved, *ctx.static
            ))

        found = _each(pull, grads[:-1])
        return (None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - count))

    @staticmethod
    def jvp(ctx: Any, _op: None, _impl: None, *tangents: Any) -> tuple[Any, ...]:
        op: Op = ctx.op
        args = _unflatten(op, (*ctx.saved_tensors, *ctx.static))
        roles = [r for r in op.gradients if getattr(args, r) is not None]
        primals = tuple(getattr(args, r) for r in roles)
        given = dict(zip(op.tensor_fields, tangents, strict=False))
        wanted = [given[r] for r in roles]
        moves = tuple(torch.zeros_like(p) if t is None else t for t, p in zip(wanted, primals, strict=True))
        found = _pushed(lambda *p: _differentiable(op, args, roles, p), primals, moves)
        left = iter(found)
        present = zip(op.outputs, op.present(args), strict=True)
        return (*[next(left) if out.differentiable else None for out, there in present if there], None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], op: Op, impl: str | None, *flat: Any) -> tuple[Any, Any]:
        batch = range(info.batch_size)
        each = [_Forward.apply(op, impl, *_pick(flat, in_dims[2:], i)) for i in batch]  # type: ignore[no-untyped-call]
        *outputs, boxes = zip(*each, strict=True)
        # one box speaks for all: the same kernel, and each backward makes its own residual
        box = _Box(boxes[0].kernel, None, spent=True)
        return (*[torch.stack(o) for o in outputs], box), (*[0] * len(outputs), None)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(op: Op, box: _Box, count: int, needs: tuple[bool, ...], *flat: Any) -> Tensors:
        args = _narrowed(op, flat[count:], needs)
        left = iter(_backward(op, args, box, flat[:count]))
        return tuple(next(left) if need else None for need in needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, _, ctx.count, ctx.needs, *flat = inputs
        tensors = ctx.count + len(ctx.op.tensor_fields)
        ctx.static = flat[tensors:]
        ctx.save_for_backward(*flat[:tensors])
        ctx.save_for_forward(*flat[:tensors])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> tuple[Any, ...]:
        rule = _SecondOrder(ctx)
        given = [m for m, need in zip(moves, ctx.needs, strict=True) if need]

        def pull(*moves: Tensor | None) -> tuple[Tensor, ...]:
            values, back, *_ = torch.func.vjp(rule.gradients, *rule.primals)
            full = tuple(torch.zeros_like(v) if m is None else m for v, m in zip(values, moves, strict=True))
            return cast("tuple[Tensor, ...]", back(full))

        return (*[None] * 4, *rule.placed(_each(pull, given)), *[None] * len(ctx.static))

    @staticmethod
    def jvp(ctx: Any, _op: None, _box: None, _count: None, _needs: None, *tangents: Any) -> tuple[Any, ...]:
        rule = _SecondOrder(ctx)
        given = [tangents[i] for i in rule.positions]
        moves = tuple(torch.zeros_like(p) if t is None else t for p, t in zip(rule.primals, given, strict=True))
        found = iter(_pushed(rule.gradients, rule.primals, moves))
        return tuple(next(found) if need else None for need in ctx.needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], op: Op, box: _Box, count: int, needs: Any, *flat: Any) -> Any:
        box = _Box(box.kernel, None, spent=True)
        each = [
            _Backward.apply(op, box, count, needs, *_pick(flat, in_dims[4:], i))  # type: ignore[no-untyped-call]
            for i in range(info.batch_size)
        ]
        outputs = tuple(None if o[0] is None else torch.stack(o) for o in zip(*each, strict=True))
        return outputs, tuple(None if o is None else 0 for o in outputs)


def _each(pull: Callable[..., Tensors], grads: Sequence[Tensor | None]) -> Tensors:
    """What is pulled back from gradients, one after another where they are a batch: ``is_grads_batched=True`` hands on
    tensors of a kind of its own, whose memory kernels would take for that of one gradient.
    """
    level = 1
    batches = {
        i: torch._remove_batch_dim(g, level, 0, 0) for i, g in enumerate(grads) if g is not None and _is_batch(g)
    }
    if not batches:
        return pull(*grads)
    size, *others = {0 if _is_batch(batch) or is_batchedtensor(batch) else len(batch) for batch in batches.values()}
    if others or size == 0:
        raise NotImplementedError(
            "is_grads_batched=True inside another vmap is not supported; nest torch.func.vmap over torch.func.vjp"
        )
    each = [pull(*[batches[i][k] if i in batches else g for i, g in enumerate(grads)]) for k in range(size)]
    return tuple([
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*each, strict=True)
    ])


def _is_batch(grad: Tensor) -> bool:
    while is_batchedtensor(grad):
        grad = get_unwrapped(grad)
    return is_legacy_batchedtensor(grad)


def _pick(flat: Sequence[Any], dims: Sequence[Any], index: int) -> list[Any]:
    return [a.select(d, index) if isinstance(d, int) else a for a, d in zip(flat, dims, strict=True)]


def _pushed(
    function: Callable[..., tuple[Tensor, ...]], primals: tuple[Tensor, ...], moves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """How the values of a function move when its arguments do."""
    if torch._C._are_functorch_transforms_active():
        primals, moves = (tuple(t.contiguous() for t in given) for given in (primals, moves))  # dual tensors must be
        return cast("tuple[Tensor, ...]", torch.func.jvp(function, primals, moves)[1])
    # PyTorch's own forward mode, in which no other can be nested: what pulls back is linear, and pulled back itself
    values, pull, *_ = torch.func.vjp(function, *primals)
    _, push, *_ = torch.func.vjp(pull, tuple(torch.zeros_like(v) for v in values))
    return cast("tuple[Tensor, ...]", push(moves)[0])


class _SecondOrder:
    """The gradients as a function, through the reference, of what ``_Backward`` was given.

    Attributes:
        primals: The upstream gradients that arrived, then the differentiable tensors that are there.
        positions: Where those stand among the tensors that ``_Backward`` saved.
    """

    def __init__(self, ctx: Any) -> None:
        op: Op = ctx.op
        saved = ctx.saved_tensors
        self._op, self._args = op, _unflatten(op, (*saved[ctx.count :], *ctx.static))
        self._roles = [r for r in op.gradients if getattr(self._args, r) is not None]
        self._wanted = [i for i, r in enumerate(self._roles) if ctx.needs[op.gradients.index(r)]]
        there = [out for out, p in zip(op.outputs, op.present(self._args), strict=True) if p]
        arrived = [i for i in range(ctx.count) if saved[i] is not None and there[i].differentiable]
        self._slots = [sum(out.differentiable for out in there[:i]) for i in arrived]
        self.positions = arrived + [ctx.count + op.tensor_fields.index(r) for r in self._roles]
        self.primals = tuple(saved[i] for i in self.positions)
        self._saved = len(saved)

    def gradients(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The gradients that were wanted."""
        upstream, tensors = values[: len(self._slots)], values[len(self._slots) :]
        outputs, pull, *_ = torch.func.vjp(lambda *p: _differentiable(self._op, self._args, self._roles, p), *tensors)
        full = [torch.zeros_like(o) for o in outputs]
        for slot, g in zip(self._slots, upstream, strict=True):
            full[slot] = g.to(outputs[slot].dtype)
        found = pull(tuple(full))
        return tuple(found[i] for i in self._wanted)

    def placed(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Values of the primals, each at its position among the saved tensors."""
        by_position = dict(zip(self.positions, values, strict=True))
        return [by_position.get(i) for i in range(self._saved)]


def _differentiable(op: Op, args: Any, roles: Sequence[str], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The differentiable outputs of the reference as a function of the differentiable tensors."""
    args = dataclasses.replace(args, **dict(zip(roles, values, strict=True)))
    found = zip(op.outputs, reduce_rows(op, args, op.rows(args)), strict=True)
    return tuple(o for out, o in found if o is not None and out.differentiable)


# ---------------------------------------------------------------------------------------------------- compile

_SCHEMA = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "int",
    "int | None": "SymInt?",  # a bound that changes from call to call needs no recompile
    "bool": "bool",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
    "tuple[bool, ...]": "bool[]",
}


def _tie(scalar: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return scalar.clone()


# Gradients formed in the forward are constants to a compiled backward. Tied to the tensors that they depend on, a
# second derivative through them is refused by AOTAutograd instead of being 0.
_tied = torch.library.custom_op(
    "headmux::tied", _tie, mutates_args=(), schema="(Tensor scalar, Tensor[] tensors) -> Tensor"
)
_tied.register_fake(_tie)


def _gradients_with_loss(args: Any) -> bool:
    """Whether the opaque op forms the gradients together with a reduced loss, to be scaled later.

    Not in fp16, where gradients of a mean underflow before a loss scale arrives; and only when they will be asked for.
    """
    return _row_scale(args) is not None and any(args.needs) and args.compute_dtype != torch.float16


def raw_op(op: Op) -> Any:
    """Register ``headmux::NAME`` and ``headmux::NAME_backward`` and return the first.

    Both take the fields of the op's arguments in order, then the backend's names. The first returns the outputs that
    are there and, where ``_gradients_with_loss``, the gradients for an upstream gradient of 1.
    """
    types = {f.name: _SCHEMA[str(f.type)] for f in dataclasses.fields(op.args_type)}
    fields = (*op.tensor_fields, *op.static_fields)
    schema = ", ".join(f"{types[f]} {f}" for f in fields) + ", str impl"

    def unpack(flat: Sequence[Any]) -> Any:
        args = _unflatten(op, flat)
        return dataclasses.replace(args, needs=tuple(args.needs))

    def gradient_fakes(args: Any) -> list[Tensor]:
        roles = [r for r, need in zip(op.gradients, args.needs, strict=True) if need]
        return [torch.empty_like(getattr(args, r), memory_format=torch.contiguous_format) for r in roles]

    def forward(*flat: Any) -> list[Tensor]:
        args = unpack(flat[:-1])
        together = _gradients_with_loss(args)
        if not together:
            args = dataclasses.replace(args, needs=(False,) * len(op.gradients))
        outputs, box = _forward(op, args, flat[-1] or None)
        if together:
            one = [torch.ones_like(o) if i == 0 else None for i, o in enumerate(outputs)]
            outputs += _backward(op, args, box, one)
        return outputs

    def forward_fake(*flat: Any) -> list[Tensor]:
        args = unpack(flat[:-1])
        outputs = [_empty_output(op, args, i, reduced=True) for i, p in enumerate(op.present(args)) if p]
        return outputs + (gradient_fakes(args) if _gradients_with_loss(args) else [])

    def backward(upstream: Sequence[Tensor | None], *flat: Any) -> list[Tensor]:
        args = unpack(flat[:-1])
        _, box = _forward(op, args, flat[-1] or None)
        return _backward(op, args, box, upstream)

    def backward_fake(upstream: Sequence[Tensor | None], *flat: Any) -> list[Tensor]:
        return gradient_fakes(unpack(flat[:-1]))

    raw = torch.library.custom_op(
        f"headmux::{op.name}", forward, mutates_args=(), schema=f"({schema}) -> Tensor[]"
    )
    raw_backward = torch.library.custom_op(
        f"headmux::{op.name}_backward", backward, mutates_args=(), schema=f"(Tensor?[] upstream, {schema}) -> Tensor[]"
    )
    raw.register_fake(forward_fake)
    raw_backward.register_fake(backward_fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        count = len(op.tensor_fields)
        args = unpack(inputs[:-1])
        ctx.static = inputs[count:]
        ctx.outputs = sum(op.present(args))
        ctx.formed = args.needs if _gradients_with_loss(args) else None
        ctx.tensors = count
        ctx.save_for_backward(*inputs[:count], *output[ctx.outputs :])
        ctx.set_materialize_grads(False)

    def formula(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        tensors, formed = ctx.saved_tensors[: ctx.tensors], ctx.saved_tensors[ctx.tensors :]
        needs = tuple(ctx.needs_input_grad[: len(op.gradients)])
        formed_for = ctx.formed or (False,) * len(needs)
        scaled: list[Tensor | None]
        if grads[0] is not None and all(f or not n for f, n in zip(formed_for, needs, strict=True)):
            left = iter(formed)
            every = [next(left) if f else None for f in formed_for]
            scalar = _tied(grads[0], [t for t, n in zip(tensors, needs, strict=False) if n and t is not None])
            scaled = [(g * scalar).to(g.dtype) if n and g is not None else None
                      for g, n in zip(every, needs, strict=True)]
        else:
            # what does not differentiate has no gradient to hand on
            args = unpack((*tensors, *ctx.static[:-1]))
            there = [out for out, p in zip(op.outputs, op.present(args), strict=True) if p]
            upstream = [g if out.differentiable else None for g, out in zip(grads, there, strict=False)]
            static = dict(zip(op.static_fields, ctx.static, strict=False))
            static["needs"] = list(needs)
            found = iter(raw_backward(upstream, *tensors, *static.values(), ctx.static[-1]))
            scaled = [next(found) if n else None for n in needs]
        return (*scaled, *[None] * (len(op.tensor_fields) - len(op.gradients) + len(ctx.static)))

    raw.register_autograd(formula, setup_context=setup)
    return raw
