"""``python -m headmux.testing``: what it fails for, from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headmux.contract import Backend
from headmux.testing.runner import Check, Context, run_check, unknown_ids


def _run(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "headmux.testing", *options]
    return subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, timeout=300)


def test_unavailable_fails_only_if_required(tmp_path: Path) -> None:
    """An unavailable backend is reported with its reason, and fails under --require."""
    options = ("--backend", "cutedsl", "--", "-k", "test_backend")
    done = _run(tmp_path, *options)
    assert done.returncode == 0
    assert "cutedsl: 1 unavailable" in done.stdout
    done = _run(tmp_path, "--require", "cutedsl", *options)
    assert done.returncode == 1
    assert "cutedsl is required, but unavailable" in done.stdout


def test_unknown_backend_is_an_error(tmp_path: Path) -> None:
    """A misspelt name does not run nothing."""
    done = _run(tmp_path, "--backend", "tritn")
    assert done.returncode == 2
    assert "did you mean 'triton'" in done.stderr


def _passes(context: Context) -> None:
    context.expect(True, "")


def _fails(context: Context) -> None:
    context.expect(False, "on purpose")


def test_known_failures_are_strict() -> None:
    """One that fails is known, one that passes is a failure, and an id of no check is told."""
    backend = Backend("known", {}, known_failures={"flce/a": "a bug", "flce/b@cpu": "another", "flce/none": "a typo"})
    checks = [Check("flce/a", "flce", _fails), Check("flce/b", "flce", _passes), Check("flce/c", "flce", _fails)]
    assert [run_check(c, backend, "cpu")[0].outcome for c in checks] == ["known failure", "failed", "failed"]
    assert unknown_ids(backend, checks) == ["flce/none"]
