"""The compile check of the Triton kernels: what it compiles, what it accepts, and that it sees a kernel that spills."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from headmux.backends.triton import compile, kernels
from headmux.backends.triton.compile import Launch, Result, covering
from headmux.backends.triton.launch import combined

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets, it compiles nothing")

OPTIONAL = {
    "sort_labels": {"ignored", "valid_out"},
    "look": {"labels", "bias", "divisors", "weights", "softcap"},
    "exponentiate": {"valid", "bias", "divisors"},
    "combine": {"labels", "valid", "dots", "bias", "divisors", "weights", "softcap", "best_out"},
    "to_gradient": {"valid", "bias", "divisors", "weights", "softcap", "entropy", "smoothing"},
    "diverge": {"valid", "q_bias", "q_softcap", "p_bias", "p_softcap", "beta", "upstream", "kl", "out"},
}


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    return compile.launches()


def forms(launches: list[Launch]) -> dict[str, dict[str, set[Any]]]:
    """For each kernel and argument, the values that occur."""
    found: dict[str, dict[str, set[Any]]] = {}
    for launch in launches:
        for name, value in launch.arguments:
            found.setdefault(launch.kernel, {}).setdefault(name, set()).add(value)
    return found


def test_every_kernel_is_launched(launches: list[Launch]) -> None:
    public = {n for n, k in vars(kernels).items() if isinstance(k, triton.JITFunction) and not n.startswith("_")}
    assert set(forms(launches)) == public
    for launch in launches:
        assert [n for n, _ in launch.arguments] == list(getattr(kernels, launch.kernel).arg_names)


def test_every_option_has_every_form(launches: list[Launch]) -> None:
    """What can be None is both, flags are both, and logits have each dtype."""
    found = forms(launches)
    optional = {k: {n for n, v in a.items() if None in v} for k, a in found.items()}
    assert {k: names for k, names in optional.items() if names} == OPTIONAL
    for kernel, names in OPTIONAL.items():
        assert all(len(found[kernel][n]) > 1 for n in names)
    for kernel, arguments in found.items():
        for name, values in arguments.items():
            if any(isinstance(v, bool) for v in values):
                assert values == {True, False}, f"{kernel}.{name}"
    every = {torch.bfloat16, torch.float16, torch.float32}
    assert found["look"]["S"] == found["combine"]["S"] == found["to_gradient"]["S"] == every
    assert found["exponentiate"]["S"] == found["settle"]["S"] == {torch.bfloat16}
    assert found["diverge"]["out"] == every | {None}
    for kernel, bias in (("look", "bias"), ("to_gradient", "bias"), ("diverge", "q_bias"), ("diverge", "p_bias")):
        assert found[kernel][bias] > {torch.float32, None}  # and 16 bits


def test_tiles_are_the_widest_and_the_narrowest(launches: list[Launch]) -> None:
    found = forms(launches)
    for kernel in ("look", "exponentiate", "settle", "to_gradient"):
        assert found[kernel]["BN"] >= {16, 256}
    assert found["diverge"]["BN"] >= {16, 64, 128}
    assert found["combine"]["BN"] == {combined(count)[0] for count in range(1, 4097)} == {2, 4, 8}


def test_rows_of_logits_have_places_for_whole_vectors_of_tokens(launches: list[Launch]) -> None:
    walks = [a for launch in launches if (a := dict(launch.arguments)).get("width")]
    assert {a["n"] % 16 == 0 for a in walks} == {True, False}
    for a in walks:
        assert a["width"] % 16 == 0
        assert a["n"] <= a["width"] < a["n"] + 16


def test_kernels_that_compare_logits_round_them_alike(launches: list[Launch]) -> None:
    """A product that is fused with what is subtracted from it is not rounded, and the largest one, stored, was."""
    apart = {dict(launch.settings).get("enable_fp_fusion") for launch in launches if launch.kernel == "diverge"}
    assert apart == {False}
    looks = [launch for launch in launches if launch.kernel == "look"]
    assert any(dict(launch.settings).get("enable_fp_fusion") is False for launch in looks)


def test_threads_that_add_up_the_same_products_find_the_same_sum(launches: list[Launch]) -> None:
    """A product that is fused with a sum that comes from another thread is not rounded, and the other one's is."""
    for launch in launches:
        arguments = dict(launch.arguments)
        if launch.kernel == "look" and (arguments["ENTROPY"] or arguments["weights"] is not None):
            assert dict(launch.settings)["enable_fp_fusion"] is False


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_covering(strength: int) -> None:
    options = {"a": (1, 2, 3), "b": (True, False), "c": "xyz", "d": (None, 0)}
    rows = list(covering(options, strength))
    assert rows[0] == {"a": 1, "b": True, "c": "x", "d": None}
    assert rows[1] == {"a": 3, "b": False, "c": "z", "d": 0}
    for names in itertools.combinations(options, strength):
        seen = {tuple(row[n] for n in names) for row in rows}
        assert seen == set(itertools.product(*(options[n] for n in names)))
    assert rows == list(covering(options, strength))
    assert len(rows) <= (5, 13, 30)[strength - 1]


def test_architectures_take_turns_kernel_by_kernel() -> None:
    some = [Launch(kernel, (("n", n),), ()) for n in range(3) for kernel in ("a", "b")]
    turns = list(compile.jobs_of(some, [80, 90], every=False))
    assert [arch for arch, _ in turns] == [80, 80, 90, 90, 80, 80]
    assert list(compile.jobs_of(some, [80, 90], every=True)) == [(arch, one) for one in some for arch in (80, 90)]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_for_a_gpu_that_is_not_here(arch: int, launches: list[Launch]) -> None:
    one = next(launch for launch in launches if launch.kernel == "scale_rows")
    (result,) = compile.results([(arch, one)], 1)
    assert result.error is None
    assert result.wrong is None
    assert 0 < result.registers < 256
    assert f"sm_{arch}" in str(result)


def test_what_is_wrong_is_told(launches: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    look = next(launch for launch in launches if launch.kernel == "look")
    few = tuple((n, 32 if n == "maxnreg" else v) for n, v in look.settings)
    spills = compile.compiled((90, Launch("look", look.arguments, few)))
    assert spills.stack > 0
    assert spills.wrong == "SPILLS"
    odd = tuple((n, 3 if n == "R" else v) for n, v in look.arguments)
    assert str(compile.compiled((90, Launch("look", odd, look.settings))).wrong).startswith("DOES NOT COMPILE")
    assert Result(90, look, shared=232449).wrong == "HAS TOO MUCH SHARED MEMORY"
    assert Result(80, look, shared=166912).wrong is None


def test_the_command_fails_if_one_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = Launch("look", (("n", 1),), ())
    monkeypatch.setattr(compile, "launches", lambda strength: [one])
    for stack, status in ((0, 0), (8, 1)):
        monkeypatch.setattr(compile, "results", lambda jobs, workers, s=stack: [Result(80, one, 40, s, 0)])
        assert compile.main([]) == status
        assert ("SPILLS" in capsys.readouterr().out) == bool(status)
    with pytest.raises(SystemExit):
        compile.main(["--arch", "91"])


def test_the_cache_folder_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    assert list(compile.results([], 1)) == []
    assert os.environ["TRITON_CACHE_DIR"] == "before"
