"""What is measured: sizes, named sets of them, and the variants of a call."""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("flce", "jsd", "linear_logp")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one language-model head.

    Attributes:
        n: Tokens.
        h: Hidden size.
        v: Vocabulary.
        softcap: Bound of the logits, ``softcap * tanh(z / softcap)``, or None.
        model: Name of the model with such a head, if any.
    """

    n: int
    h: int
    v: int
    softcap: float | None = None
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape from ``N,H,V`` or ``N,H,V,SOFTCAP``.

        Raises:
            ValueError: Not three positive integers, with or without a softcap above 0.
        """
        parts = [p.strip() for p in text.split(",")]
        try:
            n, h, v = (int(p) for p in parts[:3])
            softcap = float(parts[3]) if len(parts) > 3 else None
        except ValueError as error:
            raise ValueError(f"--shape {text!r} is not N,H,V or N,H,V,SOFTCAP") from error
        if len(parts) > 4 or min(n, h, v) < 1 or (softcap is not None and softcap <= 0):
            raise ValueError(f"--shape {text!r} needs positive sizes, as N,H,V or N,H,V,SOFTCAP")
        return cls(n, h, v, softcap)

    def __str__(self) -> str:
        cap = f" softcap={self.softcap:g}" if self.softcap is not None else ""
        return f"N={self.n} H={self.h} V={self.v}{cap}" + (f" ({self.model})" if self.model else "")


_UPSTREAMS = ("default", "scaled", "nograd", "rows")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a shape is called.

    Attributes:
        upstream: ``"default"``: the backward of the loss itself (for linear_logp, of a random gradient per token);
            ``"scaled"``: of half of it, as a loss scale or an accumulation step makes it (for linear_logp, of the
            negated mean, a gradient of stride 0); ``"nograd"``: the forward alone, under ``torch.no_grad``; ``"rows"``:
            flce and jsd with ``reduction="none"`` and a random gradient per token.
        half: Half of the tokens are ignored, as prompts are in fine-tuning.
        trained: Data of a trained model (see headmux.bench.problem) instead of random data.
    """

    upstream: str = "default"
    half: bool = False
    trained: bool = False

    @classmethod
    def parse(cls, text: str) -> Variant:
        """A variant from words joined by ``+``, such as ``half`` or ``scaled+trained``.

        Raises:
            ValueError: An unknown word, or two upstreams.
        """
        words = [w.strip().lower() for w in text.split("+") if w.strip()]
        upstreams = [w for w in words if w in _UPSTREAMS]
        unknown = [w for w in words if w not in (*_UPSTREAMS, "half", "trained")]
        if unknown or len(upstreams) > 1:
            raise ValueError(f"--variant {text!r}: words are one of {', '.join(_UPSTREAMS)}, and half, trained")
        return cls(upstreams[0] if upstreams else "default", "half" in words, "trained" in words)

    @property
    def gradients(self) -> bool:
        """Whether gradients are formed."""
        return self.upstream != "nograd"

    def __str__(self) -> str:
        words = [self.upstream] if self.upstream != "default" or not (self.half or self.trained) else []
        return "+".join([*words, *["half"] * self.half, *["trained"] * self.trained])


@dataclass(frozen=True, slots=True)
class Part:
    """Shapes of one op that are called in the same ways beside the same peers.

    Attributes:
        shapes: The sizes.
        variants: How each is called.
        peers: Groups of peers. ``torch.compile`` takes seconds for each shape, so that few parts have it.
    """

    shapes: tuple[Shape, ...]
    variants: tuple[str, ...] = ("default",)
    peers: str = "eager"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of measurements.

    Attributes:
        parts: Op name to what is measured.
        dtype: Default dtype, by name.
        seconds: Default time for the rounds of one shape.
        what: One line for ``--help``.
        impl: Default backends; None for all.
        threads: Threads on a CPU; None for as many as PyTorch takes.
    """

    parts: dict[str, tuple[Part, ...]]
    dtype: str
    seconds: float
    what: str
    impl: str | None = None
    threads: int | None = None


def _every(*parts: Part) -> dict[str, tuple[Part, ...]]:
    return dict.fromkeys(OPS, parts)


_SMALL, _MEDIUM, _LARGE = (
    tuple(Shape(n, 4096, 128256) for n in tokens) for tokens in ((1024, 2048), (4096,), (8192, 16384))
)
_MODELS = tuple(
    Shape(4096, h, v, softcap, model)
    for h, v, softcap, model in (
        (4096, 128256, None, "Llama 3 8B"),
        (4096, 151936, None, "Qwen3 8B"),
        (3584, 256000, 30.0, "Gemma 2 9B"),
        (2560, 262144, None, "Gemma 3 4B"),
    )
)
_SEEDS = _every(Part(_SMALL), Part(_MEDIUM, peers="all"), Part((*_LARGE, Shape(16384, 4096, 32000))))
_SEEDS["linear_logp"] += (Part((*_SMALL, *_MEDIUM, _LARGE[0]), ("nograd",)),)
_VARIANTS = _every(Part(_MEDIUM, ("scaled", "nograd", "rows", "half", "trained")))
_VARIANTS["linear_logp"] = (Part(_MEDIUM, ("scaled", "half", "trained")),)

PRESETS = {
    "seeds": Preset(_SEEDS, "bfloat16", 12.0, "the published shapes; torch.compile at 4096 tokens only"),
    "models": Preset(_every(Part(_MODELS)), "bfloat16", 8.0, "heads of real models at 4096 tokens"),
    "variants": Preset(_VARIANTS, "bfloat16", 8.0, "other upstreams, ignored tokens and trained data at 4096 tokens"),
    "packed": Preset(
        _every(Part((Shape(3001, 4096, 128256),))), "bfloat16", 8.0, "3001 tokens, a prime: packing leaves any number"
    ),
    "fp32": Preset(_every(Part((_SMALL[0], *_MEDIUM))), "float32", 15.0, "fp32 inputs"),
    "quick": Preset(
        _every(Part((Shape(128, 64, 1000), Shape(256, 64, 1000)))), "float32", 1.0, "tiny, under a minute on a CPU",
        threads=1,  # with more, what others run on the same cores would decide the times of so small products
    ),
    "cpu": Preset(
        {
            "flce": (Part((Shape(2048, 512, 32000),), peers="pytorch"),),
            "jsd": (Part((Shape(1024, 512, 32000),), peers="pytorch"),),
            "linear_logp": (Part((Shape(2048, 512, 32000),), peers="pytorch"),),
        },
        "float32",
        180.0,
        "fp32 on a CPU, beside plain PyTorch",
        "torch",
    ),
}
"""Named sets of measurements."""
