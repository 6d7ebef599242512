"""Results as documentation: docs/performance.md, the README's section and their pictures, of files of results alone."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headmux.bench import goals, labels, plots, report
from headmux.bench.plots import Sheet
from headmux.bench.problem import BETA
from headmux.bench.providers import Provider, peers_of
from headmux.bench.records import Record, Results, command
from headmux.bench.shapes import OPS

_SIZES = 3  # of N at least, for pictures
_GAIN_MIB = 1.0  # less memory than this is none
_INEXACT = 10  # times the error: what is said beside a lead
_TOKENS = 4096  # the size that stands for the others in the README, where it was measured

_READ = f"""\
How to read it:

- **floor**: the op's own matrix products through the vendor's library, into tensors that are there already, in the same
  rounds: one for the logits of each model, and two for the gradients where they are formed.
- **ms**: median over rounds in which all providers take turns in random order, gradients None at entry, with the
  percentiles beside it. Slow providers take part in fewer rounds. Before each turn the GPU multiplies for some ten
  milliseconds, as it does for a model's layers: a turn starts at the clock that the GPU sustains, its launches made.
- **+MiB**: peak memory over the inputs; **beyond grads**: the same less the gradients, which all must return.
- **loss, dX, dW**: norm of the error over the norm of the truth, computed in a wider dtype; **dW untargeted**: on the
  rows of tokens that are nobody's label. A provider whose errors are past the gate's bounds gets no time.
- **syncs**: how often a step makes the host wait for the GPU; **graph**: whether it captures into a CUDA graph.
- Variants: *default* is the backward of the loss itself, for `linear_logp` of a random gradient per token; *scaled* of
  half the loss; *rows* of `reduction="none"` with a random gradient per token; *nograd* the forward alone; *half* has
  half of the tokens ignored, of which `-valid` is told by `max_valid_tokens`, and the floor's products are of all;
  *trained* has data like those of a trained model. `jsd` has beta {BETA:g}.
"""

_KERNELS = f"""\
What backends launch, each with the small launches that belong to it, from `python -m headmux.bench kernels`. Between
matrix products they are bound by memory: **work** is the bytes of logits [V, N] or states [N, H] that a step has to
read and write, and nothing else, and it stands **beside** a device copy that moves as many. Products stand beside one
`torch.mm` of the same operands, which leaves 16-bit numbers. **share** is the rate over that of what it stands beside.

- *look* reads logits for the statistics, *exponentiate* leaves exponentials in their place, the settling at the labels
  included, *to_gradient* the gradient; *scale_rows* scales hidden states.
- `jsd` (beta {BETA:g}) reads fp32 logits: *look_fp32* for the statistics, *diverge_sums* those of both models for the
  loss, *diverge_gradient* once more for the gradient; where beta is 0, *diverge_both* gives both in one read.
- *grad_weight* is the product that is formed in place. The products of `cutedsl` that form logits leave statistics
  (*logits_statistics*), exponentials too (*logits_exponentials*), or logits with their log-sum-exp (*logits_fp32*).
"""


@dataclass(frozen=True)
class Source:
    """A file of results.

    Attributes:
        name: Name of the file.
        results: What it holds.
    """

    name: str
    results: Results

    @property
    def device(self) -> str:
        """Name of the device."""
        return str(self.results.header.get("device"))

    @property
    def records(self) -> list[Record]:
        """Records of the ops' own measurements, host times left out."""
        return [r for r in self.results.records if r.variant != "host"]


def load(folder: Path) -> list[Source]:
    """Every file of results in a folder, oldest first, those of GPUs before those of other devices."""
    found = [Source(path.name, Results.load(path)) for path in sorted(folder.glob("*.json"))]
    found.sort(key=lambda s: str(s.results.header.get("time")))
    return sorted(found, key=lambda s: s.results.header.get("driver") is None)


def _devices(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """The files with records of providers, by device."""
    found: dict[str, list[Source]] = {}
    for source in sources:
        if source.results.records:
            found.setdefault(source.device, []).append(source)
    return found


def _newest(sources: Sequence[Source]) -> list[Record]:
    """The newest record of each key, of files of one device; of equal sizes, those of no particular model."""
    records = sorted((r for source in sources for r in source.records), key=lambda r: not r.model)
    return sorted({r.key: r for r in records}.values(), key=_place)


def _place(r: Record) -> tuple[object, ...]:
    """Where a record comes in a page: ops in their order, what most calls are like first, then by size."""
    head = (r.h, r.v)
    return (OPS.index(r.op), r.dtype != "bfloat16", r.variant != "default", r.variant, head != goals.HEAD, head, r.n)


def _header(records: Sequence[Record], sources: Sequence[Source]) -> dict[str, Any]:
    """That of the newest file that has one of these records, with the commits of all that do."""
    wanted = {id(r) for r in records}
    found = [s.results.header for s in reversed(sources) if any(id(r) in wanted for r in s.records)]
    return {**found[0], "commit": ", ".join(dict.fromkeys(str(h.get("commit")) for h in found))}


# ------------------------------------------------------------------------------------------------ pictures


def _sheets(device: str, sources: Sequence[Source]) -> list[Sheet]:
    prefix = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + "-"
    return [s for s in plots.sheets(_newest(sources), prefix) if len({r.n for r in s.records}) >= _SIZES]


def draw(sources: Sequence[Source], folder: Path) -> list[Path]:
    """Draw the pages' pictures, and remove those of a folder that are no longer theirs."""
    written = []
    for device, mine in _devices(sources).items():
        for sheet in _sheets(device, mine):
            written += plots.draw([sheet], _header(sheet.records, mine), folder)
    for path in folder.glob("*.png"):
        if path not in written:
            path.unlink()
    return written


def digest(sources: Sequence[Source]) -> str:
    """What the pictures are drawn from, in short: they are compared by it, as no two versions of Matplotlib agree."""
    found = hashlib.sha256()
    for module in (plots, labels):
        found.update(Path(str(module.__file__)).read_bytes())
    for device, mine in _devices(sources).items():
        for sheet in _sheets(device, mine):
            found.update(repr((sheet.file(""), sheet.title, sheet.records, _header(sheet.records, mine))).encode())
    return found.hexdigest()[:16]


def _picture(sheet: Sheet, folder: str) -> str:
    light, dark = (f"{folder}/{sheet.file(theme)}" for theme in ("light", "dark"))
    return (f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" width="800" alt="{sheet.title}"></picture>')


# ------------------------------------------------------------------------------------------------ words


def ahead(records: Sequence[Record]) -> str | None:
    """In words, where a peer is ahead of the fastest headmux backend of a case; None without one, or without peers."""
    timed = [r for r in records if r.ms is not None]
    ours = min((r for r in timed if r.provider.startswith("headmux")), key=lambda r: r.ms or 0.0, default=None)
    peers = sorted((r for r in timed if not r.provider.startswith("headmux")), key=lambda r: r.ms or 0.0)
    if ours is None or ours.ms is None or not peers:
        return None
    held = ours.extra_mib_beyond_grads
    words = []
    for peer in peers:
        assert peer.ms is not None
        holds = peer.extra_mib_beyond_grads
        faster = peer.ms < ours.ms
        leaner = held is not None and holds is not None and holds < held - _GAIN_MIB
        if not faster and not leaner:
            continue
        which = " and ".join(["time"] * faster + ["memory"] * leaner)
        near = faster and peer.p80 is not None and ours.p20 is not None and peer.p80 >= ours.p20
        beside = "" if held is None or holds is None else f", {_mib(holds)} MiB against {_mib(held)}"
        if peer.err_weight is not None and ours.err_weight is not None and peer.err_weight > _INEXACT * ours.err_weight:
            beside += f", error of dW {peer.err_weight:.0e} against {ours.err_weight:.0e}"
        words.append(f"`{peer.provider}` in {which} ({peer.ms / ours.ms:.3g} times its time"
                     f"{', within the spread' if near else ''}{beside})")
    if not words:
        return f"no peer is ahead of `{ours.provider}`, in time or in memory"
    return f"ahead of `{ours.provider}`: " + "; ".join(words)


def _mib(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _not_timed(records: Iterable[Record]) -> list[str]:
    """Providers without a time and why, those of one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    every: dict[str, int] = {}
    for r in records:
        every[r.provider] = every.get(r.provider, 0) + 1
        if r.ms is None:
            where = f"N={r.n} H={r.h} V={r.v} {r.dtype} {r.variant}"
            found.setdefault((r.provider, str(r.error)), []).append(where)
    return [
        f"- `{name}`" + ("" if len(cases) == every[name] else f" at {'; '.join(cases)}") + f": {_plain(reason)}"
        for (name, reason), cases in found.items()
    ]


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing to interpret."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


# ------------------------------------------------------------------------------------------------ pages


def page(sources: Sequence[Source], results: str = "../bench/results", images: str = "img") -> str:
    """docs/performance.md.

    Args:
        sources: From load().
        results: Where the page finds their files.
        images: Where it finds the pictures.
    """
    devices = _devices(sources)
    lines = [
        "# Performance", "",
        f"Generated by `nox -s docs` from the files in [{results}]({results}); what they do not hold was not measured.",
        "", _READ, "## Goals", "",
        f"For H={goals.HEAD[0]} and V={goals.HEAD[1]}. Beside each bound stand the newest measurements by N.", "",
    ]
    for device, mine in devices.items():
        if mine[-1].results.header.get("driver") is not None:
            lines += [f"{device}:", "", *goals.table(_newest(mine)), ""]
    for device, mine in devices.items():
        lines += [f"## {device}", ""]
        if said := _where_ahead(_newest(mine)):
            lines += ["Where a peer is ahead of the fastest headmux backend:", "", *said, ""]
        for sheet in _sheets(device, mine):
            lines += [_picture(sheet, images), ""]
        for source in sorted(mine, key=lambda s: [_place(r) for r in s.records[:1]] or [(len(OPS),)]):
            lines += _section(source, results)
    lines += _kernels([source for source in sources if source.results.kernels], results)
    lines.append(f"<!-- pictures drawn from {digest(sources)} -->")
    return "\n".join(lines) + "\n"


def _where_ahead(records: Sequence[Record]) -> list[str]:
    said = [(case[0], ahead(case)) for case in report.cases(records)]
    return [f"- {report.title(first)}: {words}." for first, words in said if words is not None]


def _kernels(sources: Sequence[Source], results: str) -> list[str]:
    lines = ["## Kernels", "", _KERNELS] if sources else []
    for source in sources:
        lines += _origin(source, results)
        for heading, rows in report.kernel_tables(source.results.kernels, markdown=True):
            lines += [f"**{heading}**", "", *rows, ""]
    return lines


def _origin(source: Source, results: str) -> list[str]:
    return [f"### [{source.name}]({results}/{source.name})", "", f"{_plain(report.where(source.results))}.", "",
            "```", command(str(source.results.header.get("command"))), "```", ""]


def _section(source: Source, results: str) -> list[str]:
    lines = _origin(source, results)
    for case in report.cases(source.records):
        if table := report.table(case, markdown=True):
            lines += [f"**{report.title(case[0])}**", "", *table, ""]
    if missing := _not_timed(source.records):
        lines += ["Not timed:", "", *missing, ""]
    if host := [r for r in source.results.records if r.variant == "host" and r.ms is not None]:
        lines += ["| op | host time of | us | p20-p80 | |", "|---|---|---|---|---|"]
        lines += [f"| `{r.op}` | {r.provider} | {_us(r.ms)} | {_us(r.p20)}-{_us(r.p80)} | {r.config} |" for r in host]
        lines.append("")
    if used := {r.provider: r.config for r in source.records if r.ms is not None}:
        lines += ["Configurations:", "", *(f"- `{name}`: {_plain(text)}" for name, text in used.items()), ""]
    return lines


def _us(ms: float | None) -> str:
    return "" if ms is None else f"{ms * 1e3:.1f}"


# ------------------------------------------------------------------------------------------------ README


def summary(sources: Sequence[Source], pages: str = "docs/performance.md", images: str = "docs/img") -> str:
    """The README's section: one case of each op on the first device, the best member of each family.

    Args:
        sources: From load().
        pages: Where the README finds the full page.
        images: Where it finds the pictures.
    """
    devices = _devices(sources)
    if not devices:
        return f"Nothing has been measured yet; see [{pages}]({pages}).\n"
    device, mine = next(iter(devices.items()))
    records = _newest(mine)
    lines: list[str] = []
    shown: list[tuple[Record, str]] = []
    every: list[Record] = []
    for op in OPS:
        if not (case := _typical([r for r in records if r.op == op and r.ms is not None])):
            continue
        rows = sorted(_best_of_families(case), key=lambda r: r.ms or 0.0)
        lines += [f"| `{op}` | ms | time over the floor | MiB beside the gradients | error of dX | of dW |",
                  "|---|---|---|---|---|---|"]
        lines += [f"| {_bold(r)} | {_cell(r.ms, '.4g')} | {_cell(r.ratio, '.3f')} "
                  f"| {'' if r.extra_mib_beyond_grads is None else _mib(r.extra_mib_beyond_grads)} "
                  f"| {_cell(r.err_input, '.0e')} | {_cell(r.err_weight, '.0e')} |" for r in rows]
        lines.append("")
        shown.append((case[0], ahead(case) or ""))
        every += rows
    first = shown[0][0]
    header = _header(every, mine)
    head = textwrap.fill(
        f"Measured on {device} with torch {header.get('torch')} at commit {header.get('commit')}; {first.dtype}, "
        f"N={first.n} H={first.h} V={first.v}, forward and backward. The floor is the op's matrix products alone. Of "
        "each family the fastest member is shown; all providers, sizes and variants, their configurations, the goals "
        f"and the commands are in [{pages}]({pages}).", 120)
    sheets = [s for s in _sheets(device, mine) if s.kind == "pareto" and s.records[0].op == first.op]
    said = [f"- `{r.op}`: {words}." for r, words in shown if words]
    return "\n".join([head, "", *lines, *said, *(["", _picture(sheets[0], images)] if sheets else [])]) + "\n"


def _typical(records: Sequence[Record]) -> list[Record]:
    """The case that stands for an op: a plain one with the most providers, at 4096 tokens if there are several."""
    found = [case for case in report.cases(records) if case[0].variant == "default" and not case[0].model]
    return max(found, key=lambda case: (len(case), case[0].n == _TOKENS, case[0].v), default=[])


def _best_of_families(case: Sequence[Record]) -> list[Record]:
    """The fastest record of each group of peers, and of each backend of headmux."""
    groups = {p.name: p for p in peers_of(case[0].op)}
    found: dict[str, Record] = {}
    for r in sorted(case, key=lambda r: r.ms or 0.0):
        found.setdefault(_family(r.provider, groups), r)
    return list(found.values())


def _family(name: str, groups: dict[str, Provider]) -> str:
    return groups[name].group if name in groups else name.removesuffix("-valid").removesuffix("-f32acc")


def _bold(r: Record) -> str:
    return f"**`{r.provider}`**" if r.provider.startswith("headmux") else f"`{r.provider}`"


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
