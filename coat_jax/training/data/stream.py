"""A stream: many parts, files or arrays, read as one long array of tokens.

Nothing is loaded before it is read. Every token that is read is compared with the vocabulary:
that costs microseconds a row, where a scan of all data beforehand could take hours. The
digest reads samples when the data is opened, so most wrong files fail at once.
"""

import bisect
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt

from coat_jax.errors import UserError

SAMPLES, SAMPLE = 256, 1 << 16  # a digest reads this many pieces, of this many tokens


class Part(NamedTuple):
    """A stretch of a stream."""

    name: str  # in errors, such as the path of its file
    length: int
    read: Callable[[int, int], UInt[np.ndarray, " N"]]  # the tokens from a start to before a stop


def part_in_memory(name: str, tokens: UInt[np.ndarray, " N"]) -> Part:
    """A part that is in memory."""
    return Part(name, len(tokens), lambda start, stop: tokens[start:stop])


class Stream:
    """Parts, one after another."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._ends = list(itertools.accumulate(part.length for part in parts))

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
            number = bisect.bisect_right(self._ends, at)
            part = self._parts[number]
            first = self._ends[number] - part.length
            tokens = part.read(at - first, min(stop - first, part.length))
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
