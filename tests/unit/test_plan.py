"""The memory budget: where it comes from, what it may be, and that plans keep to it."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch

import headmux
from headmux import get_op
from headmux.backends.common.budget import MIB, VARIABLE, budget, budget_bytes, budget_for, current
from headmux.backends.common.chunks import Chunks
from headmux.backends.common.head import Head, Steps
from headmux.backends.common.plan import Plan, even, pieces, plan

COPIES = 3
SHAPES = list(
    itertools.product((1, 7, 64, 1000, 8192, 65536), (2, 11, 1000, 32000, 128256, 262144), (8, 4096, 16384))
)


@pytest.mark.parametrize("mb", [0.02, 1, 56, 256, 4096])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("widened", [False, True])
def test_plans_keep_to_the_budget(mb: float, device: str, widened: bool) -> None:
    """But for the least that can be held: one row of one token's block, the places of a row of logits."""
    with budget(mb):
        for (tokens, vocabulary, hidden), wide, held in itertools.product(SHAPES, (4, 8), (2, 4)):
            p = plan(
                tokens, vocabulary, hidden, wide_bytes=wide, held_bytes=held, device_type=device, widened=widened
            )
            again = plan(
                tokens, vocabulary, hidden, wide_bytes=wide, held_bytes=held, device_type=device, widened=widened
            )
            assert p == again
            most = min(tokens, p.tokens)
            rows = p.rows(most)
            block = rows * (most * wide + (hidden * wide if widened else 0))
            least_block = most * wide + (hidden * wide if widened else 0)
            room = p.room * vocabulary * held
            assert 1 <= p.tokens <= max(1, tokens)
            assert 1 <= rows <= vocabulary
            assert 1 <= p.chunk <= p.room <= tokens
            assert p.chunk % 64 == 0 or p.chunk == tokens or p.room < 64
            limit = mb * MIB
            blocks = COPIES * (block if block > least_block else 0)
            assert blocks + (room if p.room > 16 else 0) <= limit, (tokens, vocabulary, hidden, p)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_bigger_budget_never_means_smaller_pieces(device: str) -> None:
    for tokens, vocabulary, hidden in SHAPES:
        chunks = []
        for mb in (1, 16, 64, 256, 1024, 8192):
            with budget(mb):
                p = plan(tokens, vocabulary, hidden, wide_bytes=4, held_bytes=2, device_type=device, widened=True)
            chunks.append(math.ceil(tokens / p.chunk))
        assert chunks == sorted(chunks, reverse=True)


def test_blocks_cover_the_vocabulary_once() -> None:
    for tokens, vocabulary, hidden in SHAPES:
        p = plan(tokens, vocabulary, hidden, wide_bytes=4, held_bytes=2, device_type="cpu", widened=True)
        blocks = list(p.blocks(min(tokens, p.tokens)))
        assert blocks[0].start == 0
        assert blocks[-1].stop == vocabulary
        assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))


@pytest.mark.parametrize(("total", "size"), [(0, 3), (1, 3), (3, 3), (10, 3), (10, 100)])
def test_pieces(total: int, size: int) -> None:
    found = list(pieces(total, size))
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(total))
    assert all(0 < s.stop - s.start <= size for s in found)


@pytest.mark.parametrize("total", [1, 15, 16, 100, 410, 1000, 4095, 4096])
@pytest.mark.parametrize("most", [1, 15, 16, 24, 48, 100, 448, 512, 1024, 5000])
def test_even_pieces(total: int, most: int) -> None:
    """Whole rows of places, but for the last piece or where not even one fits."""
    size = even(total, most)
    assert 1 <= size <= max(most, 1)
    if total <= most:
        assert size == total
    elif most >= 16:
        assert size % 16 == 0
        assert -(-total // size) <= -(-total // (most - most % 16))


@pytest.mark.parametrize(
    ("count", "room", "expected"),
    [
        (4096, 1040, [832, 832, 832, 832, 768]),
        (2000, 832, [832, 832, 336]),
        (1040, 1040, [1040]),  # all
        (4096, 1664, [1536, 1536, 1024]),  # two
        (2048, 816, [768, 768, 512]),  # none
        (1665, 1040, [1024, 641]),  # not even a third of a last one
        (2048, 1040, [832, 832, 384]),
    ],
)
def test_chunks_that_are_only_looked_at(count: int, room: int, expected: list[int]) -> None:
    chunk = room if room >= count else room - room % 256
    cut = Plan(block=1, row=0, wide=4, tokens=8, room=room, chunk=chunk, vocabulary=3)
    head = Head(torch.zeros(count, 8), torch.zeros(3, 8), None, torch.float32, 1.0, None, 1.0)
    chunks = Chunks(head, (False,) * 3, (torch.float32,) * 3, None, torch.float32, cut, Steps())
    found = list(chunks.outside(prefer=832))
    assert [s.stop - s.start for s, _ in found] == expected
    assert [s.start for s, _ in found] == [0, *itertools.accumulate(expected)][:-1]
    assert all(held.shape == (3, s.stop - s.start) for s, held in found)


def test_defaults() -> None:
    assert current() is None
    assert budget_for("cpu") == 56 * MIB
    assert budget_for("cuda") == budget_for("xpu") == 289 * MIB
    assert budget_for("cuda", share=2) == 578 * MIB
    with budget(7):
        assert budget_for("cuda", share=2) == 7 * MIB


def test_order_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " 2.5 ")
    assert current() == budget_for("cpu") == budget_for("cuda") == int(2.5 * MIB)
    with budget(3):
        assert current() == 3 * MIB
        with budget_bytes(None):
            assert current() == 3 * MIB
        with budget_bytes(7):
            assert current() == 7
        assert current() == 3 * MIB
    monkeypatch.setenv(VARIABLE, "  ")
    assert current() is None
    assert headmux.budget is budget


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e400", "64MB", "sixty"])
def test_bad_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Told at the call, naming the variable and the value."""
    monkeypatch.setenv(VARIABLE, value)
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{value}' must be a number of MiB above 0"):
        get_op("flce")(x, x, torch.tensor([0, 1]))


@pytest.mark.parametrize("value", [0, -1, 0.0, math.nan, math.inf])
def test_bad_budget(value: float) -> None:
    with pytest.raises(ValueError, match=r"budget=.* must be a number of MiB above 0"), budget(value):
        pass


@pytest.mark.parametrize("value", ["64", None, True, torch.tensor(64)])
def test_budget_of_another_type(value: object) -> None:
    with pytest.raises(TypeError, match="budget takes a number of MiB"), budget(value):  # type: ignore[arg-type]
        pass


def test_budget_is_of_the_thread() -> None:
    seen: list[int | None] = []
    with budget(5):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("op", ["flce", "jsd", "linear_logp"])
def test_results_do_not_depend_on_the_budget(op: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (50, 700))
    t = torch.randint(0, 700, (50,), generator=generator)
    found = []
    for mb in (0.02, 0.5, 64):
        with budget(mb):
            args = (x, w, x.detach() * 2, w.detach()) if op == "jsd" else (x, w, t)
            loss = get_op(op)(*args, impl="torch").sum()
        found.append((loss.detach(), *torch.autograd.grad(loss, (x, w))))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("mb", "again"), [(8, False), (0.05, True)])
def test_logits_are_formed_again_only_where_there_is_no_room_for_them(
    frozen: bool, mb: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than hidden features: those that do not fit inside grad_weight are kept if the budget holds them."""
    formed = []
    real = Head.logits

    def logits(self: Head, weight: torch.Tensor, rows: slice, tokens: slice, *others: torch.Tensor) -> torch.Tensor:
        formed.append((rows.stop - rows.start) * (tokens.stop - tokens.start))
        return real(self, weight, rows, tokens, *others)

    monkeypatch.setattr(Head, "logits", logits)
    tokens, hidden, vocabulary = 100, 16, 257
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=not frozen)
    with budget(mb):
        logp = get_op("linear_logp")(states, weight, torch.randint(0, vocabulary, (tokens,)), impl="torch")
        assert sum(formed) == tokens * vocabulary
        logp.sum().backward()
    repeated = sum(formed) - tokens * vocabulary
    assert 0 < repeated < tokens * vocabulary if again else repeated == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_more_than_the_held_logits_is_allocated_at_once(dtype: torch.dtype) -> None:
    tokens, hidden, vocabulary = 200, 8, 8000
    states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocabulary, (tokens,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        get_op("flce")(states, weight, target, impl="torch").backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert tokens * vocabulary < largest <= tokens * vocabulary * dtype.itemsize + MIB
