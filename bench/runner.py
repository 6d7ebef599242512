"""One case after the other: gate, memory, synchronisations, interleaved rounds, graph capture, records."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headmux.bench import gate, measure, rss
from headmux.bench.floors import floor
from headmux.bench.problem import Problem
from headmux.bench.providers import Provider
from headmux.bench.records import Record, Results, rounded
from headmux.bench.shapes import Shape, Variant


class DeviceLost(RuntimeError):
    """A provider broke the GPU's context: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Case:
    """One op at one shape, dtype and variant, beside some peers."""

    op: str
    shape: Shape
    dtype: torch.dtype
    variant: Variant
    peers: str = "all"

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {_name(self.dtype)} {self.variant}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(
    cases: list[Case],
    providers_of: Callable[[Case], list[Provider]],
    device: torch.device,
    results: Results,
    *,
    seconds: float,
    graphs: bool = True,
    resident: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[str], object] = lambda text: None,
) -> None:
    """Measure every case.

    Args:
        cases: What to measure.
        providers_of: From a case, its providers.
        device: Where.
        results: Where records go.
        seconds: Time for the rounds of each case.
        graphs: Whether to try graph capture.
        resident: Whether to take the peak resident memory in fresh processes too (on a CPU).
        clock: Seconds, off a GPU.
        report: Told of each finished case, as a line.

    Raises:
        DeviceLost: A provider broke the GPU's context; the records made so far are written.
    """
    for number, case in enumerate(cases, 1):
        began = time.perf_counter()
        chosen = providers_of(case)
        with _bar(f"[{number}/{len(cases)}] {case}", len(chosen)) as tick:
            _run(case, chosen, device, results, seconds=seconds, graphs=graphs, resident=resident, clock=clock,
                 tick=tick)
        mine = [r for r in results.records if r.case == _record(case, chosen[0]).case] if chosen else []
        timed = sum(r.ms is not None for r in mine)
        report(f"[{number}/{len(cases)}] {case}: {timed} of {len(chosen)} providers timed in "
               f"{time.perf_counter() - began:.1f} s")


def _record(case: Case, provider: Provider) -> Record:
    return Record(
        case.op, provider.name, case.shape.n, case.shape.h, case.shape.v, _name(case.dtype), str(case.variant),
        softcap=case.shape.softcap, model=case.shape.model, config=provider.config,
    )


def _run(
    case: Case,
    chosen: list[Provider],
    device: torch.device,
    results: Results,
    *,
    seconds: float,
    graphs: bool,
    resident: bool,
    clock: Callable[[], float],
    tick: Callable[[float, str], None],
) -> None:
    torch._dynamo.reset()
    measure.release(device)
    try:
        problem = Problem(case.op, case.shape, case.dtype, device, case.variant)
        truth = gate.reference(problem)
        lowest = floor(problem)
        lowest()
    except torch.OutOfMemoryError as error:
        for provider in chosen:
            results.put(replace(_record(case, provider), error=f"inputs or reference: {measure.reason(error)}"))
        return
    records: dict[str, Record] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    for done, provider in enumerate(chosen):
        tick(done, provider.name)
        record, step = _prepare(problem, truth, provider, _record(case, provider))
        records[provider.name] = record
        if step is None:
            results.put(record)
        else:
            steps[provider.name] = step
        if not measure.alive(device):
            _lost(provider, record, steps, records, results)
    del truth
    measure.release(device)
    if steps:
        tick(len(chosen), "rounds")
        times, failed = measure.rounds(
            problem, {measure.FLOOR: lowest, **steps}, seconds, clock=clock,
            tick=lambda share: tick(len(chosen) + share, "rounds"),
        )
        for name, why in failed.items():
            if name in records:
                results.put(replace(records[name], error=why))
                steps.pop(name)
        base = times.get(measure.FLOOR)
        for name in steps:
            records[name] = _timed(records[name], times[name], base)
            results.put(records[name])
    del lowest
    for name in steps if resident and device.type == "cpu" else ():
        tick(len(chosen) + 1, f"resident memory of {name}")
        records[name] = replace(records[name], rss_mib=rounded(
            rss.peak_mib(case.op, name, case.shape, case.dtype, case.variant)))
        results.put(records[name])
    if not graphs or device.type != "cuda":
        return
    for name, step in list(steps.items()):
        tick(len(chosen) + 1, f"graph of {name}")
        waits = records[name].syncs
        captured: bool | None = False
        uncaptured: str | None = f"the host waits for the GPU {waits} times"
        if not waits:  # else not tried: a broken capture leaves the allocator in a state that later cases would feel
            captured, uncaptured = measure.graph(problem, step)
        records[name] = replace(records[name], graph=captured, graph_error=uncaptured)
        results.put(records[name])
        if not measure.alive(device):
            raise DeviceLost(f"the GPU does not answer after the graph capture of {name}: {uncaptured}")


def _prepare(
    problem: Problem, truth: gate.Reference, provider: Provider, record: Record
) -> tuple[Record, Callable[[], Tensor] | None]:
    """A provider's record without times, and its step if the gate lets it through."""
    try:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = measure.step(problem, provider.build(problem))
            problem.clear()
            loss = step()
        measure.synchronize(problem.device)
        record = replace(record, setup_s=rounded(time.perf_counter() - began, 3))
        found = gate.errors(problem, truth, loss)
        del loss
        record = replace(record, **_errors(found))
        if (why := gate.verdict(problem, found, provider.exempt)) is not None:
            return replace(record, error=why), None
        peak, waits = measure.footprint(problem, step)
        record = replace(record, syncs=waits)
        if peak is not None:
            record = replace(record, extra_mib=round(peak / measure.MIB, 2),
                             extra_mib_beyond_grads=round((peak - problem.gradient_bytes) / measure.MIB, 2))
        return record, step
    except Exception as error:
        return replace(record, error=measure.reason(error)), None
    finally:
        problem.clear()
        with contextlib.suppress(Exception):
            measure.release(problem.device)


def _errors(found: dict[str, float | None]) -> dict[str, Any]:
    return {name: rounded(value, 3) for name, value in found.items()}


def _timed(record: Record, times: list[float], base: list[float] | None) -> Record:
    ms = measure.percentile(times, 0.5)
    lowest = measure.percentile(base, 0.5) if base else None
    return replace(
        record,
        ms=rounded(ms, 5),
        p20=rounded(measure.percentile(times, 0.2), 5),
        p80=rounded(measure.percentile(times, 0.8), 5),
        floor_ms=rounded(lowest, 5),
        ratio=rounded(ms / lowest, 4) if lowest else None,
        rounds=len(times),
    )


def _lost(
    provider: Provider, record: Record, steps: dict[str, Any], records: dict[str, Record], results: Results
) -> None:
    why = f"not timed: the GPU does not answer after {provider.name}"
    for name in steps:
        if name != provider.name:
            results.put(replace(records[name], error=why))
    results.put(replace(record, error=record.error or "the GPU does not answer afterwards"))
    raise DeviceLost(
        f"the GPU does not answer after {provider.name} ({record.error}); leave it out with --peers or --impl"
    )


@contextlib.contextmanager
def _bar(title: str, count: int) -> Iterator[Callable[[float, str], None]]:
    """A progress bar on a terminal, if tqdm is there."""
    bar: Any = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            bar = import_module("tqdm").tqdm(
                total=float(count + 1), desc=title, leave=False, bar_format="{desc} |{bar}| {elapsed} {postfix}"
            )

    def tick(done: float, what: str) -> None:
        if bar is not None:
            bar.n = min(done, bar.total)
            bar.set_postfix_str(what)

    try:
        yield tick
    finally:
        if bar is not None:
            bar.close()
