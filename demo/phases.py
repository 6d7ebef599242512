"""The three phases: every step twice, through headmux and plain PyTorch, from the same weights on the same tokens."""

from __future__ import annotations

import copy
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from headmux.demo import losses, measure
from headmux.demo.data import Text, windows
from headmux.demo.losses import IGNORE, Loss
from headmux.demo.model import Decoder, Shape

SIDES = ("headmux", "plain")
ROWS, LENGTH = 8, 128  # 1024 tokens a step
PROMPTS, PROMPT, SAMPLED = 64, 5, 12  # 64 * 16 = 1024 tokens a step, of which 768 count
LEARNING_RATE = {"train": 5e-3, "distil": 1e-2, "policy": 2e-3}
_WARM_UP = 3  # steps over which the rate rises

Batch = tuple[Tensor, tuple[Tensor, ...]]
"""Tokens for the model, and what the loss gets beside hidden states and weight."""


@dataclass(frozen=True)
class Settings:
    """What the flags chose."""

    device: torch.device
    dtype: torch.dtype
    impl: str | None
    steps: int
    seed: int

    def autocast(self) -> torch.autocast:
        """Weights stay in float32; in bfloat16 the products run under autocast, as training does."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)


@dataclass
class Phase:
    """What one phase measured, each figure by side: ``headmux`` and ``plain``.

    Attributes:
        name: ``train``, ``distil`` or ``policy``.
        title: The same for people.
        op: headmux's op.
        backend: The backend that ran it.
        selection: Why that one: the text of the decision.
        losses: Loss of each step.
        memory_bytes: Peak of memory that forward and backward of the loss added.
        loss_seconds: Time of forward and backward of the loss alone.
        step_seconds: Median time of a whole step: model, loss and optimizer.
    """

    name: str
    title: str
    op: str
    backend: str = ""
    selection: str = ""
    losses: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    memory_bytes: dict[str, int] = field(default_factory=dict)
    loss_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def largest_difference(self) -> float:
        """Largest difference of the two losses over the steps."""
        return max(abs(a - b) for a, b in zip(self.losses["headmux"], self.losses["plain"], strict=True))


@dataclass
class Score:
    """Log-probabilities of held-out text under one model.

    Attributes:
        model: ``teacher`` or ``student``.
        backend: The backend that ran it.
        selection: Why that one.
        nll: Mean negative log-probability of a token, by side.
        largest_difference: Largest difference of one token's log-probability between the sides.
        memory_bytes: Peak of memory of the scoring, by side.
    """

    model: str
    backend: str
    selection: str
    nll: dict[str, float]
    largest_difference: float
    memory_bytes: dict[str, int]


@dataclass
class Result:
    """All that was measured, in the order of the run.

    Attributes:
        shapes: Sizes of the models.
        tokens: Tokens of one step.
        phases: The three phases.
        scores: Of the teacher and the student, before the policy phase.
        rewards: Mean reward of each policy step's samples, which both sides learn from.
        samples: A prompt's continuation before and after the policy phase.
    """

    shapes: dict[str, Shape]
    tokens: int
    phases: list[Phase] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)


class Pair:
    """Two copies of a model, one learning through headmux, the other through plain PyTorch."""

    def __init__(self, model: Decoder, loss: Loss, rate: float, settings: Settings) -> None:
        self.loss = loss
        self.settings = settings
        self.models = {side: copy.deepcopy(model) for side in SIDES}
        self.optimizers = {
            side: torch.optim.AdamW(m.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-6)
            for side, m in self.models.items()
        }
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / _WARM_UP))
            for o in self.optimizers.values()
        ]
        self.functions: dict[str, Callable[..., Tensor]] = {"headmux": loss.headmux, "plain": loss.plain}

    def step(self, side: str, tokens: Tensor, rest: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        """One step of one side: its loss, still on the device, and its time."""
        model, optimizer = self.models[side], self.optimizers[side]
        start = measure.clock(self.settings.device)
        optimizer.zero_grad()
        with self.settings.autocast():
            loss = self.functions[side](model(tokens), model.head, *rest)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach(), measure.clock(self.settings.device) - start

    def measure(self, phase: Phase, tokens: Tensor, rest: tuple[Tensor, ...]) -> None:
        """Put the backend, memory and time of the loss alone into ``phase``: same states for both, no step taken."""
        model = self.models["headmux"]
        with torch.no_grad(), self.settings.autocast():
            states = model(tokens)
        states.requires_grad_()
        weight = model.head.detach().clone().requires_grad_()
        with self.settings.autocast():
            selection = self.loss.explain(states, weight, *rest)
        phase.backend, phase.selection = str(selection.chosen), str(selection)
        for side, function in self.functions.items():

            def work(function: Callable[..., Tensor] = function) -> None:
                states.grad = weight.grad = None
                with self.settings.autocast():
                    loss = function(states, weight, *rest)
                loss.backward()  # type: ignore[no-untyped-call]

            work()
            states.grad = weight.grad = None
            phase.memory_bytes[side] = measure.memory(work, self.settings.device)
            phase.loss_seconds[side] = measure.seconds(work, self.settings.device)


def run(settings: Settings, text: Text) -> Result:
    """Run the phases and say what happens."""
    torch.manual_seed(settings.seed)
    shapes = {
        "teacher": Shape(text.vocabulary, hidden=192, layers=1, heads=6, context=LENGTH),
        "student": Shape(text.vocabulary, hidden=96, layers=1, heads=3, context=LENGTH),
    }
    print(f"models  {', '.join(f'{n}: hidden {s.hidden}, {s.layers} layer' for n, s in shapes.items())}")
    teacher, student = (Decoder(shape).to(settings.device) for shape in shapes.values())
    result = Result(shapes, ROWS * LENGTH)

    train = Phase("train", "Train a teacher", "flce")
    pair = Pair(teacher, losses.cross_entropy(settings.impl), LEARNING_RATE["train"], settings)
    _learn(train, pair, _text_batches(settings, text), result)
    teacher = pair.models["headmux"]

    distil = Phase("distil", "Distil it into a student", "jsd")
    pair = Pair(student, losses.distillation(settings.impl), LEARNING_RATE["distil"], settings)
    _learn(distil, pair, _teacher_batches(settings, text, teacher), result)
    student = pair.models["headmux"]

    _heading("Score held-out text: linear_logp")
    for name, model in (("teacher", teacher), ("student", student)):
        result.scores.append(_score(name, model, text, settings))

    policy = Phase("policy", "Follow a reward", "linear_logp")
    pair = Pair(student, losses.policy_gradient(settings.impl), LEARNING_RATE["policy"], settings)
    _learn(policy, pair, _policy_batches(settings, text, pair.models["headmux"], result), result)
    print(f"  reward (share of lower-case letters and spaces) {result.rewards[0]:.3f} -> {result.rewards[-1]:.3f}")
    for when, sample in result.samples.items():
        print(f"  {when:<6} {sample!r}")
    return result


def _learn(phase: Phase, pair: Pair, batches: Iterator[Batch], result: Result) -> None:
    """Measure the loss alone on a first batch, then take the steps of a phase on both sides."""
    _heading(f"{phase.title}: {phase.op}")
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    steps = pair.settings.steps
    bar = tqdm(total=steps, desc=phase.name, leave=False, disable=not sys.stderr.isatty())
    for step in range(steps):
        tokens, rest = next(batches)
        if step == 0:
            pair.measure(phase, tokens, rest)
            bar.clear()
            print("  " + phase.selection.replace("\n", "\n  "), flush=True)
        for side in SIDES if step % 2 else reversed(SIDES):
            loss, seconds = pair.step(side, tokens, rest)
            phase.losses[side].append(float(loss))
            times[side].append(seconds)
        for schedule in pair.schedules:
            schedule.step()
        ours, plain = (phase.losses[side][-1] for side in SIDES)
        bar.set_postfix_str(f"headmux {ours:.4f} plain {plain:.4f}", refresh=False)
        bar.update()
        if bar.disable and (step + 1 == steps or step % max(1, steps // 4) == 0):
            print(f"  step {step + 1:>3}/{steps}  loss: headmux {ours:.6f}  plain {plain:.6f}", flush=True)
    bar.close()
    phase.step_seconds = {side: statistics.median(found[1:] or found) for side, found in times.items()}
    result.phases.append(phase)
    _table(phase)


def _table(phase: Phase) -> None:
    rows = [
        ("loss, first step", [f"{phase.losses[s][0]:.6f}" for s in SIDES]),
        ("loss, last step", [f"{phase.losses[s][-1]:.6f}" for s in SIDES]),
        ("memory of the loss", [f"{phase.memory_bytes[s] / 2**20:.1f} MiB" for s in SIDES]),
        ("time of the loss", [f"{phase.loss_seconds[s] * 1e3:.1f} ms" for s in SIDES]),
        ("time of a step", [f"{phase.step_seconds[s] * 1e3:.1f} ms" for s in SIDES]),
    ]
    print(f"  {'':<20}{phase.backend + ' (headmux)':>20}{'plain PyTorch':>18}")
    for name, (ours, plain) in rows:
        print(f"  {name:<20}{ours:>20}{plain:>18}")
    print(f"  largest difference of the losses {phase.largest_difference:.1e}", flush=True)


def _heading(text: str) -> None:
    print(f"\n{text}", flush=True)


def _generator(settings: Settings, phase: int, device: str | torch.device = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed((settings.seed + 7919 * phase) % 2**63)


def _text_batches(settings: Settings, text: Text) -> Iterator[Batch]:
    generator = _generator(settings, 1)
    while True:
        batch = windows(text.train, ROWS, LENGTH + 1, generator).to(settings.device)
        yield batch[:, :-1], (batch[:, 1:],)


def _teacher_batches(settings: Settings, text: Text, teacher: Decoder) -> Iterator[Batch]:
    generator = _generator(settings, 2)
    weight = teacher.head.detach()
    while True:
        batch = windows(text.train, ROWS, LENGTH, generator).to(settings.device)
        with torch.no_grad(), settings.autocast():
            states = teacher(batch)
        yield batch, (states, weight)


def _policy_batches(settings: Settings, text: Text, policy: Decoder, result: Result) -> Iterator[Batch]:
    """Continuations that headmux's side draws from real prompts. Both sides learn from these same samples."""
    prompts, draws = _generator(settings, 3), _generator(settings, 4, settings.device)
    while True:
        prompt = windows(text.train, PROMPTS, PROMPT, prompts).to(settings.device)
        with settings.autocast():
            tokens = policy.sample(prompt, SAMPLED, draws)
        written = text.decode(tokens[:, PROMPT:])
        reward = torch.tensor([_prose(w) for w in written], device=settings.device)
        result.rewards.append(float(reward.mean()))
        result.samples["after" if result.samples else "before"] = " ".join(written[0].split())
        advantage = (reward - reward.mean()) / reward.std().clamp(min=1e-6)
        target = tokens[:, 1:].clone()
        target[:, : PROMPT - 1] = IGNORE
        yield tokens[:, :-1], (target, advantage)


def _prose(written: str) -> float:
    """The reward: the share of lower-case letters and spaces, which favours prose over markup and code."""
    return len(re.findall("[a-z ]", written)) / max(1, len(written))


@torch.no_grad()
def _score(name: str, model: Decoder, text: Text, settings: Settings) -> Score:
    pieces = windows(text.held_out, ROWS, LENGTH + 1, _generator(settings, 5)).to(settings.device)
    target = pieces[:, 1:]
    loss = losses.scoring(settings.impl)
    found: dict[str, Tensor] = {}
    memory = {}
    with settings.autocast():
        states = model(pieces[:, :-1])
        selection = loss.explain(states, model.head, target)
        for side, function in (("headmux", loss.headmux), ("plain", loss.plain)):
            found[side] = function(states, model.head, target)
            memory[side] = measure.memory(partial(function, states, model.head, target), settings.device)
    nll = {side: -float(logp.mean()) for side, logp in found.items()}
    difference = float((found["headmux"] - found["plain"]).abs().max())
    ours, plain = (f"{memory[side] / 2**20:.1f}" for side in SIDES)
    print(f"  {name}, {target.numel()} tokens, {selection.chosen} selected (order from: {selection.source})")
    print(f"    mean negative log-probability: headmux {nll['headmux']:.6f}  plain {nll['plain']:.6f}")
    print(f"    largest difference of a token {difference:.1e}; memory {ours} MiB, plain {plain} MiB", flush=True)
    return Score(name, str(selection.chosen), str(selection), nll, difference, memory)
