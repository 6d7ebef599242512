"""The worked third-party backend: found through its entry point, and put through the conformance suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "chunked"


def test_third_party_backend_conforms(tmp_path: Path) -> None:
    source = (EXAMPLE / "headmux_chunked.py").read_text()
    assert len(source.splitlines()) < 80
    package = ConfigParser()
    package.read(EXAMPLE / "setup.cfg")
    (tmp_path / "headmux_chunked.py").write_text(source)
    info = tmp_path / "headmux_chunked-0.1.0.dist-info"  # what an installer would leave
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package['metadata']['name']}\nVersion: 0.1.0\n")
    points = package["options.entry_points"]["headmux.backends"].strip()
    (info / "entry_points.txt").write_text(f"[headmux.backends]\n{points}\n")

    report = tmp_path / "report.json"
    words = ["--backend", "chunked", "--require", "chunked", "--json", str(report), "--", "-k", "not mutant"]
    done = subprocess.run(
        [sys.executable, "-m", "headmux.testing", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    counts = json.loads(report.read_text())["counts"]["chunked"]
    assert counts["matched"] > 50
    assert counts["refused"] > 300  # jsd, linear_logp, other dtypes and options, each with its declared reasons
    assert set(counts) == {"matched", "refused"}
