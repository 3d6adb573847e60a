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

import bisect
import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Bool, Int32, UInt

from coat_jax.errors import UserError
from coat_jax.models import Batch
from coat_jax.models.batches import IGNORED
from coat_jax.training.data.paths import listing

SAMPLES, SAMPLE = 256, 1 << 16  # a digest reads this many pieces, of this many tokens


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
        self.digest = hashlib.sha256(repr(digested).encode()).hexdigest()[:16]
        self.description = f"{tokens:,} tokens in {len(self):,} rows of {sequence:,}"
        fields = 2 if end_of_text is None else len(Batch._fields)
        self.padding: Any = pad(Batch(*[np.empty(0, np.int32)] * fields), sequence)

    def has_labels(self, row: Any) -> bool:
        """See `Rows`."""
        return bool(np.any(row.labels != IGNORED))


class Stream:
    """Tokens, one part after another.

    Every token that is read is compared with the vocabulary: that costs microseconds a row, where a
    scan of all data beforehand could take hours. The digest reads samples when the data is opened,
    so most wrong files fail at once.

    Args:
        parts: by their names in errors, such as the paths of files.
        vocab: the model's vocabulary; reading a token outside it raises UserError.
    """

    def __init__(self, parts: Mapping[str, UInt[np.ndarray, " _"]], vocab: int):
        self.names, self._parts, self._vocab = list(parts), list(parts.values()), vocab
        self._ends = list(itertools.accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " N"]:
        """Returns the tokens from `start` to before `stop`."""
        read, at = [], start
        while at < stop:
            number = bisect.bisect_right(self._ends, at)
            first = self._ends[number] - len(self._parts[number])
            tokens = self._parts[number][at - first : stop - first]
            if tokens.max() >= self._vocab:
                wrong = int(np.argmax(tokens >= self._vocab))
                raise UserError(
                    f"{self.names[number]}: token {at - first + wrong:,} is {tokens[wrong]:,}, "
                    f"and the model has a vocabulary of {self._vocab:,}. Is this another "
                    "tokenizer's file, or one of another dtype?"
                )
            read.append(tokens)
            at += len(tokens)
        return np.concatenate(read, dtype=np.int32, casting="unsafe")

    def digest(self, part: range) -> str:
        """Returns a hash of these tokens: of all if they are few, otherwise of many samples."""
        hashed = hashlib.sha256(str(len(part)).encode())
        for start in part[:: max(SAMPLE, len(part) // SAMPLES)]:
            hashed.update(self.read(start, min(start + SAMPLE, part.stop)))
        return hashed.hexdigest()


class Windows(TextRows):
    """A part of a stream."""

    def __init__(self, stream: Stream, part: range, *, sequence: int, end_of_text: int | None):
        if len(part) <= sequence:
            raise UserError(
                f"{listing(stream.names)}: {len(part):,} of its {len(stream):,} tokens are too few "
                f"for a sequence of {sequence:,} and the token after it. Give more data, lower "
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
