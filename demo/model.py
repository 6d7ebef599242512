"""A small decoder-only Transformer that stops at the hidden states: the head belongs to the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    context: int


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.norm_feed = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, bias=False)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] to [B, T, H]."""
        b, t, h = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(b, t, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, h))
        fed: Tensor = self.down(F.gelu(self.up(self.norm_feed(x))))
        return x + fed


class Decoder(nn.Module):
    """Tokens to hidden states. ``head`` is the [V, H] weight that a loss multiplies them with."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.context, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Parameter(0.02 * torch.randn(shape.vocabulary, shape.hidden))
        nn.init.normal_(self.position.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # products of unit size; the rows of embed are so by default
                nn.init.normal_(module.weight, std=shape.hidden**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] tokens to [B, T, H] hidden states."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        states: Tensor = self.norm(x)
        return states

    @torch.no_grad()
    def sample(self, prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """[B, T] prompts followed by ``count`` tokens drawn from the model, on the generator's device.

        Only the last position's logits are formed: [B, V].
        """
        tokens = prompt
        for _ in range(count):
            logits = F.linear(self(tokens)[:, -1], self.head).float()
            drawn = torch.multinomial(logits.softmax(1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens
