"""Backends that are wrong on purpose, each in one way, with the checks that must catch it.

They wrap the kernels of the ``torch`` backend. A mutant that gets through one of its checks fails the suite: a check
that nothing wrong can fail checks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headmux import registry
from headmux.contract import Backend, Call, Kernel, Requirement, Upstream
from headmux.testing.runner import Check, run_check

Gradients = tuple["Tensor | None", ...]


@dataclass(frozen=True)
class Mutant:
    """A wrong backend.

    Attributes:
        name: What is wrong with it.
        backend: The backend, registered only while it is tested.
        caught_by: Ids of the checks that must fail on it.
    """

    name: str
    backend: Backend
    caught_by: tuple[str, ...]


def missed(mutant: Mutant, checks: Iterable[Check], device: str = "cpu") -> list[str]:
    """Of the checks that should catch a mutant, the ids of those that do not.

    Raises:
        KeyError: ``caught_by`` names no check.
    """
    by_id = {c.id: c for c in checks}
    wanted = [by_id[i] for i in mutant.caught_by]
    registry.register(mutant.backend)
    try:
        return [c.id for c in wanted if run_check(c, mutant.backend, device)[0].outcome != "failed"]
    finally:
        registry.unregister(mutant.backend.name)


MUTANTS: list[Mutant] = []


def _real(op: str) -> Kernel:
    return registry.get_backend("torch").kernels[op]


def _add(name: str, op: str, kernel: Kernel, *caught_by: str, requires: tuple[Requirement, ...] = ()) -> None:
    name = f"{op}-{name}"
    MUTANTS.append(
        Mutant(name, Backend(f"mutant-{name}", {op: kernel}, requires), tuple(f"{op}/{c}" for c in caught_by))
    )


def _changed(op: str, forward: Callable[[Any], Any] | None, backward: Callable[[Any], Any] | None) -> Kernel:
    """The real kernel, fed other arguments. Where those differ, backward starts from another forward."""
    real = _real(op)
    same = lambda args: args  # noqa: E731
    first, second = forward or same, backward or same

    def run(args: Any) -> Any:
        return real.forward(first(args))

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        args = second(args)
        return real.backward(args, real.forward(args)[1], upstream)

    return Kernel(run, back)


def _results(op: str, change: Callable[[Any, Gradients], Gradients]) -> Kernel:
    """The real kernel with its gradients changed."""
    real = _real(op)
    return Kernel(real.forward, lambda args, residual, upstream: change(args, real.backward(args, residual, upstream)))


def _slice(args: Any, rows: slice) -> Any:
    tokens = _states(args).shape[0]
    return dataclasses.replace(
        args,
        **{
            f.name: v[rows]
            for f in dataclasses.fields(args)
            if isinstance(v := getattr(args, f.name), Tensor)
            and v.shape[:1] == (tokens,)
            and f.name.endswith(("input", "target", "row_scale", "token_temperature"))
        },
    )


def _states(args: Any) -> Tensor:
    found: Tensor = args.student_input if hasattr(args, "student_input") else args.input
    return found


def _weight(args: Any) -> Tensor:
    found: Tensor = args.student_weight if hasattr(args, "student_weight") else args.weight
    return found


def _valid(args: Any) -> Tensor:
    if args.target is None or args.ignore_index is None:
        return torch.ones(_states(args).shape[0], dtype=torch.bool, device=_states(args).device)
    return args.target != args.ignore_index  # type: ignore[no-any-return]


def _full(op: str, mode: Callable[[], Any] | None = None) -> Kernel:
    """A kernel from the reference, with the full logits; right, but for the memory and what a mode changes."""
    owner = registry.get_op(op)

    def rows(args: Any) -> Gradients:
        if mode is None:
            return owner.rows(args)
        with mode():
            return owner.rows(args)

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        roles = [r for r, need in zip(owner.gradients, args.needs, strict=True) if need]
        with torch.enable_grad():
            leaves = {r: getattr(args, r).detach().requires_grad_() for r in roles}
            outputs = rows(dataclasses.replace(args, **leaves))
        pairs = [(o, g) for o, g in zip(outputs, upstream.rows, strict=True) if o is not None and g is not None]
        found = torch.autograd.grad([o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs])
        by_role = dict(zip(roles, found, strict=True))
        return tuple(by_role[r].contiguous() if r in by_role else None for r in owner.gradients)

    return Kernel(lambda args: (rows(args), None), back)


class _RoundedLogits(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__matmul__, torch.Tensor.matmul):
            return found + (found.bfloat16().float() - found).detach()
        return found


class _RoundedLogsumexp(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.log_softmax:
            return args[0] - torch.logsumexp(args[0], 1, keepdim=True)
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------ accumulation


def _in_parts(op: str, size: int, dtype: torch.dtype) -> Kernel:
    real = _real(op)

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        total: list[Any] = [None] * 3
        states = []
        for start in range(0, _states(args).shape[0], size):
            rows = slice(start, start + size)
            part = _slice(args, rows)
            arrives = Upstream(tuple(None if r is None else r[rows] for r in upstream.rows), upstream.scalar)
            found = real.backward(part, real.forward(part)[1], arrives)
            states.append(found[0])
            for i, g in enumerate(found[1:], 1):
                if g is not None:
                    total[i] = g.to(dtype) if total[i] is None else total[i] + g.to(dtype)
        if args.needs[0]:
            total[0] = torch.cat(states)
        parameters = (_states(args), _weight(args), args.bias if hasattr(args, "bias") else args.student_bias)
        return tuple(None if t is None else t.to(p.dtype) for t, p in zip(total, parameters, strict=True))

    return Kernel(real.forward, back)


def _round_each_chunk(args: Any) -> Any:
    return dataclasses.replace(args, accum_dtype=None)


for _op in ("flce", "jsd", "linear_logp"):
    _add("sums-in-bf16", _op, _in_parts(_op, 4, torch.bfloat16), "equal-rows", "chunks")
    _add("ignores-accum-dtype", _op, _changed(_op, _round_each_chunk, _round_each_chunk), "chunks")
    _add("holds-all-logits", _op, _full(_op), "memory")


def _scaled_late(args: Any, upstream: Upstream, real: Kernel) -> Gradients:
    if upstream.scalar is None:
        return real.backward(args, real.forward(args)[1], upstream)
    one = torch.ones_like(upstream.scalar)
    found = real.backward(args, real.forward(args)[1], Upstream((args.row_scale, *upstream.rows[1:]), one))
    return tuple(None if g is None else g * upstream.scalar.to(g.dtype) for g in found)


for _op in ("flce", "jsd"):
    _kernel = _real(_op)
    _add(
        "underflows",
        _op,
        Kernel(_kernel.forward, lambda args, residual, upstream, k=_kernel: _scaled_late(args, upstream, k)),
        "loss-scale",
    )

_add("rounds-logits", "jsd", _full("jsd", _RoundedLogits), "near-teacher-bf16-beta-0.5", "near-teacher-bf16-beta-1")
_add("rounds-logsumexp", "jsd", _full("jsd", _RoundedLogsumexp), "offset-logits")


def _rounded_probability(args: Any, residual: Any, upstream: Upstream) -> Gradients:
    z = args.input.float() @ args.weight.float().T
    p = torch.softmax(z, 1).to(args.input.dtype)
    p[torch.arange(len(p)), args.target] -= 1
    g = upstream.rows[0]
    assert g is not None
    d = p.float() * g[:, None]
    found = ((d @ args.weight.float()).to(args.input.dtype), (d.T @ args.input.float()).to(args.weight.dtype), None)
    return tuple(v if need else None for v, need in zip(found, args.needs, strict=True))


_add("rounds-before-subtracting", "flce", Kernel(_real("flce").forward, _rounded_probability), "likely-target")
_add(
    "rounds-under-autocast",
    "flce",
    _results(
        "flce", lambda args, found: tuple(None if g is None else g.to(args.compute_dtype).to(g.dtype) for g in found)
    ),
    "autocast-unrounded",
)

# ------------------------------------------------------------------------------------------------ options dropped

def _replaced(field: str, value: Any, args: Any) -> Any:
    needs = {"needs": (*args.needs[:2], False)} if field == "bias" else {}
    return dataclasses.replace(args, **{field: value}, **needs)


for _op, _field, _default, _case in (
    ("flce", "softcap", None, "softcap"),
    ("flce", "logit_scale", 1.0, "logit-scale"),
    ("flce", "lse_square_scale", 0.0, "z-loss"),
    ("flce", "label_smoothing", 0.0, "label-smoothing"),
    ("flce", "ce_weight", None, "class-weights"),
    ("flce", "use_token_scaling", False, "token-scaling"),
    ("flce", "bias", None, "bias-fp32"),
    ("jsd", "temperature", 1.0, "temperature-2"),
    ("jsd", "student_softcap", None, "student-softcap"),
    ("jsd", "teacher_softcap", None, "teacher-softcap"),
    ("jsd", "student_logit_scale", 1.0, "student-logit-scale"),
    ("jsd", "teacher_logit_scale", 1.0, "teacher-logit-scale"),
    ("jsd", "teacher_bias", None, "bias-fp32"),
    ("jsd", "target", None, "fp32"),
    ("linear_logp", "softcap", None, "softcap"),
    ("linear_logp", "logit_scale", 1.0, "logit-scale"),
    ("linear_logp", "temperature", 1.0, "temperature-0.5"),
    ("linear_logp", "token_temperature", None, "token-temperature"),
):
    _without = functools.partial(_replaced, _field, _default)
    _add(f"ignores-{_field.replace('_', '-')}", _op, _changed(_op, _without, _without), _case)
    if _field not in ("bias", "target"):
        _add(f"ignores-{_field.replace('_', '-')}-in-backward", _op, _changed(_op, None, _without), _case)

_add(
    "clamps-beta",
    "jsd",
    _changed("jsd", *[lambda args: dataclasses.replace(args, beta=min(max(args.beta, 1e-6), 1 - 1e-6))] * 2),
    "forward-kl",
    "reverse-kl",
    "fixture",
)
_add(
    "swaps-models",
    "jsd",
    _changed("jsd", *[lambda args: dataclasses.replace(args, beta=1 - args.beta)] * 2),
    "beta-0.1",
    "forward-kl",
    "fixture",
)


def _squared_temperature(args: Any) -> Any:
    outputs, residual = _real("jsd").forward(args)
    return (outputs[0] * args.temperature**2,), residual  # type: ignore[operator]


_add(
    "scales-by-temperature-squared",
    "jsd",
    Kernel(_squared_temperature, _real("jsd").backward),
    "temperature-2",
    "fixture",
)


def _without_entropy(args: Any, residual: Any, upstream: Upstream) -> Gradients:
    real = _real("linear_logp")
    return real.backward(args, real.forward(args)[1], Upstream((upstream.rows[0], None, upstream.rows[2]), None))


_add("drops-entropy-gradient", "linear_logp", Kernel(_real("linear_logp").forward, _without_entropy), "entropy")

# ------------------------------------------------------------------------------------------------ tokens

_all_count = lambda args: dataclasses.replace(  # noqa: E731
    args, ignore_index=-(2**40), target=args.target.clamp(min=0) if hasattr(args, "input") else args.target
)
for _op in ("flce", "jsd", "linear_logp"):
    _add(
        "counts-ignored-tokens",
        _op,
        _changed(_op, _all_count, None),
        "ignore-index-in-range",
        "ignored-rows" if _op != "jsd" else "fp32",
    )
    _add(
        "counts-nan-of-ignored-tokens",
        _op,
        _results(
            _op,
            lambda args, found: (
                found[0],
                None if found[1] is None else found[1] + (_states(args) * 0).sum(0),
                found[2],
            ),
        ),
        "ignored-rows",
    )

for _op in ("flce", "linear_logp"):
    _clamped = lambda args: dataclasses.replace(  # noqa: E731
        args, target=torch.where(_valid(args), args.target.clamp(0, args.weight.shape[0] - 1), args.target)
    )
    _narrow = lambda args: dataclasses.replace(args, target=args.target.to(torch.int32).to(torch.int64))  # noqa: E731
    _add("clamps-targets", _op, _changed(_op, _clamped, _clamped), "bad-target")
    _add("narrows-targets", _op, _changed(_op, _narrow, _narrow), "bad-target")


def _looked_up(args: Any) -> Any:
    args.target.clamp(min=0).max()
    if int(args.target.max()) >= args.student_weight.shape[0]:
        raise IndexError("label out of range")
    return _real("jsd").forward(args)


_add("uses-labels", "jsd", Kernel(_looked_up, _real("jsd").backward), "ignored-targets")


def _no_minus_one(args: Any) -> Any:
    (loss, z_loss, best), residual = _real("flce").forward(args)
    return (loss, z_loss, None if best is None else best.clamp(min=0)), residual


_add("predicts-for-ignored-tokens", "flce", Kernel(_no_minus_one, _real("flce").backward), "predicted", "contract")


def _padded(args: Any) -> Any:
    extra = -args.weight.shape[0] % 128
    weight = torch.cat([args.weight, args.weight.new_zeros(extra, args.weight.shape[1])])
    bias = None if args.bias is None else torch.cat([args.bias, args.bias.new_zeros(extra)])
    return dataclasses.replace(args, weight=weight, bias=bias)


for _op in ("flce", "linear_logp"):
    _add(
        "counts-padding",
        _op,
        _changed(_op, _padded, None),
        "vocabulary-129",
        "vocabulary-3",
        *(["phantom-columns"] if _op == "linear_logp" else []),
    )


def _first_rows(args: Any) -> Any:
    outputs, residual = _real("linear_logp").forward(args)
    logp = outputs[0]
    assert logp is not None
    logp[65536:] = 0.0
    return outputs, residual


_add("drops-rows-past-65536", "linear_logp", Kernel(_first_rows, _real("linear_logp").backward), "many-tokens")


def _own_divisor(args: Any, residual: Any, upstream: Upstream) -> Gradients:
    real = _real("flce")
    if upstream.scalar is not None:
        scale = _valid(args).float() / _valid(args).sum().clamp(min=1)
        args = dataclasses.replace(args, row_scale=scale)
        upstream = Upstream((scale * upstream.scalar, *upstream.rows[1:]), upstream.scalar)
    return real.backward(args, real.forward(args)[1], upstream)


_add(
    "counts-by-itself",
    "flce",
    Kernel(_real("flce").forward, _own_divisor),
    "num-items",
    "fp32-sum",
    "gradient-accumulation",
)

# ------------------------------------------------------------------------------------------------ upstream, backward


def _first_upstream(op: str) -> Kernel:
    real = _real(op)

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        if upstream.scalar is not None or upstream.rows[0] is None:
            return real.backward(args, residual, upstream)
        g = upstream.rows[0]
        first = torch.where(_valid(args), g[:1], 0.0)
        return real.backward(args, residual, Upstream((first, *upstream.rows[1:]), None))

    return Kernel(real.forward, back)


def _compounding(op: str) -> Kernel:
    """Scales gradients that it keeps, in place: a second backward starts from the first one's."""
    real = _real(op)
    kept: dict[int, Gradients] = {}

    def forward(args: Any) -> Any:
        outputs, residual = real.forward(args)
        if args.row_scale is None or not any(args.needs):
            return outputs, residual
        return outputs, "kept"

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        if upstream.scalar is None:
            return real.backward(args, residual, upstream)
        key = _states(args).data_ptr()
        if key not in kept:
            kept.clear()
            one = Upstream((args.row_scale, *upstream.rows[1:]), torch.ones_like(upstream.scalar))
            kept[key] = real.backward(args, real.forward(args)[1], one)
        return tuple(None if g is None else g.mul_(upstream.scalar) for g in kept[key])

    return Kernel(forward, back)


def _one_buffer(op: str) -> Kernel:
    """Hands out the same memory at each backward."""
    buffers: dict[Any, Tensor] = {}

    def change(args: Any, found: Gradients) -> Gradients:
        result = []
        for i, g in enumerate(found):
            if g is not None:
                buffer = buffers.setdefault((i, g.shape, g.dtype), torch.empty_like(g))
                buffer.copy_(g)
                g = buffer
            result.append(g)
        return tuple(result)

    return _results(op, change)


def _divided(op: str) -> Kernel:
    real = _real(op)

    def forward(args: Any) -> Any:
        outputs, residual = real.forward(args)
        count = _valid(args).sum()
        return (outputs[0] * (count / count), *outputs[1:]), residual  # type: ignore[operator]

    return Kernel(forward, real.backward)


def _mutating(op: str, what: str) -> Kernel:
    real = _real(op)

    def forward(args: Any) -> Any:
        found = real.forward(args)
        if what == "input":
            _states(args).masked_fill_(~_valid(args)[:, None], 0.0)
        elif what == "weight":
            _weight(args)[-1].mul_(2.0)
        elif what == "activations":
            _states(args).mul_(1.0 + 2.0**-6)
        elif what == "teacher":
            args.teacher_weight[-1].mul_(2.0)
        return found

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        found = real.backward(args, residual, upstream)
        if what == "upstream" and upstream.rows[0] is not None:
            upstream.rows[0].mul_(2.0)
        return found

    return Kernel(forward, back)


def _unasked(args: Any, found: Gradients) -> Gradients:
    return tuple(
        g if g is not None or p is None else torch.zeros_like(p)
        for g, p in zip(found, (args.input, args.weight, args.bias), strict=True)
    )


def _all_needed(args: Any) -> Any:
    return dataclasses.replace(args, needs=(True, True, args.needs[2]))


def _sharing(op: str) -> Kernel:
    """Reads in the backward what it handed out."""
    real = _real(op)

    def forward(args: Any) -> tuple[Any, Any]:
        outputs, residual = real.forward(args)
        return outputs, (residual, outputs[0], outputs[0].clone())

    def back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
        residual, mine, before = residual
        changed = (mine - before).abs().sum()
        return tuple(g if g is None else g * (1 + changed) for g in real.backward(args, residual, upstream))

    return Kernel(forward, back)


for _op in ("flce", "jsd", "linear_logp"):
    _add("shares-outputs", _op, _sharing(_op), "written-outputs")
    _add(
        "takes-first-upstream",
        _op,
        _first_upstream(_op),
        "fp32" if _op != "linear_logp" else "ignored",
        "zero-upstream",
        "compiled",
        "second-order",
        *(["fixture-gradients"] if _op == "flce" else []),
    )
    _add("reuses-memory", _op, _one_buffer(_op), "repeated-backward")
    _add("writes-input", _op, _mutating(_op, "input"), *(("fp32",) if _op != "linear_logp" else ("ignored",)))
    _add("writes-weight", _op, _mutating(_op, "weight"), "fp32", "layout-offset", "opcheck")
    _add("writes-activations", _op, _mutating(_op, "activations"), "activations")
    _add("divides-by-none", _op, _divided(_op), "nothing-counts")
    if _op != "linear_logp":
        _add("compounds", _op, _compounding(_op), "repeated-backward")
_add("writes-teacher", "jsd", _mutating("jsd", "teacher"), "fp32")
_add("writes-upstream", "linear_logp", _mutating("linear_logp", "upstream"), "fp32")
_add("returns-unasked-gradients", "flce", _results("flce", _unasked), "contract")
_add(
    "computes-unasked-gradients",
    "flce",
    Kernel(
        lambda args: _real("flce").forward(_all_needed(args) if any(args.needs) else args),
        lambda args, residual, upstream: tuple(
            g if need else None
            for g, need in zip(_real("flce").backward(_all_needed(args), residual, upstream), args.needs, strict=True)
        ),
    ),
    "no-waste",
)
_add(
    "forgets-bias-gradient",
    "flce",
    _results("flce", lambda args, found: (*found[:2], None)),
    "requested-gradients",
    "contract",
    "bias-fp32",
)


def _eager_gradients(args: Any) -> Any:
    real = _real("flce")
    outputs, residual = real.forward(dataclasses.replace(args, needs=(True, True, args.bias is not None)))
    return outputs, residual if any(args.needs) else None


def _eager_back(args: Any, residual: Any, upstream: Upstream) -> Gradients:
    real = _real("flce")
    return real.backward(args, real.forward(args)[1], upstream)


_add("pays-for-gradients-in-eval", "flce", Kernel(_eager_gradients, _eager_back), "no-gradients")
_add(
    "keeps-in-eval",
    "linear_logp",
    Kernel(
        lambda args: (_real("linear_logp").forward(args)[0], args.weight.clone()),
        lambda args, residual, upstream: _real("linear_logp").backward(
            args, _real("linear_logp").forward(args)[1], upstream
        ),
    ),
    "contract",
)
_add(
    "returns-fp32-gradients",
    "flce",
    _results("flce", lambda args, found: tuple(None if g is None else g.float() for g in found)),
    "contract",
)


def _filtered(args: Any, found: Gradients) -> Gradients:
    """Leaves out classes that are no target, whose gradients are small."""
    if found[1] is not None:
        among = torch.zeros(args.weight.shape[0], dtype=torch.bool)
        among[args.target[_valid(args)]] = True
        found[1][~among] = 0.0
    return found


_add("filters-gradients", "flce", _results("flce", _filtered), "fp32-mean", "bf16", "uniform-bf16")

# ------------------------------------------------------------------------------------------------ memory, order, words


def _unwritten(args: Any) -> Any:
    outputs, residual = _real("flce").forward(args)
    loss = outputs[0]
    assert loss is not None
    fresh = torch.empty_like(loss)
    fresh[_valid(args)] = loss[_valid(args)]
    return (fresh, *outputs[1:]), residual


_add("leaves-ignored-losses-unwritten", "flce", Kernel(_unwritten, _real("flce").backward), "poisoned-memory")
_add(
    "reads-fresh-memory",
    "flce",
    _results(
        "flce", lambda args, found: tuple(None if g is None else torch.empty_like(g).mul_(0.0).add_(g) for g in found)
    ),
    "poisoned-memory",
)
_noise = itertools.count()
for _op in ("flce", "jsd", "linear_logp"):
    _add(
        "differs-from-run-to-run",
        _op,
        _results(
            _op,
            lambda args, found: tuple(
                None if g is None else g * (1 + (next(_noise) % 7) * torch.finfo(g.dtype).eps) for g in found
            ),
        ),
        "deterministic",
    )


def _batch_dependent(args: Any) -> Any:
    outputs, residual = _real("flce").forward(args)
    return (outputs[0] * (1 + 1e-4 * (args.input.shape[0] == 1)), *outputs[1:]), residual  # type: ignore[operator]


_add("depends-on-the-batch", "flce", Kernel(_batch_dependent, _real("flce").backward), "alone-or-together")

_words = itertools.count()


def _changing(call: Call) -> str:
    return f"not today, for the {next(_words)}. time"


def _silent(call: Call) -> str:
    return " "


_add("gives-changing-reasons", "flce", _real("flce"), "fp32", "drawn-calls", requires=(_changing,))
_add("gives-empty-reasons", "flce", _real("flce"), "fp32", requires=(_silent,))
