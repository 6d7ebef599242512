"""What of the CuTe DSL kernels a CPU can show: their scalars run here, layouts are traced, and Hopper code is built."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import from_dlpack

from headmux.backends.common.head import MASKED
from headmux.backends.common.labels import Labels
from headmux.backends.common.storage import apart, workspace
from headmux.backends.cutedsl import build, diverge, divergence, exponentials, labels, scalars
from headmux.backends.cutedsl.build import Adding, Comparison, Config, Kind, Scaling, Sorting
from headmux.backends.cutedsl.forward import tiled_mma
from headmux.backends.cutedsl.schedule import CLUSTER, COLUMN, TOKENS, WORKERS, Schedule

PLAIN = Config(torch.bfloat16)


@cute.jit
def _place(
    number: Int32, rank: Int32, blocks: Int32, columns: Int32, group: Int32, period: Int32, last_period: Int32,
    slots: Int32, workers: Int32, out: cute.Tensor,
):
    block, column = scalars.tile_at(number, rank, blocks, columns, group)
    slot, step, again = scalars.slots_of(block, blocks, columns, group, period, last_period, slots, workers)
    found = (block, column, slot, step, again)
    for i in cutlass.range_constexpr(5):
        out[i] = found[i]


@cute.jit
def _combine(sets: cute.Tensor, out: cute.Tensor):
    top, total, moment = Float32(scalars.LOWEST), Float32(0.0), Float32(0.0)
    for i in range(sets.shape[0]):
        top, total, moment = scalars.combine(top, total, moment, sets[i, 0], sets[i, 1], sets[i, 2], True)
    out[0] = top
    out[1] = total
    out[2] = moment


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "hidden"), [(1, 1, 8), (5000, 2000, 4096), (2660, 1300, 8192), (256, 30000, 64)]
)
def test_tiles_and_slots_are_those_of_the_schedule(tokens: int, vocabulary: int, hidden: int) -> None:
    plan = Schedule.of(tokens, vocabulary, hidden, 132)
    out = torch.zeros(5, dtype=torch.int32)
    run = cute.compile(_place, *[Int32(1)] * 9, from_dlpack(out))
    whole = plan.blocks * plan.columns
    half = -(-plan.columns // CLUSTER) if plan.half else 0
    for number, rank in itertools.product(range(whole + half), range(CLUSTER)):
        run(
            number, rank, plan.blocks, plan.columns, plan.group, *plan.periods, plan.slots, WORKERS * plan.clusters,
            from_dlpack(out),
        )
        block, column, slot, step, again = out.tolist()
        assert slot == block * TOKENS * CLUSTER * plan.slots
        if number < whole:
            first = block // plan.group * plan.group
            height = min(plan.group, plan.blocks - first)
            assert number == first * plan.columns + column * height + block - first
            assert (step, again) == (plan.slots, plan.period(height))
        else:
            assert (block, column) == (plan.blocks, (number - whole) * CLUSTER + rank)
            assert step == again == WORKERS * plan.clusters * CLUSTER
            assert slot + TOKENS * step == plan.size


@pytest.mark.parametrize("spread", [1.0, 30.0, 3000.0])
def test_combined_statistics(spread: float) -> None:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(6, 100, generator=made, dtype=torch.float64) * spread
    x[3] = -1e30  # a block of masked classes
    tops = x.amax(1)
    e = torch.exp2(x - tops[:, None])
    sets = torch.stack([tops, e.sum(1), (e * (x - tops[:, None])).sum(1)], 1).float()
    sets = torch.cat([torch.tensor([[scalars.LOWEST, 0.0, 0.0]]), sets])  # and an empty one
    out = torch.zeros(3)
    cute.compile(_combine, from_dlpack(sets), from_dlpack(out))(from_dlpack(sets), from_dlpack(out))
    top, total, moment = out.tolist()
    z = x.flatten() * math.log(2.0)
    assert (top + math.log2(total)) * math.log(2.0) == pytest.approx(z.logsumexp(0).item(), rel=1e-6)
    p = z.softmax(0)
    entropy = -torch.xlogy(p, p).sum().item()
    assert (math.log2(total) - moment / total) * math.log(2.0) == pytest.approx(entropy, rel=1e-5, abs=1e-5)


@cute.jit
def _with_label(sets: cute.Tensor, out: cute.Tensor):
    for i in range(sets.shape[0]):
        lse, factor = scalars.with_label(sets[i, 0], sets[i, 1], sets[i, 2], sets[i, 3])
        out[i, 0] = lse
        out[i, 1] = factor


def test_exponentials_become_probabilities_and_labels_p_minus_1() -> None:
    tops, sums, labels = torch.tensor([0.0, -30.0, 900.0]), torch.tensor([1e-6, 0.3, 1.0, 77.7, 1e9]), torch.tensor(
        [-300.0, -20.0, -1.0, 0.0, 0.4, 15.0, 200.0]
    )
    sets = torch.cartesian_prod(tops, sums, labels)
    sets[:, 2] += sets[:, 0]  # labels from far below to far above
    alone = torch.tensor([[50.0, 0.0, -200.0], [50.0, 0.0, 60.0]])  # and such beside which nothing is left
    sets = torch.cat([sets, alone])
    sets = torch.stack([sets[:, 0], sets[:, 1], sets[:, 1].bfloat16().float(), sets[:, 2]], 1)
    out = torch.zeros(len(sets), 2)
    cute.compile(_with_label, from_dlpack(sets), from_dlpack(out))(from_dlpack(sets), from_dlpack(out))
    top, others, stored, exact = sets.double().unbind(1)
    lse = torch.logaddexp2(top + others.log2(), exact)
    torch.testing.assert_close(out[:, 0].double(), lse, rtol=1e-6, atol=1e-5)
    rest = torch.exp2(top + others.log2() - lse)  # 1 - p
    torch.testing.assert_close(out[:, 1].double() * stored, rest, rtol=2e-6, atol=1e-37)


@cute.jit
def _with_guess(z: cute.Tensor, at: Int32, guess: Float32, used: cute.Tensor, e: cute.Tensor, out: cute.Tensor):
    """What the kernels make of a token's logits [tiles, classes] in one slot; its label is in the first tile."""
    most, sum = Float32(scalars.LOWEST), Float32(0.0)
    exact = z[0, at]
    z[0, at] = Float32(scalars.LOWEST)
    for i in range(z.shape[0]):
        top, peak = scalars.larger(guess, most), z[i, 0]
        total = Float32(0.0)
        for j in range(z.shape[1]):
            peak = scalars.larger(peak, z[i, j])
        top = scalars.raised(top, peak)
        for j in range(z.shape[1]):
            e[i, j] = scalars.exp2(z[i, j] - top)
            total = total + e[i, j]
        used[i] = top
        most, sum, _ = scalars.combine(most, sum, Float32(0.0), top, total, Float32(0.0), False)
    for i in range(z.shape[0]):
        if most > used[i]:
            for j in range(z.shape[1]):
                e[i, j] = e[i, j] * scalars.exp2(used[i] - most)
    lse, factor = scalars.with_label(most, sum, sum, exact)
    out[0], out[1], out[2] = lse, factor, sum


@pytest.mark.parametrize("label", [-300.0, -45.0, 0.0, 45.0, 300.0])
@pytest.mark.parametrize(
    ("masked", "factor"),
    [
        *itertools.product(["none", "label", "tile", "others", "all"], [1.0, 1.4427, 1e3]),
        *itertools.product(["label", "tile", "others"], [1e9]),  # then what is masked is -inf
    ],
)
def test_a_guess_far_below_is_raised(masked: str, factor: float, label: float) -> None:
    made = torch.Generator().manual_seed(2)
    z = torch.randn(4, 8, generator=made) * 20
    z[0, 3] = label
    lost = torch.zeros(4, 8, dtype=torch.bool)
    {"none": lost[:0], "label": lost[0, 3], "tile": lost[0], "others": lost, "all": lost}[masked].fill_(True)
    if masked == "others":
        lost[0, 3] = False
    z[lost] = torch.tensor(MASKED) * factor
    guess = float(z[0, 3].ceil())
    right = z.double().clamp(min=scalars.LOWEST)
    used, e, out = torch.zeros(4), torch.zeros(4, 8), torch.zeros(3)
    args = (z, used, e, out)
    run = cute.compile(_with_guess, from_dlpack(z), Int32(3), Float32(guess), *map(from_dlpack, args[1:]))
    run(from_dlpack(z), 3, guess, *map(from_dlpack, args[1:]))
    assert all(one.isfinite().all() for one in (used, e, out))
    assert e.max() <= 2.0**scalars.MOST
    e[0, 3] = -out[2]
    p = torch.softmax(right.flatten() * math.log(2.0), 0).view(4, 8)
    p[0, 3] = -(p.sum() - p[0, 3])
    torch.testing.assert_close(e.double() * out[1], p, rtol=1e-5, atol=1e-12)
    lse = torch.logsumexp(right.flatten() * math.log(2.0), 0) / math.log(2.0)
    torch.testing.assert_close(out[0].double(), lse, rtol=1e-6, atol=1e-5)


@cute.jit
def _sort(target: cute.Tensor, classes: Int32, index: cute.Tensor, counts: cute.Tensor):
    for i in range(target.shape[0]):
        index[i], counts[i] = labels.sort(target[i], classes)


@pytest.mark.parametrize("classes", [1, 5, 128256])
def test_sorted_labels(classes: int) -> None:
    target = torch.tensor([0, 1, 4, 5, -1, -100, 128255, 2**31, 2**32 + 1, -(2**63), 2**63 - 1])
    index, counts = torch.empty_like(target), torch.empty(len(target))
    rows = [from_dlpack(one) for one in (target, index, counts)]
    cute.compile(_sort, rows[0], Int32(1), *rows[1:])(rows[0], classes, *rows[1:])
    right = Labels.of(target, None, classes)
    assert torch.equal(index, right.index)
    torch.testing.assert_close(counts, right.counts, rtol=0, atol=0, equal_nan=True)


@cute.jit
def _against(sets: cute.Tensor, teacher: Float32, student: Float32, out: cute.Tensor):
    for i in range(sets.shape[0]):
        log_q, log_p = sets[i, 0], sets[i, 1]
        of_q, of_p = scalars.against_mixture(log_q, log_p, log_q - log_p, teacher, student)
        out[i, 0] = of_q
        out[i, 1] = of_p
        out[i, 2] = scalars.gradient(log_q, log_q - log_p, teacher, student, Float32(0.5), Float32(0.25))


@pytest.mark.parametrize("beta", [0.1, 0.5, 1 - 2**-10])
def test_parts_of_a_divergence(beta: float) -> None:
    logs = torch.tensor([0.0, -0.001, -1.5, -17.0, -126.0, -1e4, MASKED, scalars.LOWEST])
    sets = torch.cartesian_prod(logs, logs)
    out = torch.zeros(len(sets), 3)
    shares = Float32(beta), Float32(1 - beta)
    cute.compile(_against, from_dlpack(sets), *shares, from_dlpack(out))(
        from_dlpack(sets), beta, 1 - beta, from_dlpack(out)
    )
    assert out.isfinite().all()
    log_q, log_p = sets.double().unbind(1)
    q, p = torch.exp2(log_q), torch.exp2(log_p)
    log_m = torch.logaddexp2(log_p + math.log2(beta), log_q + math.log2(1 - beta))
    right = torch.stack([q * (log_q - log_m), p * (log_p - log_m), q * ((log_q - log_m) * 0.5 + 0.25)], 1)
    torch.testing.assert_close(out.double(), right, rtol=2e-6, atol=3e-7)


def test_sizes_of_the_comparison_are_known_without_the_compiler() -> None:
    assert (divergence._THREADS, divergence._TOKENS) == (diverge.THREADS, diverge.TOKENS)


def test_transposed_matrices_lie_as_the_copy_takes_them() -> None:
    places: dict[tuple[int, int], int] = {}

    @cute.jit
    def trace() -> None:
        layout = exponentials.shared_layout(cutlass.BFloat16, 1)
        assert str(layout.inner) == "S<3,4,3>"  # of bytes: the lowest three bits of a row change which 16 of its bytes
        assert cute.cosize(layout.outer) * 2 == exponentials.BUFFERS * exponentials.PIECE_BYTES
        for row, token in itertools.product(range(exponentials.PIECE), range(exponentials.TOKENS)):
            place = 2 * int(layout.outer((row, token, 0)))
            places[row, token] = place ^ (place >> 3 & 0b1110000)
            assert 2 * int(layout.outer((row, token, 1))) == place + exponentials.PIECE_BYTES

    @cute.jit
    def stored(lane: Int32, warp: Int32, out: cute.Tensor):
        out[0] = scalars.stored_at(lane, warp)

    cute.compile(trace, options=f"--gpu-arch {build.ARCHITECTURE}")
    out = torch.zeros(1, dtype=torch.int32)
    run = cute.compile(stored, Int32(0), Int32(0), from_dlpack(out))
    for lane, warp in itertools.product(range(32), range(4)):
        run(lane, warp, from_dlpack(out))
        matrix, row = divmod(lane, 8)
        half, more = matrix % 2, matrix // 2  # registers (rows 8 apart first, then columns 8 apart)
        for token in range(8):
            for sixteen in range(exponentials.PIECE // 16):
                place = places[16 * sixteen + 8 * more + row, 16 * warp + 8 * half + token]
                assert place == int(out[0]) + 2 * token + 16 * 128 * sixteen


def test_accumulators_lie_as_the_epilogue_takes_them() -> None:
    offsets: dict[int, list[int]] = {}

    @cute.jit
    def trace() -> None:
        mma = tiled_mma(cutlass.BFloat16)
        # halves of a tile's tokens, one after the other
        assert mma.partition_shape_C((TOKENS, COLUMN)) == ((2, 2, COLUMN // 8), TOKENS // 64, 1)
        layout = mma.tv_layout_C_tiled
        for thread in (0, 1, 6, 45, 127):
            offsets[thread] = [int(layout((thread, value))) for value in range(2 * 2 * COLUMN // 8)]

    cute.compile(trace, options=f"--gpu-arch {build.ARCHITECTURE}")
    for thread, found in offsets.items():
        warp, lane = thread // 32, thread % 32
        for value, offset in enumerate(found):
            q, r, j = value % 2, value // 2 % 2, value // 4
            row, column = offset % 64, offset // 64
            assert row == 16 * warp + lane // 4 + 8 * r
            assert column == 2 * (lane % 4) + q + 8 * j


@cute.jit
def _covered(stop: Int32, start: Int64, wide: Int64, narrow: Int64, out: cute.Tensor):
    out[0] = scalars.covered(stop, start, wide, narrow)


@pytest.mark.parametrize(("classes", "hidden", "tokens", "rows", "fits"), [
    (1000, 256, 256, 192, True), (1000, 256, 256, 64, False), (1000, 256, 16, 192, True), (999, 512, 500, 1, False),
    (5000, 256, 250, 300, True), (192, 256, 256, 192, True), (192, 256, 256, 1, False), (100, 8, 8, 100, True),
])  # fmt: skip
def test_a_tile_waits_for_the_rows_that_it_covers_and_for_earlier_columns_only(
    classes: int, hidden: int, tokens: int, rows: int, fits: bool
) -> None:
    like = torch.empty(1, dtype=torch.bfloat16)
    total, held = workspace(like, (classes, hidden), torch.bfloat16, tokens, torch.bfloat16, rows)
    start = held.data_ptr() - total.data_ptr()
    wide, narrow = total.stride(0) * 2, held.stride(0) * 2
    out = torch.zeros(1, dtype=torch.int32)
    run = cute.compile(_covered, Int32(0), *[Int64(1)] * 3, from_dlpack(out))
    earlier = []
    for low in range(0, classes, COLUMN):
        stop = min(low + COLUMN, classes)
        run(stop, start, wide, narrow, from_dlpack(out))
        begins = start + torch.arange(classes) * narrow
        assert int(out[0]) == int((begins < stop * wide).sum())
        earlier.append(int(out[0]) <= low)  # or a tile could wait for one that nobody has been given yet
    assert apart(total, held, COLUMN) == all(earlier) == fits


def test_what_a_tile_covers_is_counted_in_64_bits() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    run = cute.compile(_covered, Int32(0), *[Int64(1)] * 3, from_dlpack(out))
    for stop, start, wide, narrow, rows in ((300000, 0, 8192, 8192, 300000), (1000000, 2**34 - 1, 16384, 4096, 0)):
        run(stop, start, wide, narrow, from_dlpack(out))
        assert int(out[0]) == max(rows, -(-(stop * wide - start) // narrow))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(build.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_kernels", {})
    return tmp_path / "cache"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Configurations that get compiled from now on."""
    built: list[Kind] = []
    real = build.compiled

    def compiled(config: Kind, options: str = "") -> Any:
        built.append(config)
        return real(config, options)

    monkeypatch.setattr(build, "compiled", compiled)
    return built


def test_kernels_are_built_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted(monkeypatch)
    threads = [threading.Thread(target=build.kernel, args=(PLAIN,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [PLAIN]
    assert build.kernel(PLAIN) is build.kernel(PLAIN)
    (entry,) = cache.iterdir()  # and no half-written file beside it

    build._kernels.clear()  # as in the next process
    build.kernel(PLAIN)
    assert built == [PLAIN]

    whole = entry.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        built.clear()
        build._kernels.clear()
        entry.write_bytes(damaged)
        build.kernel(PLAIN)
        assert built == [PLAIN]
        assert entry.stat().st_size == len(whole)


def test_no_folder_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(build.VARIABLE, str(tmp_path / "file" / "below"))
    monkeypatch.setattr(build, "_kernels", {})
    assert callable(build.kernel(PLAIN))


def test_names_of_entries_tell_configurations_and_sources_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    several = (
        PLAIN, Config(torch.float16), Config(torch.bfloat16, entropy=True), Config(torch.bfloat16, keep=True),
        Config(torch.bfloat16, store=True), Scaling(torch.bfloat16, True), Comparison(0.0, True, None),
        Comparison(None, True, None), Sorting(True), Sorting(False),
    )
    names = {build._digest(c) for c in several}
    monkeypatch.setattr(build, "_fingerprint", lambda: "other sources")
    assert len({*names, build._digest(PLAIN)}) == len(several) + 1


def test_nothing_is_built_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        build.kernel(PLAIN)


def test_arguments_are_checked_before_a_launch(cache: Path) -> None:
    x = torch.zeros(8, 64).bfloat16()
    rows = [torch.zeros(8) for _ in range(2)]
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        build.kernel(PLAIN)(
            x, x, None, torch.zeros(8, dtype=torch.int64), None, torch.zeros(2, 8), *rows, *[None] * 6, 1.0, 1.0,
            0, 0, 1, 1, 1, 1, 1,
        )


def test_arguments_of_gradients_are_taken_as_they_are_launched(cache: Path) -> None:
    rows, held = torch.zeros(8, 64).bfloat16(), torch.zeros(5, 16).bfloat16()[:, :8]
    target, each = torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    launches: dict[Kind, tuple[Any, ...]] = {
        Config(torch.bfloat16, True, per_token=True, keep=True): (
            rows, rows[:5], torch.zeros(COLUMN), target, each, torch.zeros(2, 8), each, each, None, held, each, each,
            torch.zeros(1, 8), torch.zeros(3, 8), 1.0, 1.0, 0, 0, 1, 1, 1, 1, 1,
        ),
        Sorting(True): (target, target, target.bool(), each, -100, 5),
        Sorting(False): (target, target, None, each, 0, 5),
    }
    for config, arguments in launches.items():
        with pytest.raises(ValueError, match="expected device_type=cuda"):
            build.kernel(config)(*arguments)


def test_arguments_of_jsd_are_taken_as_they_are_launched(cache: Path) -> None:
    rows, held, lse = torch.zeros(8, 64).bfloat16(), torch.zeros(5, 16)[:, :8], torch.zeros(8)
    launches: dict[Kind, tuple[Any, ...]] = {
        Config(torch.bfloat16, store=True): (
            rows, rows[:5], None, None, None, torch.zeros(2, 8), None, lse, None, held, *[None] * 4, 1.0, 1.0, 0, 0, 1,
            1, 1, 1, 1,
        ),
        Comparison(0.0, True, torch.bfloat16): (
            held, held, lse, lse, torch.zeros(1, 3, 8), lse, None, held.bfloat16(), 0.0, 1.0, 1.0, 2, 1, 3
        ),
    }
    for config, arguments in launches.items():
        with pytest.raises(ValueError, match="expected device_type=cuda"):
            build.kernel(config)(*arguments)


@pytest.mark.parametrize(
    "config",
    [
        Config(torch.float16, True, True, True, True),
        Config(torch.bfloat16, True, per_token=True, keep=True),
    ],
)
def test_no_product_spills(config: Config) -> None:
    compile = pytest.importorskip("headmux.backends.cutedsl.compile")
    try:
        found = {one.kernel: one for one in compile.resources(config)}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert set(found) == {"logits", "merge", *(["guess", "settle"] if config.keep else [])}
    assert all(one.stack == 0 and one.shared <= compile.MOST_SHARED for one in found.values())
    assert found["logits"].products == 16  # two halves of the tokens, four steps, of a first stage and of the others
    assert found["merge"].products == 0


@pytest.mark.parametrize(
    "config", [Adding(torch.bfloat16, False, True, True), Adding(torch.float16, True, False, False)]
)
def test_no_sum_of_products_spills(config: Adding) -> None:
    compile = pytest.importorskip("headmux.backends.cutedsl.compile")
    try:
        (found,) = compile.resources(config)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (found.kernel, found.stack, found.products) == ("accumulate", 0, 16)
    assert found.shared <= compile.MOST_SHARED


@pytest.mark.parametrize(
    "config",
    [
        Comparison(None, True, None),
        Comparison(None, False, torch.float16),
        Comparison(0.0, True, torch.bfloat16),
    ],
)
def test_no_comparison_spills_or_has_too_many_registers_for_its_thread_blocks(config: Comparison) -> None:
    compile = pytest.importorskip("headmux.backends.cutedsl.compile")
    try:
        (found,) = compile.resources(config)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert found.stack == 0
    if config.loss:  # all run at one time
        blocks = divergence.BLOCKS[True, config.gradient is not None]
        assert -(-found.registers // 8) * 8 * diverge.THREADS * blocks <= 2**16
