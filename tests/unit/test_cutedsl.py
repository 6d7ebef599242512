"""The cutedsl backend without its compiler and without a GPU: schedule, scalars, adapters, requirements."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from headmux import get_op, registry
from headmux.backends.common import storage
from headmux.backends.common.budget import budget as headmux_budget
from headmux.backends.common.head import MASKED
from headmux.backends.common.labels import Labels
from headmux.backends.cutedsl import divergence, flce, launch, linear_logp, softmax, statistics
from headmux.backends.cutedsl.build import Adding, Comparison, Scaling, Sorting
from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, RING, STAGES, TOKENS, WORKERS, Schedule
from headmux.contract import Upstream

HOPPER = (torch.device("cuda", 0), (9, 0))
SIZES = {"N": 4096, "H": 4096, "V": 128256, "H_teacher": 4096}


def reasons(op: str = "linear_logp", sizes: dict[str, int] | None = None, **facts: Any) -> tuple[str, ...]:
    facts = {"dtype": torch.bfloat16, "needs": (), **facts}
    dtype = facts.pop("dtype")
    call = get_op(op).call_on(*facts.pop("where", HOPPER), {**SIZES, **(sizes or {})}, dtype, **facts)
    backend = dataclasses.replace(registry.get_backend("cutedsl"), imports=())
    return backend.reject(call)


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("linear_logp", {"return_entropy": True, "return_lse": True, "tensors": ("bias", "temperature")}),
        ("linear_logp", {"dtype": torch.float16, "temperature": 0.5, "logit_scale": -2.0, "ignore_index": -100}),
        ("flce", {"lse_square_scale": 1e-4, "return_z_loss": True, "use_token_scaling": True}),
        ("flce", {"tensors": ("bias", "ce_weight", "token_weight"), "softcap": 30.0, "reduction": "none"}),
        ("flce", {"sizes": {"N": 1, "H": 8, "V": 1}}),
        ("flce", {"needs": None, "tensors": ("ce_weight", "token_weight"), "use_token_scaling": True}),
        ("flce", {"needs": ("input",), "tensors": ("bias",), "logit_scale": -0.5, "reduction": "sum"}),
        ("linear_logp", {"needs": ("weight",), "tensors": ("temperature",), "ignore_index": -100}),
        ("jsd", {"sizes": {"H_teacher": 8192}, "student_softcap": 5.0, "teacher_softcap": 5.0, "beta": 0.3}),
        ("jsd", {"needs": None, "tensors": ("student_bias", "teacher_bias"), "temperature": 2.0, "beta": 0.0}),
        ("jsd", {"needs": None, "dtype": torch.float16, "teacher_softcap": 5.0, "teacher_logit_scale": -2.0}),
    ],
)
def test_takes(op: str, facts: dict[str, Any]) -> None:
    assert reasons(op, **facts) == ()


@pytest.mark.parametrize(
    ("op", "facts", "reason"),
    [
        ("flce", {"needs": None, "tensors": ("bias",)}, "with gradients, gradients of bias are not supported"),
        (
            "flce",
            {"needs": None, "dtype": torch.float16},
            "with gradients, compute dtype torch.float16 is not one of torch.bfloat16",
        ),
        (
            "flce",
            {"needs": None, "lse_square_scale": 0.1, "softcap": 5.0},
            "with gradients, softcap=5.0 is not one of None; lse_square_scale=0.1 is not one of 0.0",
        ),
        ("linear_logp", {"needs": None, "return_lse": True}, "with gradients, return_lse=True is not one of False"),
        ("flce", {"label_smoothing": 0.1}, "label_smoothing=0.1 is not one of 0.0"),
        ("flce", {"return_token_accuracy": True}, "return_predicted=True is not one of False"),
        ("flce", {"dtype": torch.float32}, "compute dtype torch.float32 is not one of torch.bfloat16, torch.float16"),
        (
            "linear_logp",
            {"dtype": torch.float32, "compute": torch.bfloat16},
            "weight dtype torch.float32 is not that of the products, torch.bfloat16",
        ),
        ("linear_logp", {"sizes": {"H": 1028}}, "H=1028 is not a multiple of 8 above 0"),
        ("linear_logp", {"where": (HOPPER[0], (10, 0))}, "compute capability 10.0, needs at least 9.0 and below 10.0"),
        ("jsd", {"needs": None, "student_softcap": 5.0}, "with gradients, student_softcap=5.0 is not one of None"),
        ("jsd", {"sizes": {"H_teacher": 4}}, "H_teacher=4 is not a multiple of 8 above 0"),
    ],
)
def test_refuses(op: str, facts: dict[str, Any], reason: str) -> None:
    assert reasons(op, **facts) == (reason,)


def test_jsd_takes_weights_as_they_are() -> None:
    assert reasons("jsd", dtype=torch.float32, compute=torch.float16) == tuple(
        f"{model}_weight dtype torch.float32 is not that of the products, torch.float16"
        for model in ("student", "teacher")
    )


SHAPES = [
    (1, 1, 8), (128, 999, 64), (129, 999, 64), (1000, 128256, 4096), (8192, 128256, 4096), (5000, 300, 8192),
    (9999, 32000, 2048), (2 * 256 + 3, 257, 64),
]


@pytest.mark.parametrize("multiprocessors", [132, 114, 7, 1])
@pytest.mark.parametrize(("tokens", "vocabulary", "hidden"), SHAPES)
def test_every_slot_belongs_to_one_warpgroup_and_starts_fresh(
    tokens: int, vocabulary: int, hidden: int, multiprocessors: int
) -> None:
    plan = Schedule.of(tokens, vocabulary, hidden, multiprocessors)
    covered = (CLUSTER * plan.blocks + plan.half) * TOKENS
    assert covered - TOKENS < tokens <= covered
    assert (plan.columns - 1) * COLUMN < vocabulary <= plan.columns * COLUMN
    assert 1 <= plan.group <= max(1, plan.blocks)
    whole, half = plan.blocks * plan.columns, (-(-plan.columns // CLUSTER) if plan.half else 0)
    assert plan.clusters <= whole + half
    seen: Counter[tuple[int, int]] = Counter()
    owners: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    slots_of: dict[int, set[int]] = defaultdict(set)
    for number in range(whole + half):
        for rank in range(1 if number < whole else CLUSTER):  # in a whole block the ranks have different tokens
            block, column, again = place(number, rank, plan)
            if column >= plan.columns:
                continue
            seen[block, column] += 1
            slot = column % again
            if (block, slot) not in owners:
                assert column < again  # the kernel takes this for a slot's first use
            owners[block, slot].add((number % (WORKERS * plan.clusters), rank))
            slots_of[block].add(slot)
    assert len(seen) == (plan.blocks + plan.half) * plan.columns
    assert set(seen.values()) == {1}
    assert all(len(blocks) == 1 for blocks in owners.values())
    for block, slots in slots_of.items():
        assert slots == set(range(len(slots)))
        assert len(slots) <= (plan.slots if block < plan.blocks else CLUSTER * WORKERS * plan.clusters)
    assert plan.size == plan.blocks * 256 * plan.slots + plan.half * 128 * CLUSTER * WORKERS * plan.clusters


def test_slots_are_few() -> None:
    assert Schedule.of(8192 + 100, 128256, 4096, 132).size * 3 * 4 < 8 * 2**20


def place(number: int, rank: int, plan: Schedule) -> tuple[int, int, int]:
    """Block and column of a thread block's tile, and after how many columns its slots are used again."""
    if number >= plan.blocks * plan.columns:
        column = (number - plan.blocks * plan.columns) * CLUSTER + rank
        return plan.blocks, column, CLUSTER * WORKERS * plan.clusters
    first = number // (plan.group * plan.columns) * plan.group
    height = min(plan.group, plan.blocks - first)
    rest = number - first * plan.columns
    again = plan.periods[first + plan.group >= plan.blocks]
    assert again == plan.period(height)
    return first + rest % height, rest // height, again


@pytest.mark.parametrize(
    ("scale", "softcap", "bias"), [*itertools.product([1.0, 0.3, -2.0], [None, 0.5, 30.0], [False, True])]
)
def test_factors_make_the_kernels_exponent_that_of_the_logit(scale: float, softcap: float | None, bias: bool) -> None:
    inner, outer = statistics._factors(scale, softcap, bias)
    assert outer > 0
    product = torch.linspace(-40, 40, 81, dtype=torch.float64)
    shift = 0.7 if bias else 0.0
    z = (product + shift) * scale
    x = product * inner + shift * inner
    if softcap is not None:
        z, x = softcap * torch.tanh(z / softcap), 1 - 2 / (1 + 2**x)
    torch.testing.assert_close(x * outer * math.log2(math.e) * math.log(2), z)


@pytest.mark.parametrize("make", ["whole", "strided", "transposed", "unaligned", "narrow", "repeated"])
def test_rows_for_tma(make: str) -> None:
    base = torch.arange(64 * 64, dtype=torch.float32).bfloat16()
    rows = {
        "whole": base.view(64, 64),
        "strided": base.view(64, 64)[:, 8:24],
        "transposed": base.view(64, 64).t(),
        "unaligned": base[1:].as_strided((8, 16), (16, 1), 1),
        "narrow": base.as_strided((8, 16), (20, 1)),
        "repeated": base[:16].expand(8, 16),
    }[make]
    found = statistics.aligned(rows)
    assert torch.equal(found, rows)
    assert (found is rows) == (make in ("whole", "strided"))
    assert found.stride(1) == 1
    assert found.stride(0) % 8 == 0
    assert found.data_ptr() % 16 == 0


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, ignore_index: int | None, scale: float,
    softcap: float | None, temperature: float | Tensor = 1.0, entropy: bool = False,
) -> statistics.Statistics:
    """What the kernels compute, from whole logits."""
    assert input.dtype == weight.dtype == torch.bfloat16
    z = input.float() @ weight.float().T
    if bias is not None:
        z = z + bias.float().clamp(min=MASKED)
    z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = z.log_softmax(1)
    index = target.clamp(0, len(weight) - 1)
    chosen = torch.where(index == target, logp.gather(1, index[:, None])[:, 0], torch.nan)
    rows = [chosen, z.logsumexp(1), -(logp.exp() * logp).sum(1)]
    chosen, lse, uncertainty = (r if ignore_index is None else r.where(target != ignore_index, 0.0) for r in rows)
    return statistics.Statistics(chosen, lse, uncertainty if entropy else None)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("linear_logp", {}),
        ("linear_logp", {"return_entropy": True, "return_lse": True, "ignore_index": -100}),
        ("linear_logp", {"ignore_index": -100, "temperature": "each", "softcap": 5.0, "bias": True}),
        ("linear_logp", {"ignore_index": -100, "temperature": 0.5, "logit_scale": -0.5}),
        ("flce", {"reduction": "none", "lse_square_scale": 0.1, "return_z_loss": True, "use_token_scaling": True}),
        ("flce", {"bias": True, "ce_weight": True, "softcap": 5.0}),
    ],
)
def test_adapters(op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flce, linear_logp):
        monkeypatch.setattr(module, "statistics", plain)
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=made).bfloat16()
    input = torch.randn(9, 16, generator=made).bfloat16()
    target = torch.randint(0, 50, (9,), generator=made)
    if op == "flce" or "ignore_index" in options:
        target[2] = -100
        input[2] = torch.nan
    target[5] = 50
    options = dict(options)
    if options.get("temperature") == "each":
        options["temperature"] = torch.rand(9, generator=made) + 0.5
    for name in ("bias", "ce_weight"):
        if name in options:
            options[name] = torch.rand(50, generator=made)
    args = get_op(op).request(input, weight, target, **options).args
    outputs, residual = registry.get_backend("cutedsl").kernels[op].forward(args)
    assert residual is None
    expected = get_op(op).rows(args)
    for found, right in zip(outputs, expected, strict=True):
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            torch.testing.assert_close(found, right, equal_nan=True)


def _exponentials(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, counts: Tensor, held: Tensor, *, scale: float,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels leave, from whole logits."""
    z = input.float() @ weight.float().T
    if bias is not None:
        z = z + bias.float().clamp(min=MASKED)
    z = z * scale / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    at = target[:, None]
    logit, lse = z.gather(1, at)[:, 0], z.logsumexp(1)
    e = torch.exp(z - logit[:, None])
    others = e.scatter(1, at, 0.0).sum(1)
    e = torch.where(counts[:, None] == 0, 0.0, e.scatter(1, at, -others[:, None]))
    held.copy_(e.T)
    factors = -torch.expm1(logit - lse) / others.bfloat16().float()
    return tuple(torch.where(counts == 0, 0.0, rows) for rows in (lse, logit, factors))  # type: ignore[return-value]


def _add(config: Adding) -> Callable[..., None]:
    """What adds a product up."""

    def run(
        states: Tensor, gradient: Tensor, more_states: Tensor | None, more_gradient: Tensor | None, total: Tensor,
        ring: Tensor, read: Tensor | None, clusters: int,
    ) -> None:
        assert clusters == min(66, -(-total.shape[0] // COLUMN) * -(-total.shape[1] // (CLUSTER * TOKENS)))
        assert ring.shape == (clusters + 1, RING)
        assert ring.is_contiguous()
        assert not ring.any()
        assert (read is None) == (not config.inside)
        if read is not None:
            assert (read.numel() - 1) * COLUMN < total.shape[0] <= read.numel() * COLUMN
            assert not read.any()
        found = gradient.float() @ states.float()
        assert (more_states is None) == (more_gradient is None) == (not config.more)
        if more_states is not None and more_gradient is not None:
            found += more_gradient.float() @ more_states.float()
        total.copy_(found + total.float() if config.add else found)

    return run


def _small(config: Scaling | Sorting | Adding) -> Callable[..., None]:
    """What scales rows, what sorts labels, and what adds products up."""
    if isinstance(config, Adding):
        return _add(config)

    def scale(rows: Tensor, factors: Tensor, out: Tensor, blocks: int) -> None:
        assert rows.dim() == out.dim() == 2
        assert isinstance(config, Scaling)
        assert factors.shape == (rows.shape[0] if config.each else 1,)
        by = factors[:, None] if config.each else factors
        out.copy_(torch.where(by == 0, 0.0, rows * by) if config.each else rows * by)

    def sort(
        target: Tensor, index: Tensor, valid: Tensor | None, counts: Tensor, ignore_index: int, classes: int
    ) -> None:
        assert isinstance(config, Sorting)
        found = Labels.of(target, ignore_index if config.ignores else None, classes)
        assert (valid is None) == (found.valid is None)
        for out, one in ((index, found.index), (valid, found.valid), (counts, found.counts)):
            if out is not None and one is not None:
                assert (out.shape, out.dtype, out.is_contiguous()) == (one.shape, one.dtype, True)
                out.copy_(one)

    return scale if isinstance(config, Scaling) else sort


@pytest.mark.parametrize("ignore_index", [None, -100, 3, 0])
def test_labels_are_sorted_in_one_launch(ignore_index: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(launch, "kernel", lambda config: launched.append(config) or _small(config))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    target, states = torch.tensor([0, 3, -100, 7, 50, -1, 3, 2**40])[::2], torch.empty(4, 16)
    labels, found = launch.admit(states, target, ignore_index, 50, torch.float32)
    assert found is states
    assert launched == [Sorting(ignore_index is not None)]
    right = Labels.of(target, ignore_index, 50)
    assert torch.equal(labels.index, right.index)
    torch.testing.assert_close(labels.counts, right.counts, rtol=0, atol=0, equal_nan=True)
    assert (labels.valid is None) == (ignore_index is None)


def _workspace(
    classes: int, hidden: int, tokens: int, dtype: torch.dtype, rows: int
) -> tuple[Tensor, Tensor]:
    total, held = storage.workspace(torch.empty(1), (classes, hidden), dtype, tokens, dtype, rows)
    return total.zero_(), held.normal_()


@pytest.mark.parametrize(
    ("hidden", "dtype", "first", "inside", "pairs", "rows", "one"),
    [
        (256, torch.bfloat16, True, True, 1, 256, True),
        (512, torch.float16, True, False, 1, 64, True),
        (256, torch.bfloat16, False, False, 1, 64, True),
        (264, torch.float16, False, False, 1, 64, True),  # no whole tiles
        (256, torch.float32, True, True, 1, 256, False),
        (48, torch.bfloat16, True, True, 1, 192, True),
        (48, torch.bfloat16, True, True, 1, 64, False),  # a tile would cover its own classes
        (256, torch.bfloat16, True, True, 2, 256, True),
        (256, torch.bfloat16, True, False, 2, 256, False),
        (256, torch.bfloat16, True, True, 3, 256, False),
    ],
)
def test_sums_of_products_are_one_launch_where_they_can_be(
    hidden: int, dtype: torch.dtype, first: bool, inside: bool, pairs: int, rows: int, one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(launch, "kernel", lambda config: launched.append(config) or _add(config))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    total, held = _workspace(400, hidden, 40, dtype, rows)
    chunks = [held if inside else held.clone(), *[torch.randn(400, 24).to(dtype) for _ in range(pairs - 1)]]
    given = [(left, torch.randn(left.shape[1], hidden).to(dtype)) for left in chunks]
    if not first:
        total.normal_()
    right = sum((left.double() @ states.double() for left, states in given), 0.0 if first else total.double())
    launch.accumulate(total, given, dtype, first=first, rows=rows, inside=inside, once=True)
    assert launched == ([Adding(dtype, not first, inside, pairs > 1)] if one else [])
    torch.testing.assert_close(total.double(), right, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("tokens", [9, 40])  # fewer than H, and more
@pytest.mark.parametrize("needs", [(True, True, False), (True, False, False), (False, True, False)])
@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("linear_logp", {"ignore_index": -100, "temperature": "each", "bias": True}),
        ("linear_logp", {"logit_scale": -0.5, "temperature": 0.7}),
        ("flce", {"ce_weight": True, "use_token_scaling": True}),
        ("flce", {"bias": True, "reduction": "none"}),
        ("flce", {"accum_dtype": None}),
    ],
)
def test_gradients(
    op: str, options: dict[str, Any], needs: tuple[bool, ...], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "statistics", plain)
    monkeypatch.setattr(softmax, "exponentials", _exponentials)
    monkeypatch.setattr(launch, "kernel", _small)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=made).bfloat16()
    input = torch.randn(tokens, 16, generator=made).bfloat16()
    target = torch.randint(0, 50, (tokens,), generator=made)
    options = dict(options)
    if op == "flce" or "ignore_index" in options:
        target[2] = -100
        input[2] = torch.nan
    if options.get("temperature") == "each":
        options["temperature"] = torch.rand(tokens, generator=made) + 0.5
    for name in ("bias", "ce_weight"):
        if name in options:
            options[name] = torch.rand(50, generator=made)
    called = get_op(op)
    args = dataclasses.replace(called.request(input, weight, target, **options).args, needs=needs)
    kernel = registry.get_backend("cutedsl").kernels[op]
    outputs, residual = kernel.forward(args)
    wide = dataclasses.replace(
        args, input=input.nan_to_num().float().requires_grad_(), weight=weight.float().requires_grad_()
    )
    expected = called.rows(wide)
    torch.testing.assert_close(outputs[0], expected[0].detach())
    whole = getattr(args, "row_scale", None) is not None
    by = args.row_scale if whole else torch.randn(tokens, generator=made)
    by = torch.where(target == -100, 0.0, by)
    upstream = Upstream((by * 3, *[None] * (len(outputs) - 1)), torch.tensor(3.0) if whole else None)
    found = kernel.backward(args, residual, upstream)
    right = torch.autograd.grad(expected[0], (wide.input, wide.weight), by * 3)
    assert found[2] is None
    for need, one, other in zip(needs, found, right, strict=False):
        assert (one is not None) == need
        if one is not None:
            assert one.dtype == torch.bfloat16
            torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
    if found[0] is not None:
        assert torch.equal(found[0][target == -100], torch.zeros(int((target == -100).sum()), 16).bfloat16())


@pytest.mark.parametrize("blocks", [132 * 16, 132 * 3, 7])
@pytest.mark.parametrize("tokens", [1, 4, 5, 37, 128, 500, 512, 513, 4000])
@pytest.mark.parametrize("vocabulary", [1, 17, 128256])
def test_every_logit_has_one_thread(vocabulary: int, tokens: int, blocks: int) -> None:
    width, columns, parts = divergence.cut(vocabulary, tokens, blocks)
    assert divergence._THREADS % width == 0
    assert (columns - 1) * width * divergence._TOKENS < tokens <= columns * width * divergence._TOKENS
    assert 1 <= parts <= max(1, blocks // columns)
    assert (parts - 1) * (divergence._THREADS // width) < vocabulary  # none is without classes


def _logits(
    input: Tensor, weight: Tensor, bias: Tensor | None, held: Tensor, *, scale: float, softcap: float | None,
    temperature: float,
) -> Tensor:
    """What the product leaves, from whole logits."""
    assert input.dtype == weight.dtype
    z = input.float() @ weight.float().T
    if bias is not None:
        z = z + bias.float().clamp(min=MASKED)
    z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature * math.log2(math.e)
    held.copy_(z.T)
    top = z.amax(1)
    return torch.stack([top, torch.exp2(z - top[:, None]).sum(1).log2()])


def _compared(config: Comparison) -> Any:
    """What compares two models' logits, all at once."""

    def run(
        q: Tensor, p: Tensor, q_lse: Tensor, p_lse: Tensor, sums: Tensor | None, upstream: Tensor | None,
        kl: Tensor | None, out: Tensor | None, teacher: float, student: float, chain: float, width: int, columns: int,
        parts: int,
    ) -> None:
        assert (sums is not None, out is not None) == (config.loss, config.gradient is not None)
        assert (kl is not None) == (out is not None and not config.loss)
        log_q, log_p = ((x - lse[0] - lse[1]) * math.log(2.0) for x, lse in ((q, q_lse), (p, p_lse)))
        log_m = {0.0: log_q, 1.0: log_p}.get(config.beta)  # type: ignore[arg-type]
        if log_m is None:
            log_m = torch.logaddexp(log_p + math.log(teacher), log_q + math.log(student))
        of_p, of_q = ((x.exp() * (x - log_m)).sum(0) for x in (log_p, log_q))
        if sums is not None:
            found = {0.0: (of_p,), 1.0: (of_q,)}.get(config.beta, (of_p, of_q))  # type: ignore[arg-type]
            assert sums.shape == (len(found), parts, q.shape[1])
            for plane, one in zip(sums, found, strict=True):
                plane.copy_((one / parts).expand_as(plane))
        if out is not None:
            assert upstream is not None
            assert out.dtype == config.gradient
            assert out.stride(0) % 4 == 0
            assert out.data_ptr() % 8 == 0
            g = log_q.exp() - log_p.exp()
            if config.beta != 0.0:
                assert kl is not None
                g = log_q.exp() * (log_q - log_m - kl) * (1.0 if config.beta == 1.0 else student)
            out.copy_(torch.where(upstream == 0.0, 0.0, g * upstream * chain))

    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False), (False,) * 3])
@pytest.mark.parametrize(
    ("tokens", "budget", "options"),
    [
        (9, 1024, {"beta": 0.0}),
        (9, 1024, {"beta": 1.0, "student_bias": True, "teacher_bias": True, "temperature": 0.7}),
        (40, 1024, {"beta": 0.3, "student_logit_scale": -0.5, "teacher_softcap": 3.0, "reduction": "none"}),
        (40, 0.005, {"beta": 0.5, "accum_dtype": torch.float32}),  # chunks of tokens that begin anywhere
        (40, 0.005, {"beta": 0.0, "student_bias": True}),
    ],
)
def test_divergences(
    tokens: int, budget: float, options: dict[str, Any], needs: tuple[bool, ...], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(divergence, "logits", _logits)
    monkeypatch.setattr(divergence, "kernel", _compared)
    monkeypatch.setattr(divergence, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch, "kernel", _small)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    made = torch.Generator().manual_seed(0)
    options, called = dict(options), get_op("jsd")
    student, teacher = ((torch.randn(50, h, generator=made) / h**0.5).to(dtype) for h in (16, 24))
    input, other = (torch.randn(tokens, h, generator=made).to(dtype) for h in (16, 24))
    target = torch.randint(0, 50, (tokens,), generator=made)
    target[2] = -100
    input[2] = other[2] = torch.nan
    for name in ("student_bias", "teacher_bias"):
        if name in options:
            options[name] = torch.rand(50, generator=made)
            options[name][7] = -torch.inf if "teacher_bias" in options else -3.0
    args = dataclasses.replace(called.request(input, student, other, teacher, target, **options).args, needs=needs)
    kernel = registry.get_backend("cutedsl").kernels["jsd"]
    bias = None if args.student_bias is None else args.student_bias.clone().requires_grad_()
    wide = dataclasses.replace(
        args, student_input=input.float().requires_grad_(), student_weight=student.float().requires_grad_(),
        student_bias=bias, teacher_input=other.float(), teacher_weight=teacher.float(), compute_dtype=torch.float32,
        teacher_compute_dtype=torch.float32,
    )  # fmt: skip
    if bias is not None and args.teacher_bias is not None:  # 0 * inf: in the reference a finite bias masks
        bias.data.clamp_(min=-1e4)
        wide = dataclasses.replace(wide, teacher_bias=args.teacher_bias.clamp(min=-1e4))
    expected = called.rows(wide)[0]
    assert expected is not None
    by = torch.randn(tokens, generator=made) if args.row_scale is None else args.row_scale * 3
    by = torch.where(target == -100, 0.0, by)
    with headmux_budget(budget):
        (loss,), residual = kernel.forward(args)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        if not any(needs):
            assert residual is None
            return
        whole = args.row_scale is not None
        found = kernel.backward(args, residual, Upstream((by,), torch.tensor(3.0) if whole else None))
    wanted = (wide.student_input, wide.student_weight, *([] if bias is None else [bias]))
    right = torch.autograd.grad(expected, wanted, by)
    for need, one, other_one in zip(needs, found, right, strict=False):
        assert (one is not None) == need
        if one is not None:
            atol = 1.5e-2 * float(other_one.abs().max())
            torch.testing.assert_close(one.float(), other_one, rtol=2e-2, atol=atol)
    if found[0] is not None:
        assert not found[0][2].any()


class _Cluster:
    """A model of a cluster's warps, of what each waits for, and of the ring by which they are told of claims."""

    def __init__(self, depth: int, tiles: int) -> None:
        self.depth, self.tiles = depth, tiles
        self.ring = [-1] * RING
        self.loaded = [0] * CLUSTER  # stages that a thread block's producer has filled
        self.used = [0] * CLUSTER  # stages that its warpgroups have passed on
        self.turn = [0] * CLUSTER  # tiles that its warpgroups have multiplied

    def told(self, claim: int) -> Callable[[], bool]:
        def ready() -> bool:
            assert self.ring[claim % RING] <= claim, "lost"
            return self.ring[claim % RING] == claim

        return ready

    def producer(self, rank: int) -> Iterator[Callable[[], bool]]:
        for claim in range(-1, self.tiles):
            if rank == 0:
                self.ring[(claim + 1) % RING] = claim + 1
            else:
                yield self.told(claim + 1)
            for _ in range(self.depth if claim >= 0 else 0):
                yield lambda: self.loaded[rank] < min(self.used) + STAGES
                self.loaded[rank] += 1

    def consumer(self, rank: int, one: int) -> Iterator[Callable[[], bool]]:
        for claim in range(one + 1):
            yield self.told(claim)
        for tile in range(one, self.tiles, WORKERS):
            yield self.told(tile + 1)
            yield lambda tile=tile: self.turn[rank] == tile
            for _ in range(self.depth):
                yield lambda: min(self.loaded) > self.used[rank]
                self.used[rank] += 1
            self.turn[rank] += 1
            if tile + 1 < self.tiles:
                yield self.told(tile + WORKERS)


@pytest.mark.parametrize("slow", range(CLUSTER * (1 + WORKERS)))
@pytest.mark.parametrize("depth", [1, 2, STAGES, 7])
def test_no_claim_is_lost_in_the_ring(depth: int, slow: int) -> None:
    """In any order of the warps' steps, with one that moves only when no other can, too."""
    drawn = random.Random(depth * 10 + slow)
    for often in (0.0, 0.02, 1.0):
        cluster = _Cluster(depth, tiles=40)
        running = [cluster.producer(rank) for rank in range(CLUSTER)]
        running += [cluster.consumer(rank, one) for rank in range(CLUSTER) for one in range(WORKERS)]
        waiting = {i: next(steps) for i, steps in enumerate(running)}
        while waiting:
            able = [i for i, ready in waiting.items() if ready()]
            others = [i for i in able if i != slow]
            i = drawn.choice(others if others and drawn.random() >= often else able)
            step = next(running[i], None)
            if step is None:
                del waiting[i]
            else:
                waiting[i] = step
        assert cluster.turn == [40] * CLUSTER
