"""The benchmarks: what they refuse to time, what they write, and that they notice a slowdown."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headmux.backends.cutedsl import build, divergence, launch, statistics
from headmux.backends.cutedsl.build import Adding, Comparison, Config, Scaling, Sorting
from headmux.bench import (
    compare,
    floors,
    gate,
    goals,
    host,
    kernels,
    labels,
    measure,
    pages,
    plots,
    report,
    runner,
)
from headmux.bench.__main__ import main
from headmux.bench.problem import Problem
from headmux.bench.providers import Provider, masked_environment, peers_of, providers
from headmux.bench.records import KernelRecord, Record, Results, command
from headmux.bench.shapes import OPS, PRESETS, Shape, Variant
from headmux.testing.modes import Watch

TINY = Shape(32, 16, 64)
CPU = torch.device("cpu")
KEYS = {
    "op", "provider", "n", "h", "v", "dtype", "variant", "ms", "p20", "p80", "floor_ms", "ratio", "extra_mib",
    "err_loss", "err_input", "err_weight", "err_weight_untargeted", "syncs", "graph", "error",
}


def problem(op="flce", variant="default", dtype=torch.float32, shape=TINY):
    return Problem(op, shape, dtype, CPU, Variant.parse(variant))


def measured(*extra, variant="default", seconds=0.05, path=None):
    """Records by provider of headmux's torch backend and the providers given, at a tiny flce."""
    results = Results({}, path)
    case = runner.Case("flce", TINY, torch.float32, Variant.parse(variant))
    chosen = [*providers("flce", "torch", "none"), *extra]
    runner.run([case], lambda case: chosen, CPU, results, seconds=seconds)
    return {r.provider: r for r in results.records}


def provider(name, loss):
    """A provider from a function of hidden states, weight and labels."""
    return Provider(name, "pytorch", "", lambda p: lambda: loss(p.input, p.weight, p.target))


def plain(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


@pytest.mark.parametrize("op", OPS)
def test_a_run_writes_the_agreed_records(op, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = [op, "--shape", "32,16,64", "--impl", "torch,triton", "--peers", "pytorch,cce,liger",
             "--device", "cpu", "--dtype", "float32", "--seconds", "0.05", "--json", str(path)]
    assert main(words) == 0
    data = json.loads(path.read_text())
    header = data["header"]
    for key in ("device", "driver", "clocks", "torch", "triton", "cutlass", "cuda", "commit", "command", "time"):
        assert key in header
    assert header["command"].startswith(f"python -m headmux.bench {op} --shape 32,16,64")
    records = {r["provider"]: r for r in data["records"]}
    for record in records.values():
        assert set(record) >= KEYS
        assert (record["ms"] is None) == (record["error"] is not None)
    ours = records["headmux-torch"]
    assert ours["p20"] <= ours["ms"] <= ours["p80"]
    assert ours["rounds"] >= 3
    assert ours["ratio"] == pytest.approx(ours["ms"] / ours["floor_ms"], rel=1e-2)
    assert ours["extra_mib"] >= ours["extra_mib_beyond_grads"] >= 0
    assert ours["err_weight_untargeted"] < 1e-4
    assert records["pytorch"]["ms"] is not None
    assert "cuda" in records["headmux-triton"]["error"]
    assert records["pytorch-float"]["error"].startswith("the same as pytorch")
    peers = [p.name for p in peers_of(op) if p.group in ("liger", "cce")]
    assert all(records[name]["error"] for name in peers)
    assert "headmux-torch" in capsys.readouterr().out


def test_the_quick_preset_takes_less_than_a_minute(tmp_path, capsys):
    path, began = tmp_path / "out.json", time.perf_counter()
    assert main(["flce", "--preset", "quick", "--device", "cpu", "--seconds", "0.1", "--json", str(path)]) == 0
    assert time.perf_counter() - began < 60
    ours = [r for r in Results.load(path).records if r.provider == "headmux-torch"]
    assert {(r.n, r.h, r.v) for r in ours} == {(128, 64, 1000), (256, 64, 1000)}
    assert all(r.ms is not None for r in ours)


@pytest.mark.parametrize("variant", ["default", "scaled", "nograd", "rows", "half", "scaled+half", "rows+half+trained"])
@pytest.mark.parametrize("op", OPS)
def test_reference_agrees_with_plain_pytorch_and_headmux(op, variant):
    p = problem(op, variant, torch.float64, Shape(32, 16, 64, softcap=3.0))
    truth = gate.reference(p)
    ours = providers(op, "torch", "none", half="half" in variant)[::2]
    chosen = [*ours, *[q for q in peers_of(op) if q.name == "pytorch"]]
    for q in chosen:
        p.clear()
        found = gate.errors(p, truth, measure.step(p, q.build(p))())
        assert gate.verdict(p, found) is None, (q.name, found)
        assert (found["err_weight"] is None) == (variant == "nograd")


@pytest.mark.parametrize("vocabulary", [64, 63])
@pytest.mark.parametrize("variant", ["default", "nograd"])
@pytest.mark.parametrize("op", OPS)
def test_the_floor_makes_the_ops_products_in_either_layout(op, variant, vocabulary):
    p = problem(op, variant, shape=Shape(32, 16, vocabulary))
    with Watch() as seen:
        floors.floor(p)()
    assert seen.flops == floors.gemms(p) * 2 * 32 * 16 * vocabulary


def test_wrong_gradients_get_no_time():
    def untargeted_rows_lost(x, w, y):
        keep = torch.zeros(len(w), 1).index_fill(0, y, 1.0)
        return plain(x, w.detach() + keep * (w - w.detach()), y)

    def nan(x, w, y):
        return plain(x, w, y) * float("nan")

    def detached(x, w, y):
        return plain(x, w.detach(), y)

    def slightly_off(x, w, y):
        return plain(x, w, y) * 1.01

    wrong = [provider(f.__name__, f) for f in (untargeted_rows_lost, nan, detached, slightly_off)]
    found = measured(*wrong)
    for q in wrong:
        assert found[q.name].ms is None
        assert found[q.name].error.startswith("gate: ")
    assert "err_weight_untargeted" in found["untargeted_rows_lost"].error
    assert "no gradient" in found["detached"].error
    assert found["headmux-torch"].ms is not None


def test_gradients_of_ignored_tokens_must_be_exactly_zero():
    def leaks(x, w, y):
        return F.cross_entropy(F.linear(x, w), y) + 1e-12 * x.sum()

    found = measured(provider("leaks", leaks), variant="half")
    assert "not exactly 0" in found["leaks"].error
    assert found["headmux-torch"].ms is not None


def test_an_approximate_provider_passes_only_where_it_says_so():
    p = problem()
    found = {"err_loss": 0.0, "err_input": 0.0, "err_weight": 0.9, "err_weight_untargeted": 0.9}
    assert gate.verdict(p, found) is not None
    assert gate.verdict(p, found, ("err_weight", "err_weight_untargeted")) is None
    assert gate.verdict(p, {**found, "err_weight": float("nan")}, ("err_weight",)) is not None


def test_a_failing_provider_is_a_row():
    calls = iter(range(10**9))

    def missing(p):
        raise ModuleNotFoundError("No module named 'nowhere'")

    def breaks(x, w, y):
        raise RuntimeError("boom\nsecond line")

    def breaks_later(x, w, y):
        if next(calls) > 3:  # the gate, a warm-up, and at the latest the third sample
            raise RuntimeError("worn out")
        return plain(x, w, y)

    found = measured(
        Provider("missing", "cce", "", missing), provider("breaks", breaks), provider("breaks_later", breaks_later)
    )
    assert found["missing"].error == "ModuleNotFoundError: No module named 'nowhere'"
    assert found["breaks"].error == "RuntimeError: boom second line"
    assert found["breaks_later"].error == "while timed: RuntimeError: worn out"
    assert found["breaks_later"].ms is None
    assert found["headmux-torch"].ms is not None


def test_records_are_written_as_they_are_finished(tmp_path):
    path = tmp_path / "out.json"
    results = Results({"device": "x"}, path)
    for n in (1, 2):
        results.put(Record("flce", "a", n, 1, 1, "float32", "default", error="none"))
        assert [r.n for r in Results.load(path).records] == list(range(1, n + 1))
    results.put(Record("flce", "a", 2, 1, 1, "float32", "default", ms=1.0))
    assert [r.ms for r in Results.load(path).records] == [None, 1.0]
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("[]")
    with pytest.raises(ValueError, match="header and records"):
        Results.load(path)


class Clock:
    """A clock that only the providers wind on, so that what they take is known whatever else the machine does."""

    def __init__(self):
        self.now = 0.0
        self.random = random.Random(0)

    def __call__(self):
        return self.now

    def provider(self, name, ms):
        def loss(x, w, y):
            self.now += ms * self.random.gauss(1.0, 0.02) / 1e3
            return plain(x, w, y)

        return provider(name, loss)


def timed(path=None, **ms):
    """Records by provider of providers that take so many milliseconds, give or take a fiftieth."""
    clock = Clock()
    results = Results({}, path)
    case = runner.Case("flce", TINY, torch.float32, Variant())
    chosen = [clock.provider(name, each) for name, each in ms.items()]
    runner.run([case], lambda case: chosen, CPU, results, seconds=0.3, clock=clock)
    return {r.provider: r for r in results.records}


def test_compare_catches_a_planted_slowdown(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    timed(old, slower=10, within=10, faster=10)
    timed(new, slower=11, within=10.2, faster=9)
    assert main(["compare", str(old), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "REGRESSION" in line] == ["slower"]
    assert any(" slower N=32 " in line and "times as slow" in line for line in lines)
    assert main(["compare", str(old), str(new), "--bound", "1.2"]) == 0
    assert main(["compare", str(old), str(old)]) == 0


def test_slow_providers_take_part_in_fewer_rounds(monkeypatch):
    def last(**ms):
        return measure._strides({measure.FLOOR: 10.0, **ms})

    assert last(near=10.5, double=20.0, peer=24.0, slower=41.0, hopeless=900.0) == {
        measure.FLOOR: 1, "near": 1, "double": 1, "peer": 2, "slower": 3, "hopeless": 5
    }
    assert measure._strides({}) == {}
    steps = {name: (lambda: None) for name in (measure.FLOOR, "fast", "slow")}
    monkeypatch.setattr(measure, "_strides", lambda last: {measure.FLOOR: 1, "fast": 1, "slow": 5})
    times, failed = measure.rounds(problem(), steps, 0.2)
    assert not failed
    assert len(times["slow"]) == len(times["fast"]) // 5 >= measure.LEAST_SAMPLES


def test_rounds_end_in_time_with_three_samples_of_each(monkeypatch):
    steps = {name: (lambda: time.sleep(0.01)) for name in (measure.FLOOR, "fast", "slow")}
    monkeypatch.setattr(measure, "_strides", lambda last: {measure.FLOOR: 1, "fast": 1, "slow": 5})
    times, _ = measure.rounds(problem(), steps, 0.05)
    assert len(times["slow"]) == 3
    assert len(times["fast"]) < 10


def test_compare_tells_noise_memory_errors_and_lost_times_apart(tmp_path):
    record = Record("flce", "p", 1, 1, 1, "float32", "default", ms=10.0, p20=9.9, p80=10.1, floor_ms=5.0, ratio=2.0,
                    extra_mib=100.0, err_input=1e-3, rounds=30, syncs=0, graph=True)

    def regressions(**new):
        old_file, new_file = Results({}), Results({})
        old_file.put(record)
        new_file.put(dataclasses.replace(record, **new))
        (change,) = compare.changes(old_file, new_file)
        return change.regressions

    assert regressions() == ()
    assert regressions(ms=10.8, p20=10.7, p80=10.9, ratio=2.16)
    assert regressions(ms=10.8, p20=5.0, p80=20.0, ratio=2.16) == ()
    assert regressions(ms=20.0, p20=19.9, p80=20.1, floor_ms=10.0) == ()
    assert regressions(extra_mib=107.0) == ()
    assert "MiB" in regressions(extra_mib=150.0)[0]
    assert "err_input" in regressions(err_input=5e-3)[0]
    assert "synchronisations" in regressions(syncs=1)[0]
    assert "graph" in regressions(graph=False)[0]
    assert "no time any more: gate" in regressions(ms=None, error="gate")[0]
    assert compare.changes(Results({}), Results({})) == []


@pytest.fixture
def results(tmp_path):
    found = Results({"device": "D", "torch": "T", "commit": "C", "time": "now", "command": "run it"},
                    tmp_path / "in.json")
    for n in (1024, 2048, 4096):
        for name, factor in (("headmux-triton", 1.02), ("liger", 2.4), ("pytorch", 1.1), ("torch-lce", 5.0)):
            found.put(Record(
                "flce", name, n, 64, 1000, "bfloat16", "default", ms=n / 100 * factor, p20=1.0, p80=2.0,
                floor_ms=n / 100, ratio=factor, extra_mib=100.0 * factor, extra_mib_beyond_grads=50.0 * factor,
                err_loss=1e-7, err_input=2e-3, syncs=0, graph=True, rounds=30,
            ))
        found.put(Record("flce", "quack", n, 64, 1000, "bfloat16", "default", error="not here"))
    return found


def test_report_renders(results, capsys):
    assert main(["report", str(results.path)]) == 0
    text = capsys.readouterr().out
    assert "flce N=1024 H=64 V=1000 bfloat16, default" in text
    assert "quack: not here" in text
    order = [text.index(name) for name in ("floor (", "headmux-triton", "pytorch", "liger", "torch-lce")]
    assert order == sorted(order)
    markdown = report.tables(results, markdown=True)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1


def lead(**changes):
    """What is said of one peer beside a headmux backend of 10 ms and 100 MiB."""
    ours = Record("flce", "headmux-x", 1, 1, 1, "float32", "default", ms=10.0, p20=9.9, p80=10.1, err_weight=1e-3,
                  extra_mib_beyond_grads=100.0)
    peer = dataclasses.replace(ours, provider="peer", **changes)
    return pages.ahead([peer, ours])


def test_pages_say_where_a_peer_is_ahead():
    assert lead() == "no peer is ahead of `headmux-x`, in time or in memory"
    assert lead(ms=12.0, extra_mib_beyond_grads=99.5) == lead()
    assert "`peer` in time (0.9 times its time, 100 MiB against 100)" in lead(ms=9.0, p80=9.1)
    assert "`peer` in time (0.99 times its time, within the spread" in lead(ms=9.9, p80=10.0)
    assert "`peer` in memory (2 times its time, 5.0 MiB against 100)" in lead(ms=20.0, extra_mib_beyond_grads=5.0)
    assert "in time and memory (0.5 times" in lead(ms=5.0, p80=5.1, extra_mib_beyond_grads=5.0)
    assert "error of dW 5e-01 against 1e-03" in lead(ms=5.0, p80=5.1, err_weight=0.5)
    assert pages.ahead([Record("flce", "headmux-x", 1, 1, 1, "float32", "default", ms=1.0)]) is None


def test_goals_are_met_or_missed():
    def row(ratio, mib, **changes):
        record = Record("flce", "headmux-torch", 1024, 4096, 128256, "bfloat16", "default", ms=1.0, ratio=ratio,
                        extra_mib_beyond_grads=mib)
        (line,) = [x for x in goals.table([dataclasses.replace(record, **changes)]) if "`headmux-torch`" in x]
        return line

    assert "met; not measured at 2048, 4096" in row(1.15, 128.0)
    assert "at most 1.15: 1.151 " in row(1.151, 128.0)
    assert "**time missed** at 1024; not measured" in row(1.151, 128.0)
    assert "**memory missed** at 1024" in row(1.0, 129.0)
    assert row(1.0, 1.0, v=32000).endswith("| not measured |")
    assert row(1.0, 1.0, variant="half").endswith("| not measured |")


def test_pages_follow_the_files_of_results(results, tmp_path):
    pytest.importorskip("matplotlib")
    folder, images = results.path.parent, tmp_path / "img"
    results.header["driver"] = "1"
    results.put(Record("flce", "headmux-torch", 1024, 64, 1000, "bfloat16", "host", ms=0.05, p20=0.04, p80=0.06))
    sources = pages.load(folder)
    images.mkdir()
    (images / "old-light.png").touch()
    drawn = pages.draw(sources, images)
    page = pages.page(sources)
    assert set(re.findall(r'="img/([^"]+)"', page)) == {path.name for path in images.glob("*.png")}
    assert {path.name for path in drawn} == {path.name for path in images.glob("*.png")}
    assert all(path.stat().st_size < 100_000 for path in drawn)
    assert "run it" in page
    assert "- `quack`: not here" in page
    assert "| `flce` | headmux-torch | 50.0 | 40.0-60.0 |" in page
    assert "**`headmux-triton`** | 41.78 | 1.020 | 51 |" in pages.summary(sources)
    before = pages.digest(sources)
    assert pages.digest(pages.load(folder)) == before
    new = Results({"device": "D", "driver": "1", "time": "zz"}, folder / "new.json")
    new.put(dataclasses.replace(next(r for r in results.records if r.n == 4096), ms=44.0, ratio=1.07))
    after = pages.load(folder)
    assert pages.digest(after) != before
    assert "**`headmux-triton`** | 44 | 1.070 |" in pages.summary(after)
    assert pages.summary([]).startswith("Nothing has been measured")


def test_commands_lose_the_folders_of_their_outputs():
    line = "python -m headmux.bench flce --shape 1,2,3 --json /a/b/c.json --plot x/y"
    assert command(line) == "python -m headmux.bench flce --shape 1,2,3 --json c.json --plot y"


def test_pictures_are_drawn_for_light_and_dark_pages(results, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(results.path), "--out", str(tmp_path / "p")]) == 0
    written = capsys.readouterr().out.splitlines()
    for kind in ("time", "ratio", "memory", "pareto"):
        for theme in ("light", "dark"):
            (one,) = [w for w in written if w.endswith(f"-{kind}-{theme}.png")]
            assert Path(one).stat().st_size > 5000


def test_a_pictures_palette_has_what_was_drawn_and_no_two_neighbours():
    counts = [(9, (255, 255, 255)), (5, (170, 60, 140)), (8, (30, 40, 50)), (7, (31, 42, 50)), (4, (172, 62, 141))]
    assert plots._palette(counts) == [(255, 255, 255), (30, 40, 50), (170, 60, 140)]
    many = [(1, (i, 0, j)) for i in range(0, 256, 15) for j in range(0, 256, 15)]
    assert len(plots._palette(many)) == 128


def test_a_run_draws_its_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["flce", "--shape", "16,16,64", "32,16,64", "--impl", "torch", "--peers", "pytorch", "--device", "cpu",
             "--seconds", "0.05", "--quiet", "--plot", str(tmp_path)]
    assert main(words) == 0
    kinds = {path.name.split("-")[-2] for path in tmp_path.glob("flce-v64-h16-float32-*.png")}
    assert kinds == {"time", "ratio", "memory"}


def test_names_of_lines_are_moved_apart():
    assert labels._apart([10.0, 50.0, 90.0], 12.0, 0.0, 100.0) == [10.0, 50.0, 90.0]
    for heights in ([50.0] * 5, [0.0, 1.0, 2.0, 99.0, 100.0], [100.0] * 8):
        found = labels._apart(sorted(heights), 12.0, 0.0, 100.0)
        assert all(b - a > 11.5 for a, b in itertools.pairwise(found))
        assert min(found) >= 0
        assert max(found) <= 100


def test_names_of_points_cover_no_other_names():
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(8.0, 5.0))
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    place = random.Random(0)
    points = [(5 + place.gauss(0, 1.5), 5 + place.gauss(0, 1.0), f"headmux-{i}", f"C{i}") for i in range(10)]
    labels.label_points(axes, points, [], [])
    pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.texts]
    assert len(boxes) == len(points)
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_points_of_a_family_on_each_other_share_a_name():
    points = [((0.0, 0.0), "a-b", "red"), ((1.0, 0.0), "a", "red"), ((1.0, 0.0), "b", "blue")]
    points.append(((50.0, 0.0), "a-c", "red"))
    assert [text for _, text, _ in labels._groups(points, 8)] == ["a, -b", "b", "a-c"]


def test_front_has_no_point_below_and_left_of_it():
    assert plots._front([(3.0, 1.0), (1.0, 5.0), (2.0, 6.0)], 9.0) == [(1.0, 5.0), (3.0, 5.0), (3.0, 1.0), (9.0, 1.0)]


def test_peak_memory_counts_what_is_held_at_once():
    p = problem()

    def one():
        a = torch.empty(2**20)
        return a[:1].clone()

    def two():
        return (torch.ones(2**20) + torch.ones(2**20))[:1].clone()

    assert 4 <= measure.peak_bytes(p, one) / measure.MIB < 4.1
    assert 12 <= measure.peak_bytes(p, two) / measure.MIB < 12.1


def test_environment_is_hidden_and_restored(monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "triton")
    monkeypatch.setenv("HEADMUX_IMPL_FLCE", "nowhere")
    with masked_environment():
        assert not [k for k in os.environ if k.startswith(("LIGER_KERNEL_IMPL", "HEADMUX_IMPL"))]
    assert os.environ["LIGER_KERNEL_IMPL"] == "triton"
    assert os.environ["HEADMUX_IMPL_FLCE"] == "nowhere"


@pytest.mark.parametrize("command", ["selection", "host"])
def test_host_commands(command, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = [command, "--op", "flce", "--device", "cpu", "--json", str(path)]
    assert main(words + (["--impl", "torch"] if command == "host" else [])) == 0
    records = Results.load(path).records
    assert "selection" in {r.provider for r in records} or "headmux-torch" in {r.provider for r in records}
    assert all(r.ms is None or r.ms > 0 for r in records)
    out = capsys.readouterr().out
    assert "flce" in out
    assert "launch" not in out  # nothing launches on a CPU


def test_single_launches_are_timed_beside_a_bare_one(monkeypatch):
    triton = pytest.importorskip("headmux.backends.triton.kernels", reason="Triton is not installed")
    names, launched = triton.sort_labels.arg_names, set()

    class Sorter:
        def __getitem__(self, grid):
            def run(*args, **options):
                given = {**dict(zip(names, args, strict=False)), **options}
                assert set(names) <= set(given)
                assert (given["n"], given["V"], given["ignored"]) == (300, 50, -100)
                assert grid[0] * given["BN"] >= 300
                launched.add("triton")

            return run

    def kernel(config):
        assert config == Sorting(True)
        return lambda target, index, valid, counts, ignored, classes: launched.add(("cutedsl", ignored, classes))

    monkeypatch.setattr(triton, "sort_labels", Sorter())
    monkeypatch.setattr(build, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: launched.add("bare"))
    monkeypatch.setattr(kernels, "refusal", lambda impl, dtype, device: None)
    costs, failed = host.launches(CPU, torch.bfloat16, Shape(300, 8, 50))
    assert [(c.op, c.what) for c in costs] == [("launch", "bare"), ("launch", "triton"), ("launch", "cutedsl")]
    assert all(0 < c.best <= c.p20 <= c.us <= c.p80 for c in costs)
    assert launched == {"bare", "triton", ("cutedsl", -100, 50)}
    assert failed == []
    for cost in costs:
        assert f"launch       {cost.what}" in host.table(costs)
        assert cost.note in cost.record(TINY, torch.bfloat16).config

    monkeypatch.setattr(kernels, "refusal", lambda impl, dtype, device: "not here" if impl == "cutedsl" else None)
    monkeypatch.setattr(triton, "sort_labels", None)
    costs, failed = host.launches(CPU, torch.bfloat16, TINY)
    assert [c.what for c in costs] == ["bare"]
    assert {r.provider: r.error for r in failed} == {
        "triton": "TypeError: 'NoneType' object is not subscriptable", "cutedsl": "not here"
    }
    assert [r.provider for r in host.launches(CPU, torch.bfloat16, TINY, "torch,cutedsl")[1]] == ["cutedsl"]


def test_kernels_are_measured_beside_copies_and_products(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path / "out.json"
    n, h, v = 10, 24, 300
    words = ["kernels", "--shape", f"{n},{h},{v}", "--device", "cpu", "--seconds", "0.05", "--json", str(path)]
    done = subprocess.run([sys.executable, "-m", "headmux.bench", *words], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "TRITON_INTERPRET": "1"})  # which Triton reads when it is imported
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert data["header"]["command"].startswith("python -m headmux.bench kernels --shape 10,24,300")
    assert {r["kernel"]: r["work"] for r in data["records"]} == {
        "look": 2 * n * v, "exponentiate": 4 * n * v, "to_gradient": 4 * n * v, "look_fp32": 4 * n * v,
        "diverge_sums": 8 * n * v, "diverge_gradient": 10 * n * v, "diverge_both": 10 * n * v, "scale_rows": 4 * n * h,
        "grad_weight": 2 * n * h * v,
    }
    for r in data["records"]:
        assert list(r) == ["kernel", "n", "h", "v", "dtype", "ms", "p20", "p80", "work", "unit", "rate", "beside",
                           "share", "backend"]
        assert r["backend"] == "triton"
        assert (r["n"], r["h"], r["v"], r["dtype"]) == (n, h, v, "bfloat16")
        assert 0 < r["p20"] <= r["ms"] <= r["p80"]
        assert r["unit"] == ("TFLOP/s" if r["kernel"] == "grad_weight" else "TB/s")
        assert r["rate"] == pytest.approx(r["work"] / r["ms"] / 1e9, rel=1e-2)
        assert r["share"] == pytest.approx(r["rate"] / r["beside"], rel=1e-2)
    assert done.stdout == report.tables(Results.load(path))
    assert "kernels N=10 H=24 V=300 bfloat16\n\nkernel " in done.stdout
    assert re.search(r"\ngrad_weight +triton .* 0.000144 GFLOP  ", done.stdout)
    assert "headmux.bench: the cutedsl backend cannot run: device cpu is not one of cuda; " in done.stderr


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 10), (torch.float16, 30)])
def test_kernels_of_cutedsl_are_its_own_launches(dtype, tokens, tmp_path, monkeypatch, capsys):
    path, (n, h, v), launched = tmp_path / "out.json", (tokens, 24, 300), set()
    inside = min(n, h)

    def kernel(config):
        def run(*args):
            launched.add(config)
            if isinstance(config, Comparison):
                for logits, lse in zip(args[:2], args[2:4], strict=True):
                    torch.testing.assert_close((logits - lse.sum(0)).exp2().sum(0), torch.ones(n))
                if config.loss:
                    args[4].zero_()
            if isinstance(config, Sorting):
                args[1].copy_(args[0])
            if isinstance(config, Adding):  # what an earlier run may have overwritten is back
                assert (args[0].shape, args[1].shape, args[4].shape) == ((inside, h), (v, inside), (v, h))
                assert 0.9 < float(args[1].float().std()) < 1.1
                args[4].zero_()

        return run

    for module in (divergence, launch, statistics):
        monkeypatch.setattr(module, "kernel", kernel)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "refusal", lambda impl, *where: None if impl == "cutedsl" else "not here")
    words = ["kernels", "--shape", f"{n},{h},{v}", "--device", "cpu", "--seconds", "0.05", "--impl", "triton,cutedsl"]
    assert main([*words, "--dtype", str(dtype).removeprefix("torch."), "--json", str(path)]) == 0
    found = Results.load(path)
    exponentials = {"logits_exponentials": 2 * n * h * v} if dtype == torch.bfloat16 else {}
    assert {r.kernel: r.work for r in found.kernels} == {
        "diverge_sums": 8 * n * v, "diverge_gradient": 10 * n * v, "diverge_both": 10 * n * v, "scale_rows": 4 * n * h,
        "logits_statistics": 2 * n * h * v, **exponentials, "logits_fp32": 2 * n * h * v,
        "grad_weight": 2 * inside * h * v,
    }
    assert {r.backend for r in found.kernels} == {"cutedsl"}
    assert launched == {
        Comparison(None, True, None), Comparison(None, False, dtype), Comparison(0.0, True, dtype),
        Scaling(dtype, True), Sorting(True), Adding(dtype, False, True, False),
        Config(dtype), Config(dtype, store=True), *[Config(dtype, keep=True) for _ in exponentials],
    }
    told = capsys.readouterr()
    assert told.err == "headmux.bench: the triton backend cannot run: not here\n"
    assert re.search(r"\nscale_rows +cutedsl +[\d.]+ ", told.out)


@pytest.mark.parametrize(("words", "reason"), [
    ([], "TRITON_INTERPRET=1 is not set"),
    (["--impl", "cutedsl"], "the cutedsl backend cannot run: device cpu"),
    (["--impl", "torch"], "--impl 'torch' is not of triton, cutedsl"),
    (["--impl", "nobody"], "nobody"),
    (["--dtype", "float64"], "float64"),
    (["--shape", "1,2"], "--shape '1,2'"),
    (["--shape", "1,2,3,30"], "softcap"),
])
def test_kernels_without_a_usable_backend_or_shape(words, reason, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["kernels", "--device", "cpu", "--json", str(path), *words]) == 2
    assert reason in capsys.readouterr().err
    assert not path.exists()


def test_pages_have_kernels_where_they_were_measured(results):
    before = pages.load(results.path.parent)
    page, digest, summary = pages.page(before), pages.digest(before), pages.summary(before)
    assert "## Kernels" not in page
    found = Results({"device": "D", "time": "zz", "command": "measure them"}, results.path.with_name("d-kernels.json"))
    for n, ms, share in ((1024, 0.1, 0.5), (4096, 0.3, 0.65)):
        moved = 2 * n * 1000
        found.put(KernelRecord("look", n, 64, 1000, "bfloat16", ms, ms, ms, moved, "TB/s", 2.0, 4.0, share, "triton"))
    after = pages.load(results.path.parent)
    assert (pages.digest(after), pages.summary(after)) == (digest, summary)
    head, kernels = pages.page(after).split("## Kernels\n")
    assert page.startswith(head)
    assert "[d-kernels.json](../bench/results/d-kernels.json)" in kernels
    assert "measure them" in kernels
    rows = re.findall(r"\*\*kernels N=(\d+) .*?\| look +\| +triton \| +([\d.]+) .*? ([\d.]+) \|\n", kernels, re.DOTALL)
    assert rows == [("1024", "0.1", "0.50"), ("4096", "0.3", "0.65")]


@pytest.mark.parametrize("words", [
    ["--shape", "1,2"],
    ["--shape", "0,2,3"],
    ["--shape", "1,2,x"],
    ["--variant", "sideways"],
    ["--variant", "rows+scaled"],
    ["--peers", "nobody"],
    ["--impl", "nobody"],
    ["--dtype", "int8"],
])
def test_wrong_usage_is_told(words, capsys):
    assert main(["flce", "--device", "cpu", *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_variants_and_presets():
    for text in ("default", "scaled", "nograd", "rows", "half", "trained", "half+trained", "scaled+half"):
        assert str(Variant.parse(text)) == text
    assert str(Variant.parse("default+half")) == "half"

    def shapes(preset, op):
        return [s for part in PRESETS[preset].parts[op] for s in part.shapes]

    assert {(s.n, s.h, s.v) for s in shapes("seeds", "flce")} >= {
        (1024, 4096, 128256), (16384, 4096, 128256), (16384, 4096, 32000)
    }
    assert {s.v for s in shapes("models", "jsd")} >= {151936, 128256, 256000, 262144}
    for preset in PRESETS.values():
        for op in OPS:
            measured = [(s, v) for part in preset.parts[op] for s in part.shapes for v in part.variants]
            assert len(set(measured)) == len(measured)
            for part in preset.parts[op]:
                assert [str(Variant.parse(v)) for v in part.variants] == list(part.variants)
                providers(op, preset.impl, part.peers)
    with pytest.raises(LookupError, match="nobody"):
        providers("flce", "none", "nobody")
    assert [p.name for p in providers("flce", "torch", "pytorch")] == [
        "headmux-torch", "headmux-torch-f32acc", "pytorch", "pytorch-float"
    ]
    assert [p.name for p in providers("flce", "torch", "none", half=True)][2:] == [
        "headmux-torch-valid", "headmux-torch-f32acc-valid"
    ]


def test_hidden_states_without_gradients_need_none():
    assert not problem(variant="nograd").input.requires_grad
    assert problem(variant="nograd").weight.requires_grad
    assert problem().input.requires_grad
