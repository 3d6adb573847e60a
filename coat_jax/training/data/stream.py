"""A stream: many parts, files or arrays, read as one long array of tokens.

Nothing is loaded before it is read. Every token that is read is compared with the vocabulary:
that costs microseconds a row, where a scan of all data beforehand could take hours. The
digest reads samples when the data is opened, so most wrong files fail at once.
"""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32, UInt

from coat_jax.errors import UserError

SAMPLES, SAMPLE = 256, 1 << 16  # a digest reads this many pieces, of this many tokens


class Part(Protocol):
    """A stretch of a stream."""

    @property
    def name(self) -> str:
        """Its name in errors, such as the path of its file."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " N"]:
        """Its tokens from `start` to before `stop`."""


@dataclasses.dataclass(frozen=True)
class TokensInMemory:
    """A part that is in memory."""

    name: str
    array: UInt[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " N"]:
        """See `Part`."""
        return self.array[start:stop]


class Stream:
    """Parts, one after another."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def name(self) -> str:
        """The first part, and how many there are besides."""
        others = len(self._parts) - 1
        return self._parts[0].name + (f" and {others:,} more" if others else "")

    def read(self, start: int, stop: int, *, vocab: int) -> Int32[np.ndarray, " N"]:
        """The tokens from `start` to before `stop`; raises where one is outside the vocabulary."""
        read, at = [], start
        while at < stop:
            number, first = self._find(at)
            part = self._parts[number]
            tokens = part.read(at - first, min(stop - first, len(part)))
            if tokens.max() >= vocab:
                wrong = int(np.argmax(tokens >= vocab))
                raise UserError(
                    f"{part.name}: token {at - first + wrong:,} is {tokens[wrong]:,}, and the "
                    f"model has a vocabulary of {vocab:,}. Is this another tokenizer's file, or "
                    "one of another dtype?"
                )
            read.append(tokens)
            at += len(tokens)
        return np.concatenate(read, dtype=np.int32, casting="unsafe")

    def digest(self, part: range, *, vocab: int) -> str:
        """A hash of these tokens: of all of them if they are few, otherwise of many samples."""
        hashed = hashlib.sha256(str(len(part)).encode())
        for start in part[:: max(SAMPLE, len(part) // SAMPLES)]:
            hashed.update(self.read(start, min(start + SAMPLE, part.stop), vocab=vocab))
        return hashed.hexdigest()

    def _find(self, position: int) -> tuple[int, int]:
        """The number of the part at this position, and where it begins."""
        number = bisect.bisect_right(self._ends, position)
        return number, self._ends[number - 1] if number else 0
