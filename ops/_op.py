"""What every op is made of: its fields, its call for selection, and the object that users hold."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from headmux import registry, select
from headmux.backends.common.gemm import wide_dtype
from headmux.backends.common.head import MASKED
from headmux.contract import Call, Pairs, Selection
from headmux.devices import capability
from headmux.ops import _autograd, _checks


@dataclass(frozen=True)
class Output:
    """One per-token output of an op's kernels: its name, how it reduces, and whether it can be differentiated."""

    name: str
    differentiable: bool = True
    reduced: bool = True
    integer: bool = False


@dataclass(frozen=True)
class Request:
    """A checked call: the kernels' arguments, and how their outputs become the caller's."""

    args: Any
    finish: Callable[[tuple[Tensor | None, ...]], Any]


_Op = TypeVar("_Op", bound="Op")


class Op:
    """A loss that selects a backend at each call. Safe to keep, to call from threads, and to compile.

    A subclass states the op once: the class of its kernels' arguments, their gradients and outputs, the checks that
    turn a user's call into a ``Request``, and the plain PyTorch reference.
    """

    name: ClassVar[str]
    args_type: ClassVar[type]
    gradients: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[Output, ...]]
    shapes: ClassVar[Mapping[str, tuple[str, ...]]]
    """The parameters that are, or can be, tensors: the letters of their sizes, tokens flattened to one dimension."""
    token_fields: ClassVar[tuple[str, ...]]
    """The fields of the kernels' arguments that have one entry a token."""

    def __init__(self) -> None:
        self._impl: str | None = None
        fields = dataclasses.fields(self.args_type)
        self.tensor_fields = tuple(f.name for f in fields if "Tensor" in str(f.type))
        self.static_fields = tuple(f.name for f in fields if f.name not in self.tensor_fields)
        self._compute_fields = tuple(f for f in self.static_fields if f.endswith("compute_dtype"))
        # what kernels never see decides nothing
        decisive = tuple(f for f in self.static_fields if f != "max_valid_tokens")
        self._option_fields = tuple(f for f in decisive if f not in ("needs", *self._compute_fields))
        self._defaults: Pairs = tuple((f.name, f.default) for f in fields if f.name in self._option_fields)
        self._tensors = operator.attrgetter(*self.tensor_fields)
        self._statics = operator.attrgetter(*decisive)
        self.raw = _autograd.raw_op(self)
        self.__annotations__ = self.request.__annotations__
        self.__signature__ = inspect.signature(self.request)

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """Check a user's call and put it in the kernels' form."""
        raise NotImplementedError

    def present(self, args: Any) -> tuple[bool, ...]:
        """Which of the outputs this call asks for."""
        return (True,) * len(self.outputs)

    def valid(self, args: Any) -> Tensor | None:
        """[N] bool, the tokens that count; None if all do."""
        raise NotImplementedError

    def sizes(self, args: Any) -> Pairs:
        """Name and value of each size of the call."""
        raise NotImplementedError

    def check_values(self, args: Any) -> None:
        """Raise ValueError for bad values in tensors, where they can be looked at without stopping the host."""
        if args.max_valid_tokens is not None:
            _checks.valid_tokens_within(self.valid(args), args.max_valid_tokens)

    def rows(self, args: Any) -> tuple[Tensor | None, ...]:
        """The outputs per token in plain PyTorch, in fp32 (fp64 for fp64 inputs), from the full logits."""
        raise NotImplementedError

    def select(self, args: Any, impl: str | None) -> Selection:
        """The decision for checked arguments; raises if no backend runs the call."""
        tensors = self._tensors(args)
        key = (tensors[0].device, self._statics(args), *[None if t is None else (t.dtype, t.shape) for t in tensors])
        return select.select_as((self.name, key), self.name, impl, functools.partial(self.call_of, args))

    def call_of(self, args: Any) -> Call:
        """What selection is told of a call."""
        device = getattr(args, self.tensor_fields[0]).device
        dtypes = [(f, t.dtype) for f in self.tensor_fields if (t := getattr(args, f)) is not None]
        dtypes += [(f.removesuffix("_dtype"), getattr(args, f)) for f in self._compute_fields]
        return Call(
            self.name,
            device,
            capability(device),
            tuple(dtypes),
            self.sizes(args),
            tuple([(f, getattr(args, f)) for f in self._option_fields]),
            tuple([role for role, need in zip(self.gradients, args.needs, strict=True) if need]),
            self._defaults,
        )

    def call_on(
        self,
        device: torch.device,
        capability: tuple[int, int] | None,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        *,
        compute: torch.dtype | None = None,
        tensors: Iterable[str] = (),
        needs: Iterable[str] | None = None,
        **options: Any,
    ) -> Call:
        """What selection would be told of a call on a device that need not be there. Holds no such tensors.

        Args:
            device: Where the tensors would lie.
            capability: CUDA compute capability of that device, or None for other kinds.
            sizes: Value of each letter in ``shapes``.
            dtype: dtype of the floating-point tensors.
            compute: dtype that autocast would cast to, or None without autocast.
            tensors: Optional tensor parameters that would be given.
            needs: Roles whose gradient would be wanted; None for all that can be.
            **options: The op's other keywords.

        Raises:
            TypeError, ValueError: What the call itself would raise, or an unknown role in ``needs``.
        """
        given = {p.name for p in self.__signature__.parameters.values() if p.default is p.empty} | set(tensors)
        # one element stands for all, and one token; meta tensors would load the compiler, and Triton with it
        extents = {**sizes, "N": min(sizes["N"], 1)}
        for name in sorted(given):
            one = torch.ones((), dtype=torch.int64 if name == "target" else dtype)
            options[name] = one.expand([extents[d] for d in self.shapes[name]])
        with torch.autocast("cpu", enabled=False):
            args = self._checked(**options).args
        there = tuple(role for role in self.gradients if getattr(args, role) is not None)
        wanted = there if needs is None else tuple(needs)
        for role in wanted:
            if role not in there:
                raise ValueError(f"{self.name} has no gradient of {role!r} here; it has {', '.join(there)}")
        args = dataclasses.replace(args, needs=tuple(role in wanted for role in self.gradients))
        if compute is not None:
            args = dataclasses.replace(args, **dict.fromkeys(self._compute_fields, compute))
        call = self.call_of(args)
        named = tuple([(letter, sizes.get(letter, size)) for letter, size in call.sizes])
        return dataclasses.replace(call, device=device, capability=capability, sizes=named)

    def _checked(self, *args: Any, **kwargs: Any) -> Request:
        try:
            return self.request(*args, **kwargs)
        except TypeError as error:
            mismatch = self._mismatch(args, kwargs)
            if mismatch is None:
                raise
            raise TypeError(mismatch) from error

    def _mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why these arguments do not fit the op's signature, or None."""
        for keyword in kwargs:
            if keyword not in self.__signature__.parameters:
                near = difflib.get_close_matches(keyword, self.__signature__.parameters, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                return f"{self.name}() got an unexpected keyword argument {keyword!r}{hint}"
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            return f"{self.name}() {error}"
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op. Its own arguments are those of ``request``, and ``impl``."""
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Any:
        request = self._checked(*args, **kwargs)
        return request.finish(_autograd.apply(self, request.args, impl if impl is not None else self._impl))

    def explain(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Selection:
        """The decision for such a call, with every reason, without running it and without raising for no backend."""
        request = self._checked(*args, **kwargs)
        wanted = impl if impl is not None else self._impl
        return select.decide(self.call_of(_autograd.with_needs(self, request.args)), wanted, thorough=True)

    def reference(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Any:
        """The same call in plain PyTorch, differentiable to any order, from the full [N, V] logits."""
        del impl
        request = self._checked(*args, **kwargs)
        rows = self.rows(request.args)
        return request.finish(_autograd.reduce_rows(self, request.args, rows))

    def with_impl(self: _Op, names: str) -> _Op:
        """This op with a fixed comma list of backends, which a call's own ``impl=`` still overrides.

        Raises:
            UnknownNameError: A name is unknown.
        """
        with select.use_backend(names):
            pass
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._impl = names
        return bound

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are the op of that name, with the backends that ``with_impl`` fixed."""
        return _restored, (self.name, self._impl)

    def __repr__(self) -> str:
        return f"<headmux op {self.name}" + (f" impl={self._impl}>" if self._impl else ">")


def logits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute_dtype: torch.dtype,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """[N, V] logits in the statistics' dtype, in plain PyTorch, for the references.

    ``z = input @ weight.T + bias``, ``z *= logit_scale``, ``z = softcap * tanh(z / softcap)``, ``z /= temperature``.
    """
    wide = wide_dtype(compute_dtype)
    z = input.to(compute_dtype).to(wide) @ weight.to(compute_dtype).to(wide).T
    if bias is not None:
        z = z + bias.to(wide).clamp(min=MASKED)
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / (temperature.to(wide)[:, None] if isinstance(temperature, Tensor) else temperature)


def flattened(states: Tensor) -> Tensor:
    """[N, H] from [..., H]. Untouched if it is that already: a compiled backward can then name it in its errors."""
    return states if states.dim() == 2 else states.reshape(-1, states.shape[-1])


def _restored(name: str, impl: str | None) -> Op:
    op = registry.get_op(name)
    return op if impl is None else op.with_impl(impl)
