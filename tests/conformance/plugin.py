"""The pytest plugin: options, the summary and the JSON report.

    pytest -p headmux.testing.plugin --backend NAME[,NAME] [--require NAME[,NAME]] [--json FILE]

``--backend`` names the backends to test (all known ones by default), ``--require`` those whose unavailability is a
failure, ``--json`` a file for the report. Works under pytest-xdist.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headmux
from headmux.testing.runner import Record

BACKENDS, REQUIRED, JSON = "headmux_backends", "headmux_require", "headmux_json"
_PROPERTY = "headmux record"
OUTCOMES = ("matched", "refused", "known failure", "unavailable", "not on this device", "failed")

_records = pytest.StashKey[list[dict[str, Any]]]()


def keep(item: pytest.Item, record: Record) -> None:
    """Hand a record to the report, from whichever process the item runs in."""
    item.user_properties.append((_PROPERTY, json.dumps(record.as_json())))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("headmux")
    group.addoption("--backend", dest=BACKENDS, metavar="NAMES", help="backends to test, a comma list")
    group.addoption("--require", dest=REQUIRED, metavar="NAMES", help="backends that must be available, a comma list")
    group.addoption("--json", dest=JSON, metavar="FILE", help="write a report of every case here")


def pytest_configure(config: pytest.Config) -> None:
    """Collect records in the process that reports; without numpy's warnings of lanes that a kernel masks."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        seen = "(divide by zero|overflow|invalid value) encountered"
        config.addinivalue_line("filterwarnings", f"ignore:{seen}:RuntimeWarning:triton")
    if not hasattr(config, "workerinput"):
        config.stash[_records] = []
        config.pluginmanager.register(_Collector(config.stash[_records]), "headmux-records")


class _Collector:
    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._records += [json.loads(str(v)) for name, v in report.user_properties if name == _PROPERTY]


def header() -> dict[str, Any]:
    """What the report's numbers were made with."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "headmux": headmux.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv),
    }


def command(words: list[str]) -> str:
    """A command as anyone would give it: without the folders of this machine."""
    program = "python -m headmux.testing" if Path(words[0]).name == "__main__.py" else Path(words[0]).name
    return " ".join([program, *(Path(w).name if os.path.isabs(w) else w for w in words[1:])])


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report, a line for each record, its errors and budgets to three digits."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        return float(f"{value:.3g}") if isinstance(value, float) else value

    lines = ",\n".join(json.dumps(short(r)) for r in report["records"])
    head = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in report.items() if k != "records")
    path.write_text(f'{{{head},\n"records": [\n{lines}\n]}}\n')


def counts(records: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For each backend, how many records have each outcome."""
    found: dict[str, collections.Counter[str]] = {}
    for r in records:
        found.setdefault(r["backend"], collections.Counter())[r["outcome"]] += 1
    return {name: dict(c) for name, c in found.items()}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line a backend, with what is unavailable and why, and the report."""
    records = config.stash.get(_records, [])
    path = config.getoption(JSON, None)
    if path is not None:
        report = {"header": header(), "counts": counts(records), "records": records}
        write(Path(path), report)
    if not records:
        return
    terminalreporter.section("headmux conformance")
    for name, found in counts(records).items():
        parts = [f"{n} {outcome}" for outcome in OUTCOMES if (n := found.get(outcome, 0))]
        terminalreporter.line(f"{name}: {', '.join(parts) or 'nothing ran'}")
    for r in records:
        if r["outcome"] in ("unavailable", "not on this device"):
            terminalreporter.line(f"{r['backend']} on {r['device']}: {r['outcome']}: {'; '.join(r['reasons'])}")
    if path is not None:
        terminalreporter.line(f"report: {path}")
