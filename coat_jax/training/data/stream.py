"""A stream: many files or arrays, read as one long array of tokens.

Nothing is loaded before it is read. Every token that is read is compared with the vocabulary:
that costs microseconds a row, where a scan of all data beforehand could take hours. The
digest reads samples when the data is opened, so most wrong files fail at once.
"""

import bisect
import hashlib
import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int32, UInt

from coat_jax.errors import UserError

SAMPLES, SAMPLE = 256, 1 << 16  # a digest reads this many pieces, of this many tokens


class Tokens(Protocol):
    """Tokens in memory or in a file; what is read of them is an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> UInt[np.ndarray, " N"]: ...


class Stream:
    """Tokens, one part after another.

    Args:
        parts: by their names in errors, such as the paths of files.
        vocab: the model's vocabulary; reading a token outside it raises UserError.
    """

    def __init__(self, parts: Mapping[str, Tokens], vocab: int):
        self._names, self._parts, self._vocab = list(parts), list(parts.values()), vocab
        self._ends = list(itertools.accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def name(self) -> str:
        """The first part, and how many there are besides."""
        others = len(self._names) - 1
        return self._names[0] + (f" and {others:,} more" if others else "")

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " N"]:
        """The tokens from `start` to before `stop`."""
        read, at = [], start
        while at < stop:
            number = bisect.bisect_right(self._ends, at)
            first = self._ends[number] - len(self._parts[number])
            tokens = self._parts[number][at - first : stop - first]
            if tokens.max() >= self._vocab:
                wrong = int(np.argmax(tokens >= self._vocab))
                raise UserError(
                    f"{self._names[number]}: token {at - first + wrong:,} is {tokens[wrong]:,}, "
                    f"and the model has a vocabulary of {self._vocab:,}. Is this another "
                    "tokenizer's file, or one of another dtype?"
                )
            read.append(tokens)
            at += len(tokens)
        return np.concatenate(read, dtype=np.int32, casting="unsafe")

    def digest(self, part: range) -> str:
        """A hash of these tokens: of all of them if they are few, otherwise of many samples."""
        hashed = hashlib.sha256(str(len(part)).encode())
        for start in part[:: max(SAMPLE, len(part) // SAMPLES)]:
            hashed.update(self.read(start, min(start + SAMPLE, part.stop)))
        return hashed.hexdigest()
