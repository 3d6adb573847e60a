"""The rows of a batch, and how a long stream of tokens is split into rows of text.

    stream     a b c d . e f . g h i        a period ends a document
    tokens     a b c d | . e f . | g h -
    labels     b c d . | - f . - | h i -    the first token of a document is not predicted
    positions  0 1 2 3 | 0 0 1 2 | 0 1 0
    segments   1 1 1 1 | 1 2 2 2 | 1 1 0    0 is the padding of the last row

A row of S tokens is read with the token after it, with which the next row begins: each token is
read once and predicted once. Within a row, positions start at 0 in each document, and attention
stays within it. If no row has two documents, there are neither positions nor segments: attention
is faster without them.
"""

import math
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Bool, Int32

from coat_jax.errors import UserError
from coat_jax.models import Batch
from coat_jax.models.batches import IGNORED
from coat_jax.tokenizers import digest_of
from coat_jax.training.data.stream import Stream


class Rows(Protocol):
    """All rows of an epoch, by number: each a tree of arrays, without an axis over rows.

    Attributes:
        digest: names the data and how it is split.
        end_of_text: the token that ends a document, if one is known.
        description: of the data, for the terminal.
        padding: a row that adds nothing to a loss.
    """

    digest: str
    end_of_text: int | None
    description: str
    padding: Any

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...

    def has_labels(self, row: Any) -> bool:
        """Returns whether a row adds to the loss."""


class TextRows(Rows):
    """Rows of `sequence` tokens, which have positions and segments if `end_of_text` is known."""

    def __init__(self, sequence: int, tokens: int, end_of_text: int | None, digested: Any):
        self.sequence, self.tokens, self.end_of_text = sequence, tokens, end_of_text
        self.digest = digest_of(repr(digested).encode())
        self.description = f"{tokens:,} tokens in {len(self):,} rows of {sequence:,}"
        fields = 2 if end_of_text is None else len(Batch._fields)
        self.padding = pad(Batch(*[np.empty(0, np.int32)] * fields), sequence)

    def has_labels(self, row: Batch) -> bool:
        """See `Rows`."""
        return bool(np.any(row.labels != IGNORED))


class Windows(TextRows):
    """A part of a stream."""

    def __init__(self, stream: Stream, part: range, *, sequence: int, end_of_text: int | None):
        if len(part) <= sequence:
            raise UserError(
                f"{stream.name}: {len(part):,} of its {len(stream):,} tokens are too few for a "
                f"sequence of {sequence:,} and the token after it. Give more data, lower "
                "sequence_length, change data.held_out_part, or name files in data.held_out."
            )
        self._stream, self._part = stream, part
        digested = stream.digest(part), part.start, end_of_text, sequence
        super().__init__(sequence, len(part), end_of_text, digested)

    def __len__(self) -> int:
        return math.ceil((len(self._part) - 1) / self.sequence)

    def __getitem__(self, row: int) -> Batch:
        start = self._part.start + row * self.sequence
        tokens = self._stream.read(start, min(start + self.sequence + 1, self._part.stop))
        inputs, labels = tokens[:-1], tokens[1:]
        if self.end_of_text is None:
            return pad(Batch(inputs, labels), self.sequence)
        return pad(documents_of(inputs, labels, inputs == self.end_of_text), self.sequence)


def documents_of(
    tokens: Int32[np.ndarray, " S"], labels: Int32[np.ndarray, " S"], ends: Bool[np.ndarray, " S"]
) -> Batch:
    """Returns a row of documents; `ends` says which tokens are the last ones of theirs."""
    place = np.arange(len(tokens), dtype=np.int32)
    begins = np.concatenate([[False], ends[:-1]])
    segments = 1 + np.cumsum(begins, dtype=np.int32)
    positions = place - np.maximum.accumulate(np.where(begins, place, 0))
    return Batch(tokens, np.where(ends, np.int32(IGNORED), labels), positions, segments)


def pad(row: Batch, sequence: int) -> Batch:
    """Returns the row at this length. Padding has segment 0 and no labels."""
    missing = (0, sequence - len(row.tokens))
    labels: Any = np.pad(row.labels, missing, constant_values=IGNORED)
    return jax.tree.map(lambda array: np.pad(array, missing), row)._replace(labels=labels)
