"""The built-in corpus for the experiments: windows of it that start anywhere.

The text is that of `coat_jax.training.data.corpus`. The trainer shuffles rows instead, so that each
token is read once in an epoch; the recorded experiments drew windows at random, and still do.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, UInt8

from coat_jax.training.data.corpus import Corpus, load

__all__ = ["Corpus", "batches", "load"]


def batches(
    tokens: UInt8[np.ndarray, " N"], batch: int, sequence: int, seed: int
) -> Iterator[Int32[np.ndarray, "B S+1"]]:
    """Yields, without end, windows that start anywhere: S inputs and the S targets after them."""
    if len(tokens) <= sequence:
        raise ValueError(f"{len(tokens)} tokens are too few for windows of {sequence=} + 1.")
    random = np.random.default_rng(seed)
    window = np.arange(sequence + 1)
    while True:
        starts = random.integers(len(tokens) - sequence, size=(batch, 1))
        yield tokens[starts + window].astype(np.int32)
