"""Real English text that ships with Python, its byte-pair vocabulary, and batches of it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCABULARY = 8192
_EVERY = 10  # one topic in ten is held out, and never seen by the vocabulary either


@dataclass(frozen=True)
class Text:
    """Token ids of the topics to train on and of those held out.

    Attributes:
        tokenizer: The byte-pair encoding.
        vocabulary: Its number of entries.
        characters: Length of the whole text.
        train: [tokens] int64.
        held_out: [tokens] int64.
    """

    tokenizer: Tokenizer
    vocabulary: int
    characters: int
    train: Tensor
    held_out: Tensor

    def __str__(self) -> str:
        return (
            f"{self.characters:,} characters of Python's help topics, {self.vocabulary:,} byte-pair tokens; "
            f"{self.train.numel():,} tokens to train on, {self.held_out.numel():,} held out"
        )

    def decode(self, rows: Tensor) -> list[str]:
        """The text of each row of [B, T] tokens."""
        found: list[str] = self.tokenizer.decode_batch(rows.tolist())
        return found


def load() -> Text:
    """Read the topics, train the vocabulary on all but the held-out ones, and encode both."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    names = sorted(topics)
    train = [topics[n] for i, n in enumerate(names) if i % _EVERY]
    held_out = [topics[n] for i, n in enumerate(names) if i % _EVERY == 0]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(train, trainer)

    def encode(texts: list[str]) -> Tensor:
        return torch.tensor([i for e in tokenizer.encode_batch(texts) for i in e.ids], dtype=torch.int64)

    characters = sum(map(len, topics.values()))
    return Text(tokenizer, tokenizer.get_vocab_size(), characters, encode(train), encode(held_out))


def windows(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[rows, length] pieces of a stream of tokens, from random places."""
    starts = torch.randint(0, tokens.numel() - length + 1, (rows,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length)]
