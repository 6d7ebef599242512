"""``python -m headmux.testing --backend NAME[,NAME] [--require NAME[,NAME]] [--json FILE] [-- PYTEST OPTIONS]``.

Runs the conformance suite on the named backends (all known ones by default), from any directory. The exit status is 0
only if nothing failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from headmux import registry
from headmux.errors import UnknownNameError


def main(argv: list[str] | None = None) -> int:
    """Run the suite and return pytest's exit status; 2 for an unknown backend."""
    given = sys.argv[1:] if argv is None else argv
    ours, theirs = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m headmux.testing", description="Conformance suite of headmux.")
    parser.add_argument("--backend", metavar="NAMES", help="backends to test, a comma list; all known ones by default")
    parser.add_argument("--require", metavar="NAMES", help="backends whose unavailability is a failure, a comma list")
    parser.add_argument("--json", metavar="FILE", help="write a report of every case here")
    options = parser.parse_args(ours)
    try:
        for name in f"{options.backend or ''},{options.require or ''}".split(","):
            if name.strip():
                registry.resolve(name)
    except UnknownNameError as error:
        parser.error(str(error))
    arguments = [
        str(Path(__file__).with_name("suite.py")),
        "-p",
        "headmux.testing.plugin",
        "-p",
        "no:cacheprovider",
        # nothing of the directory that this is called from, or that the suite lies in, changes the run
        "-c",
        os.devnull,
        f"--rootdir={Path.cwd()}",
        "--noconftest",
        "--import-mode=importlib",
        "-q",
        "--tb=short",
    ]
    for name in ("backend", "require", "json"):
        if (value := getattr(options, name)) is not None:
            arguments.append(f"--{name}={value}")
    return int(pytest.main([*arguments, *theirs]))


if __name__ == "__main__":
    sys.exit(main())
