"""What ships: the packages that setup.cfg lists, the wheel from the source distribution, old syntax, and the README."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import headmux

ROOT = Path(__file__).parents[2]
FOLDERS = ("dispatch", "ops", "backends", "tests/conformance", "bench", "demo")
SKIPPED = ("__pycache__",)


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed() -> list[str]:
    return settings()["options"]["packages"].split()


def mapping() -> dict[str, str]:
    lines = settings()["options"]["package_dir"].strip().splitlines()
    return dict(re.split(r"\s*=\s*", line) for line in lines)


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Import name of every folder with Python files under the mapped ones."""
    found = {}
    for name, folder in mapping().items():
        for file in (root / folder).rglob("*.py"):
            inside = file.parent.relative_to(root / folder)
            if not set(inside.parts) & set(SKIPPED):
                found[".".join([name, *inside.parts])] = file.parent
    return found


def test_every_folder_is_mapped_and_listed() -> None:
    assert sorted(mapping().values()) == sorted(FOLDERS)
    assert sorted(listed()) == sorted(package_folders())
    assert listed() == sorted(listed())


def test_every_package_has_an_init() -> None:
    missing = [name for name, folder in package_folders().items() if not (folder / "__init__.py").exists()]
    assert missing == []


def test_shipped_suite_has_no_test_files() -> None:
    """pytest would collect them from site-packages, and twice here."""
    assert list((ROOT / "tests/conformance").rglob("test_*.py")) == []


def test_imports_across_folders_are_absolute() -> None:
    """A relative import that leaves its folder would not survive the mapping."""
    for folder in package_folders().values():
        for file in folder.glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                assert not (isinstance(node, ast.ImportFrom) and node.level > 1), f"{file}:{node.lineno}"


def test_dispatch_imports_no_kernel_language() -> None:
    for folder in ("dispatch", "ops"):
        for file in (ROOT / folder).glob("*.py"):
            for node in ast.parse(file.read_text()).body:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                roots = {name.split(".")[0] for name in names}
                assert not roots & {"triton", "cutlass", "cuda", "tvm_ffi"}, file


def test_no_module_reads_the_environment_at_import() -> None:
    """Settings are read at each call; only the interpreter switch of Triton is Triton's own to read early."""
    for folder in ("dispatch", "ops", "backends/common", "backends/torch"):
        for file in (ROOT / folder).glob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    assert "os.environ" not in ast.unparse(node), f"{file}:{node.lineno}"


def test_version_is_stated_once() -> None:
    assert settings()["metadata"]["version"] == "attr: headmux.__version__"
    assert metadata.version("headmux") == headmux.__version__
    assert f"## {headmux.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras() -> None:
    extras = settings()["options.extras_require"]
    assert set(extras) == {"triton", "cutedsl", "cuda", "bench", "demo", "dev"}
    assert "nvidia-cutlass-dsl>=4.8.1,<4.9" in extras["cutedsl"].split()
    assert {"apache-tvm-ffi", "cuda-python"} <= set(extras["cutedsl"].split())
    assert settings()["options"]["install_requires"].split() == ["torch>=2.8"]


def test_license_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190


Wheels = dict[str, zipfile.ZipFile]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "demo-out")
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


@pytest.fixture(scope="module")
def wheels(tree: Path) -> Wheels:
    """Wheels built from the tree, and from a source distribution of it, without a network."""
    base = tree.parent
    hook = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"

    def build(kind: str, where: Path, out: Path) -> Path:
        words = [sys.executable, "-c", hook, kind, str(out)]
        done = subprocess.run(words, cwd=where, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return out / done.stdout.splitlines()[-1]

    direct = build("wheel", tree, base)
    (base / "unpacked").mkdir()
    shutil.unpack_archive(build("sdist", tree, base), base / "unpacked")
    (unpacked,) = (base / "unpacked").iterdir()
    (base / "again").mkdir()
    through = build("wheel", unpacked, base / "again")
    return {"tree": zipfile.ZipFile(direct), "sdist": zipfile.ZipFile(through)}


def test_wheel_has_one_top_level_name(wheels: Wheels) -> None:
    for wheel in wheels.values():
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {"headmux", f"headmux-{headmux.__version__}.dist-info"}
        info = f"headmux-{headmux.__version__}.dist-info"
        assert wheel.read(f"{info}/top_level.txt").decode().split() == ["headmux"]


def test_wheel_holds_every_module(tree: Path, wheels: Wheels) -> None:
    expected = {"headmux/py.typed"}
    for name, folder in package_folders(tree).items():
        expected |= {"/".join([*name.split("."), file.name]) for file in folder.glob("*.py")}
    for wheel in wheels.values():
        assert {n for n in wheel.namelist() if n.startswith("headmux/")} == expected


def test_wheel_metadata(wheels: Wheels) -> None:
    info = f"headmux-{headmux.__version__}.dist-info"
    for wheel in wheels.values():
        text = wheel.read(f"{info}/METADATA").decode()
        assert "License-Expression: Apache-2.0" in text
        assert "Requires-Dist: torch>=2.8" in text
        assert "Requires-Python: >=3.10" in text
        assert "headmux = headmux.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_sdist_and_tree_give_the_same_wheel(wheels: Wheels) -> None:
    tree, sdist = wheels["tree"], wheels["sdist"]
    for name in tree.namelist():
        if name.startswith("headmux/"):
            assert tree.read(name) == sdist.read(name), name


def test_syntax_of_the_oldest_python() -> None:
    """Each shipped file parses under the grammar of Python 3.10."""
    for folder in package_folders().values():
        for file in folder.glob("*.py"):
            ast.parse(file.read_text(), str(file), feature_version=(3, 10))


def other_pythons() -> list[str]:
    """Interpreters of the other supported versions that can be found on this machine."""
    found = []
    for minor in (10, 12, 13):
        places = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")]
        for place in filter(None, places):
            probe = subprocess.run([str(place), "--version"], capture_output=True, text=True)
            if probe.returncode == 0 and f"3.{minor}." in probe.stdout:
                found.append(str(place))
                break
    return found


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
def test_compiles(python: str, tmp_path: Path) -> None:
    """By the interpreters themselves; this one is always among them."""
    words = [python, "-W", "error", "-X", f"pycache_prefix={tmp_path}", "-m", "compileall", "-q", "-f"]
    done = subprocess.run([*words, *(str(ROOT / f) for f in FOLDERS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*.pyc"))
