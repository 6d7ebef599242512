"""The demo end to end in its smallest form, and its flags."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")

import torch

from headmux.demo import main


@pytest.fixture(autouse=True)
def one_thread():
    """Other tests run beside this one, and threads that wait for each other on a busy machine cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_run(tmp_path, capsys):
    assert main(["--steps", "2", "--device", "cpu", "--impl", "torch", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "demo.json").read_text())
    assert [p["op"] for p in found["phases"]] == ["flce", "jsd", "linear_logp"]
    for phase in found["phases"]:
        assert phase["backend"] == "torch"
        assert "order from: impl=torch" in phase["selection"]
        assert phase["selection"].splitlines()[0] in printed
        assert [len(phase["losses"][side]) for side in ("headmux", "plain")] == [2, 2]
        assert phase["largest_difference"] < 1e-4
        assert 0 < phase["memory_bytes"]["headmux"] < phase["memory_bytes"]["plain"] / 1.5
        assert phase["memory_bytes"]["plain"] > found["tokens_per_step"] * found["text"]["vocabulary"] * 4
        assert min(phase["step_seconds"].values()) > 0
    first = found["phases"][0]["losses"]["headmux"]
    assert first[1] < first[0]
    for score in found["scores"]:
        assert score["backend"] == "torch"
        assert score["largest_difference"] < 1e-4
        assert score["memory_bytes"]["headmux"] < score["memory_bytes"]["plain"] / 4
    assert len(found["rewards"]) == 2
    assert found["text"]["vocabulary"] == 8192
    assert found["seed"] == 0
    assert found["command"].endswith(str(tmp_path))
    assert {"python", "torch", "headmux"} <= found["versions"].keys()
    picture = (tmp_path / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--impl", "tritn"], "no backend is named 'tritn'"),
        (["--device", "cpux"], "--device cpux"),
        (["--device", "meta"], "--device meta"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--steps", "0"], "--steps 0"),
        (["--steps", "many"], "--steps"),
        (["--dtype", "int8"], "--dtype"),
        (["--seed", "-1"], "--seed -1"),
        (["--nothing"], "--nothing"),
    ],
)
def test_bad_flags(flags, message, tmp_path, capsys):
    assert main([*flags, "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_unsupported_backend(tmp_path, capsys):
    """A named backend that cannot run the call ends with the whole decision, not a traceback."""
    assert main(["--device", "cpu", "--impl", "cutedsl", "--out", str(tmp_path)]) == 2
    assert "device cpu is not one of cuda" in capsys.readouterr().err


def test_out_is_a_file(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["--out", str(tmp_path / "taken")]) == 2
    assert "--out" in capsys.readouterr().err
