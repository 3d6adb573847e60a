"""Batches of text: for training, and for models that generate or evaluate.

Texts of different lengths are padded to few shapes, because each shape is a program to compile.
Rows are padded to a power of two (or to the model's context): texts of 1 to 1024 tokens need
seven programs at most, not a thousand.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from coat_jax.errors import UserError
from coat_jax.models.protocol import ModelConfig

IGNORED = -100
SHORTEST = 16
NOT_NUMBERS = (
    "The model's logits are not numbers: its parameters are damaged, or diverged in training. Try "
    "an earlier checkpoint."
)


class Batch(NamedTuple):
    """Rows of text, or one of them. Without positions and segments each row is one document."""

    tokens: Int[Any, "*B S"]
    labels: Int[Any, "*B S"]  # the token after each one; IGNORED where it does not count
    positions: Int[Any, "*B S"] | None = None  # of each token in its document
    segments: Int[Any, "*B S"] | None = None  # documents, numbered from 1; 0 is padding


def padded_length(longest: int, context: int) -> int:
    """The sequence length of the program that texts of this length share."""
    return min(max(SHORTEST, 1 << (longest - 1).bit_length()), context)


def padded_rows(rows: int, config: ModelConfig) -> int:
    """The smallest batch for so many texts that can be sharded along `batch_axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in config.batch_axes) if not mesh.empty else 1
    return math.ceil(rows / parts) * parts


def require_known(where: str, tokens: Sequence[int] | np.ndarray, vocab: int) -> None:
    """Raises unless the model knows these tokens.

    Args:
        where: the beginning of the error, as in "Prompt 2 has".
        tokens: the tokens of a text.
        vocab: the size of the model's vocabulary.
    """
    given = np.asarray(tokens)
    if given.size and (given.ndim != 1 or not np.issubdtype(given.dtype, np.integer)):
        raise TypeError(
            f"{where} {given.dtype.name} of shape {given.shape} for tokens: a text is a list of "
            "whole numbers, as a tokenizer's encode(text) returns."
        )
    if (outside := given[(given < 0) | (given >= vocab)]).size:
        raise UserError(
            f"{where} token {outside[0]}, outside the model's vocabulary of {vocab}. Does the "
            "tokenizer belong to this model?"
        )
