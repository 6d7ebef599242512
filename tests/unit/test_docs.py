"""The documentation: generated tables are up to date, links lead somewhere, and examples run."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headmux import get_op, registry
from headmux.bench.records import Record, Results
from headmux.order import default_order

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_parts_are_up_to_date() -> None:
    words = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_automatic_order_and_its_figures_are_those_that_were_measured() -> None:
    measured: dict[tuple[object, ...], dict[str, Record]] = {}
    for path in (ROOT / "bench" / "results").glob("h200-*.json"):
        for r in Results.load(path).records:
            if r.ms is not None and r.variant != "host":
                measured.setdefault((path.name, r.op, r.variant, r.h, r.v, r.n, r.dtype), {})[r.provider] = r
    call = get_op("flce").call_on(torch.device("cuda", 0), (9, 0), {"N": 1, "H": 8, "V": 8}, torch.bfloat16)
    for found in measured.values():
        inorder = [r for name in default_order(call) if (r := found.get(f"headmux-{name}")) is not None]
        times = [r.ms or 0.0 for r in inorder]
        assert all(first < second for first, second in itertools.pairwise(times)), inorder
        if {"headmux-cutedsl", "headmux-triton"} <= found.keys():
            cutedsl, triton = (found[f"headmux-{name}"].extra_mib_beyond_grads for name in ("cutedsl", "triton"))
            assert (cutedsl or 0.0) <= (triton or 0.0)

    lines = re.findall(r"#   (\w+)( without gradients)? +((?:\d\.\d\d *)+)\n", (ROOT / "dispatch/order.py").read_text())
    assert len(lines) == 4
    for op, without, figures in lines:
        for n, figure in zip((1024, 2048, 4096, 8192, 16384), figures.split(), strict=False):
            variant = "nograd" if without else "default"
            found = measured[f"h200-{op}-seeds.json", op, variant, 4096, 128256, n, "bfloat16"]
            cutedsl, triton = (found[f"headmux-{name}"].ms or 0.0 for name in ("cutedsl", "triton"))
            assert figure == f"{cutedsl / triton:.2f}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pictures_exist(page: Path) -> None:
    for target in re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:dispatch|ops|backends|tests|bench|demo|docs)/[\w./]*)`", page.read_text())
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert missing == []


def test_documented_variables_are_read() -> None:
    """Every variable of headmux that a page names stands in the code, the op's name apart."""
    code = "".join(f.read_text() for d in ("dispatch", "ops", "backends") for f in (ROOT / d).rglob("*.py"))
    text = "".join(page.read_text() for page in PAGES)
    for variable in set(re.findall(r"HEADMUX_[A-Z_]*[A-Z]", text)):
        plain = variable
        for op in registry.op_names():
            plain = plain.removesuffix(f"_{op.upper()}")
        assert f'"{plain}"' in code, variable


def test_explain_example_of_the_readme() -> None:
    """Its call and the lines of triton, that a machine without a GPU prints as well."""
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"\$ python -m headmux (explain .*)\n((?:.*\n)*?)```", readme)
    assert block is not None
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HEADMUX_", "LIGER_"))}
    words = [sys.executable, "-m", "headmux", *block[1].split()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    printed = done.stdout.splitlines()
    shown = [line for line in block[2].splitlines() if line.strip() != "..."]
    assert len(shown) == 4
    assert [line for line in shown if line not in printed] == []


def test_trainer_example() -> None:
    """The README's forward gives the loss of a model that shifts logits, under gradient accumulation too."""
    flce = get_op("flce")
    torch.manual_seed(0)
    embed, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    ids = torch.randint(0, 50, (3, 9))

    def loss_of(part: torch.Tensor, count: int | None) -> torch.Tensor:
        labels = F.pad(part[:, 1:], (0, 1), value=-100)
        return flce(embed(part), head.weight, labels, num_items=count)

    logits = head(embed(ids))[:, :-1].reshape(-1, 50)
    whole = F.cross_entropy(logits, ids[:, 1:].reshape(-1))
    torch.testing.assert_close(loss_of(ids, None), whole)
    parts = sum(loss_of(part, 24) for part in ids.split(1))
    torch.testing.assert_close(parts, whole)


def test_merged_lora_weight_gets_its_gradient() -> None:
    torch.manual_seed(0)
    base, a, b = torch.randn(50, 16), torch.randn(4, 16, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    x, t = torch.randn(7, 16), torch.randint(0, 50, (7,))
    grads = []
    for run in (get_op("flce"), get_op("flce").reference):
        grads.append(torch.autograd.grad(run(x, base + 0.5 * b @ a, t), (a, b)))
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference)
