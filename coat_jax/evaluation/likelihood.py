"""The log probability that a model gives to tokens, each after those before it.

    log p(x_i | x_0 .. x_i-1) = logit of x_i - log-sum-exp of all logits, in FP32

Passages of similar length share a batch, of which only a chunk of positions has logits at a time.
Rows are padded after the text and batches with copies of a row, which changes results only by
rounding: FP8 operands have one power of two as scale, from the largest magnitude in a batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from coat_jax.errors import UserError
from coat_jax.models import Llama
from coat_jax.models.batches import NOT_NUMBERS, padded_length, padded_rows, require_known
from coat_jax.models.protocol import require_capability
from coat_jax.validation import Count, require

CHUNK = 128  # positions of a batch that have logits at a time

OnProgress = Callable[[int, int], object]


class Passage(NamedTuple):
    """A text, or a part of one, of which some tokens are scored.

    Attributes:
        tokens: one more than the model's context at most, for the last is only predicted.
        first: the first one that is scored; all after it are, too.
    """

    tokens: Sequence[int]
    first: int = 1


def log_probabilities(
    model: Llama,
    passages: Sequence[Passage],
    *,
    batch: int = 8,
    progress: OnProgress = lambda done, of: None,
) -> list[Float[np.ndarray, " scored"]]:
    """Returns the log probability of each scored token, passage by passage.

    Args:
        model: on a mesh, call this with the mesh set.
        passages: in any order.
        batch: how many share a batch.
        progress: called with how many passages are done, and of how many.
    """
    require_capability("coat.evaluation", model, "hidden", "logits")
    require("batch", batch, Count)
    context, vocab = model.config.context, model.config.vocab
    for number, (tokens, first) in enumerate(passages):
        if not 1 <= first < len(tokens) <= context + 1:
            raise UserError(
                f"Passage {number} has {len(tokens)} tokens, of which those from {first} on are "
                "scored: at least one must be scored, one must come before it, and "
                f"context={context} allows {context + 1} tokens."
            )
        require_known(f"Passage {number} has", tokens, vocab)
    graph, state = nnx.split(model)
    rows = padded_rows(min(batch, len(passages)), model.config)

    def start_batches() -> Iterator[tuple[list[int], Float[Array, "B S"]]]:
        for length, numbers in _batches(passages, context, batch):
            tokens, labels = _arrays([passages[number].tokens for number in numbers], rows, length)
            yield numbers, _log_probabilities(graph, state, tokens, labels)

    found: list[Any] = [None] * len(passages)
    done = 0
    started: Iterator[Any] = itertools.chain(start_batches(), [None])
    # `pairwise` starts the next batch before the host reads the results of this one.
    for (numbers, scores), _ in itertools.pairwise(started):
        for number, row in zip(numbers, np.asarray(scores), strict=False):
            found[number] = row[passages[number].first - 1 : len(passages[number].tokens) - 1]
            if not np.isfinite(found[number]).all():
                raise UserError(NOT_NUMBERS)
        done += len(numbers)
        progress(done, len(passages))
    return found


def _batches(passages: Sequence[Passage], context: int, batch: int) -> list[tuple[int, list[int]]]:
    """Returns the length of each batch, and the numbers of its passages."""
    by_length: dict[int, list[int]] = {}
    for number, passage in enumerate(passages):
        length = padded_length(len(passage.tokens) - 1, context)
        by_length.setdefault(length, []).append(number)
    return [
        (length, numbers[first : first + batch])
        for length, numbers in sorted(by_length.items())
        for first in range(0, len(numbers), batch)
    ]


def _arrays(
    texts: Sequence[Sequence[int]], rows: int, length: int
) -> tuple[Int32[np.ndarray, "B S"], Int32[np.ndarray, "B S"]]:
    """Returns tokens and labels. Rows repeat their last token, and a batch its last row."""
    whole = np.empty((rows, length + 1), np.int32)
    for row, text in enumerate(texts):
        whole[row, : len(text)] = text
        whole[row, len(text) :] = text[-1]
    whole[len(texts) :] = whole[len(texts) - 1]
    return whole[:, :-1], whole[:, 1:]


@partial(jax.jit, static_argnums=0)
def _log_probabilities(
    graph: Any, state: Any, tokens: Int[Array, "B S"], labels: Int[Array, "B S"]
) -> Float[Array, "B S"]:
    model = nnx.merge(graph, state)

    def of_chunk(part: tuple[Array, Array]) -> Array:
        hidden, labels = part
        logits = model.logits(hidden)
        label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return label - jax.nn.logsumexp(logits, axis=-1)

    rows, length = tokens.shape
    chunks = lax.map(of_chunk, (_chunks(model.hidden(tokens)), _chunks(labels)))
    return jnp.moveaxis(chunks, 0, 1).reshape(rows, -1)[:, :length]


def _chunks(x: Array) -> Array:
    """[B, S, ...] to [chunks, B, C, ...]; the last chunk is padded with zeros."""
    rows, length = x.shape[:2]
    chunk = min(CHUNK, length)
    x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
