"""Rows, the sequences of a batch, and how a long stream of tokens is split into them.

    stream     a b c d . e f . g h i        a period ends a document
    tokens     a b c d | . e f . | g h -
    labels     b c d . | - f . - | h i -    the first token of a document is not predicted
    positions  0 1 2 3 | 0 0 1 2 | 0 1 0
    segments   1 1 1 1 | 1 2 2 2 | 1 1 0    0 is the padding of the last row

A row of S tokens is read with the token after it, with which the next row begins: each token is
read once and predicted once. Within a row, positions start at 0 in each document, and attention
stays within it.
"""

import hashlib
import math
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from coat_jax.errors import UserError
from coat_jax.training.data.stream import Stream

IGNORED = -100


class Batch(NamedTuple):
    """Rows, or one of them."""

    tokens: Int32[np.ndarray, "*B S"]
    labels: Int32[np.ndarray, "*B S"]  # the token after each one; IGNORED where it does not count
    positions: Int32[np.ndarray, "*B S"]  # of each token in its document
    segments: Int32[np.ndarray, "*B S"]  # documents, numbered from 1 in each row; 0 is padding


class Rows(Protocol):
    """All rows of an epoch, by number.

    Attributes:
        sequence: the length of each.
        tokens: how many they hold together.
        packed: whether a row may hold several documents.
        truncated: how many documents were longer than a row, and lost their ends.
        digest: names the data and how it is split.
        end_of_text: the token that ends a document, if one is known.
    """

    sequence: int
    tokens: int
    packed: bool
    truncated: int
    digest: str
    end_of_text: int | None

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Batch: ...


class Windows:
    """The `Rows` of a part of a stream."""

    def __init__(
        self, stream: Stream, part: range, *, sequence: int, end_of_text: int | None, vocab: int
    ):
        if len(part) <= sequence:
            divided = (
                f" They are a part of its {len(stream):,} tokens, divided by data.held_out_part: "
                "change that, or name other files in data.held_out."
            )
            raise UserError(
                f"{stream.name}: {len(part):,} tokens are too few for a sequence of {sequence:,} "
                "and the token after it. Give more data, or lower sequence_length."
                f"{divided if len(part) < len(stream) else ''}"
            )
        if end_of_text is not None and end_of_text >= vocab:
            raise UserError(
                f"data.end_of_text={end_of_text} is not in the model's vocabulary of {vocab:,}."
            )
        self.sequence = sequence
        self.tokens = len(part)
        self.packed = end_of_text is not None
        self.truncated = 0
        samples = stream.digest(part, vocab=vocab)
        self.digest = short_hash(samples, part.start, end_of_text, sequence)
        self._stream, self._part = stream, part
        self.end_of_text, self._vocab = end_of_text, vocab

    def __len__(self) -> int:
        return math.ceil((self.tokens - 1) / self.sequence)

    def __getitem__(self, row: int) -> Batch:
        start = self._part.start + row * self.sequence
        stop = min(start + self.sequence + 1, self._part.stop)
        tokens = self._stream.read(start, stop, vocab=self._vocab)
        return padded(documents_of(tokens, self.end_of_text), self.sequence)


def short_hash(*values: object) -> str:
    """A name of 16 hexadecimal digits for these values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def documents_of(tokens: Int32[np.ndarray, " S+1"], end_of_text: int | None) -> Batch:
    """One row of tokens and the token after them; `end_of_text` is the last of a document."""
    inputs, labels = tokens[:-1], tokens[1:].copy()
    place = np.arange(len(inputs), dtype=np.int32)
    if end_of_text is None:
        return Batch(inputs, labels, place, np.ones_like(place))
    ends = inputs == end_of_text
    labels[ends] = IGNORED
    begins = np.concatenate([[False], ends[:-1]])
    segments = 1 + np.cumsum(begins, dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(begins, place, 0))
    return Batch(inputs, labels, positions, segments)


def padded(row: Batch, sequence: int) -> Batch:
    """The row at this length: what is added belongs to no document and is not predicted."""
    missing = sequence - len(row.tokens)
    if not missing:
        return row
    return Batch(
        tokens=np.pad(row.tokens, (0, missing)),
        labels=np.pad(row.labels, (0, missing), constant_values=IGNORED),
        positions=np.pad(row.positions, (0, missing)),
        segments=np.pad(row.segments, (0, missing)),
    )
