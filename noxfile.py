"""Every job of the project: ``python -m nox -s tests``, ``-s demo``, ``-l`` for the list.

Each session installs what it needs into an environment of its own, which later runs reuse.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

TORCH = "torch==2.13.0"
TYPED = {"dispatch": "headmux", "ops": "headmux.ops"}


def _install(session: nox.Session, *extras: str) -> None:
    """Install PyTorch and headmux as a wheel, so that what is tested is what ships."""
    session.install(TORCH, f".[{','.join(extras)}]" if extras else ".")


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, types, unit tests and conformance: everything that a change must pass."""
    _install(session, "dev", "demo", "bench")
    _lint(session)
    _typecheck(session)
    _pytest(session, "tests", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """The conformance suite alone; arguments go to pytest."""
    _install(session, "dev")
    _pytest(session, "tests/test_conformance.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff over the repository."""
    session.install("ruff")
    _lint(session)


@nox.session
def typecheck(session: nox.Session) -> None:
    """Mypy over the installed wheel: an editable install is an import hook, which it cannot follow."""
    _install(session, "dev")
    _typecheck(session)


@nox.session
def build(session: nox.Session) -> None:
    """A source distribution in dist/, and from it the wheel."""
    session.install("build")
    for old in Path("dist").glob("headmux-*"):
        old.unlink()
    shutil.rmtree("build", ignore_errors=True)
    session.run("python", "-m", "build")


@nox.session
def demo(session: nox.Session) -> None:
    """Train, distil and score on real text; arguments go to the demo."""
    _install(session, "demo")
    session.run("python", "-m", "headmux", "demo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; arguments go to ``python -m headmux.bench``."""
    _install(session, "bench")
    session.run("python", "-m", "headmux.bench", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated parts of the documentation anew; ``-- --check`` only compares."""
    _install(session, "dev", "bench")
    session.run("python", "docs/generate.py", *session.posargs)


def _lint(session: nox.Session) -> None:
    session.run("ruff", "check", ".")


def _typecheck(session: nox.Session) -> None:
    words = []
    for folder, package in TYPED.items():
        for file in sorted(Path(folder).glob("*.py")):
            words += ["-m", f"{package}.{file.stem}".removesuffix(".__init__")]
    session.run("mypy", "--strict", "--cache-dir", str(Path(session.create_tmp()) / "mypy"), *words)


def _pytest(session: nox.Session, *words: str) -> None:
    # one thread a worker: the workers share the machine's cores
    session.run("pytest", "-n", "auto", *words, env={"OMP_NUM_THREADS": "1"})

