"""Every job of the project: ``python -m nox -s tests``, ``-s demo``, ``-l`` for the list.

Each session installs what it needs into an environment of its own, which later runs reuse.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

TORCH = "torch==2.13.0"
# 3.6.0 is what PyTorch 2.11 for GPUs comes with, and its interpreter does not know newer numpy
TRITON = {"3.9.0": ["triton==3.9.0"], "3.6.0": ["triton==3.6.0", "numpy<2.4"]}
VERSIONS = [v for v in TRITON if v != "3.9.0" or sys.version_info >= (3, 11)]
NEWEST = VERSIONS[0]
HAS_TRITON = sys.platform == "linux"
# without one of these, unit tests are skipped: where everything is installed, that is an error
NEEDED = ["headmux.backends.cutedsl.compile", "matplotlib", "tokenizers", "tqdm"]
NEEDED += ["headmux.backends.triton.kernels"] * HAS_TRITON
TYPED = {"dispatch": "headmux", "ops": "headmux.ops"}


def _install(session: nox.Session, *extras: str, triton: str | None = None) -> None:
    """Install PyTorch and headmux as a wheel, so that what is tested is what ships, and that Triton."""
    there = [] if triton is None or not HAS_TRITON else TRITON[triton]
    session.install(TORCH, *there, f".[{','.join(extras)}]" if extras else ".")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that a change must pass: lint, types, unit tests, conformance, and that kernels compile.

    Arguments go to pytest, and then conformance of Triton and compiling are left out.
    """
    _install(session, "dev", "demo", "bench", "cutedsl", triton=NEWEST)
    session.run("python", "-c", f"import {', '.join(NEEDED)}")
    _lint(session)
    _typecheck(session)
    _pytest(session, "tests", *session.posargs)
    if HAS_TRITON and not session.posargs:
        _interpreted(session)
        _compile(session)
        for version in VERSIONS[1:]:
            session.notify(f"compile(triton='{version}')", [])


@nox.session
def conformance(session: nox.Session) -> None:
    """The conformance suite alone, on every backend and on Triton's interpreter; arguments go to pytest."""
    _install(session, "dev", triton=NEWEST)
    _pytest(session, "tests/test_conformance.py", *session.posargs)
    if HAS_TRITON:
        _interpreted(session, *session.posargs)


@nox.session
@nox.parametrize("triton", VERSIONS)
def compile(session: nox.Session, triton: str) -> None:
    """Compile kernels for GPUs that need not be there: Triton's, and with the newest Triton those of CuTe DSL.

    Arguments go to ``python -m headmux.backends.triton.compile``.
    """
    newest = triton == NEWEST
    _install(session, *(["cutedsl"] if newest else []), triton=triton)
    _compile(session, *session.posargs, cutedsl=newest)


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


def _compile(session: nox.Session, *words: str, cutedsl: bool = True) -> None:
    if cutedsl:
        session.run("python", "-m", "headmux.backends.cutedsl.compile")
    session.run("python", "-m", "headmux.backends.triton.compile", *words)


def _interpreted(session: nox.Session, *words: str) -> None:
    """Conformance of Triton's kernels without a GPU, in a process of its own: it is imported to interpret or not.

    The mutants are PyTorch's, and are left to the other runs.
    """
    command = ["python", "-m", "headmux.testing", "--backend", "triton", "--require", "triton"]
    session.run(*command, "--", "-n", "auto", "-k", "not mutant", *words,
                env={"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"})


def _pytest(session: nox.Session, *words: str) -> None:
    # one thread a worker: the workers share the machine's cores
    session.run("pytest", "-n", "auto", *words, env={"OMP_NUM_THREADS": "1"})

