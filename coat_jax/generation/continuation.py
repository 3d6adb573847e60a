"""Texts continued, a few tokens at a time.

    first call     prompts -> cache, the first new token of each
    later calls    CHUNK more tokens of each, until all texts have ended

The host reads a chunk while the device computes the next one, so that the device never waits.
Prompts are padded as in `models.batches`, and caches to a multiple of 64 slots: few programs
of each kind suffice.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from coat_jax.errors import UserError
from coat_jax.generation.cache import Cache, decode, prefill
from coat_jax.generation.sampling import Sampling, choose
from coat_jax.models.batches import NOT_NUMBERS, padded_length, padded_rows, require_known
from coat_jax.models.protocol import require_capability
from coat_jax.numerics.cache_formats import CacheFormat, require_cache_format
from coat_jax.printable import amount
from coat_jax.validation import Count, require

CHUNK = 8
SLOTS = 64
NOTHING, NOT_A_NUMBER = -1, -2  # in the place of a token

Prompts = Sequence[Sequence[int]]
DEFAULT = Sampling()


def stream(
    model: Any,
    prompts: Prompts,
    *,
    max_tokens: int,
    sampling: Sampling = DEFAULT,
    stops: Sequence[int] = (),
    first: int = 0,
    images: Sequence[Sequence[np.ndarray]] | None = None,
    cache: CacheFormat | None = None,
) -> Iterator[list[list[int]]]:
    """Yields lists of new tokens, one for each prompt, until all texts have ended.

    Args:
        model: a `Llama`, or another one with such a `decoder`. On a mesh, call this with the mesh
            set.
        prompts: tokens of each text so far.
        max_tokens: how many more at most; a text ends at the model's context in any case.
        sampling: how they are chosen.
        stops: tokens that end a text, and are left out.
        first: the number of the first prompt. A prompt's random numbers depend on its number, not
            on the prompts beside it.
        images: of each prompt, for a model that sees images: as `ImageFormat.pixels` returns them.
        cache: how keys and values of past tokens are stored: "int8", "fp8", "int4", or None for the
            model's dtype.
    """
    require_capability("coat.generation", model, "embed_tokens", "decoder")
    require_prompts(model.config, prompts, max_tokens=max_tokens)
    require_known("stops has", stops, model.config.vocab)
    _require_images(model.config, prompts, images)
    require_cache_format(cache, model.decoder.config.head_dim)
    context = model.config.context
    lengths = [len(prompt) for prompt in prompts]
    limits = [min(int(max_tokens), context - length) for length in lengths]
    rows, length = padded_rows(len(prompts), model.config), padded_length(max(lengths), context)
    later = math.ceil((max(limits) - 1) / CHUNK)
    slots = math.ceil((length + later * CHUNK) / SLOTS) * SLOTS
    # Features of images would take the places of padding that is the image token.
    padding = int(getattr(model.config, "image_token", None) == 0)
    tokens = np.full((rows, length), padding, np.int32)
    starts, remaining = np.full(rows, length - 1, np.int32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        starts[row], remaining[row] = length - len(prompt), limits[row]
        tokens[row, starts[row] :] = prompt
    numbers = np.arange(first, first + rows, dtype=np.uint32)
    pixels = () if images is None else (_stacked(model.config, images, rows),)
    inputs, ends = (tokens, starts, remaining, numbers, *pixels), np.array(stops, np.int32)
    settings = sampling, ends, *nnx.split(model.decoder)

    def chunks() -> Iterator[list[list[int]]]:
        chunk, session = _begin(sampling, ends, *nnx.split(model), slots, cache, *inputs)
        for _ in range(later):
            following, session = _continue(*settings, session)
            new = _lists(chunk, len(prompts))
            yield new
            if all(len(text) < chunk.shape[1] for text in new):
                return
            chunk = following
        yield _lists(chunk, len(prompts))

    return chunks()


def generate(model: Any, prompts: Prompts, **settings: Any) -> list[list[int]]:
    """Returns all new tokens of each prompt: the chunks of `stream`, joined."""
    chunks = stream(model, prompts, **settings)
    return [list(itertools.chain.from_iterable(of_one)) for of_one in zip(*chunks, strict=True)]


def _stacked(
    config: Any, images: Sequence[Sequence[np.ndarray]], rows: int
) -> UInt8[np.ndarray, "B I H W 3"]:
    """The images of each row, as many as those with most have."""
    size = config.tower.images.size
    most = max(1, *map(len, images))
    pixels = np.zeros((rows, most, size, size, 3), np.uint8)
    for row, of_row in enumerate(images):
        for i, image in enumerate(of_row):
            pixels[row, i] = image
    return pixels


def _lists(chunk: Int[Array, "B C"], prompts: int) -> list[list[int]]:
    rows = np.asarray(chunk)[:prompts]
    if (rows == NOT_A_NUMBER).any():
        raise UserError(NOT_NUMBERS)
    return [[int(token) for token in row if token != NOTHING] for row in rows]


# --- The programs ----------------------------------------------------------------------------


class _Session(NamedTuple):
    cache: Cache
    tokens: Int[Array, " B"]  # the newest, not in the cache yet
    remaining: Int[Array, " B"]  # how many more each text may have; 0 once it has ended
    numbers: Int[Array, " B"]


@partial(jax.jit, static_argnums=(0, 2, 4, 5))
def _begin(
    sampling: Sampling,
    stops: Int[Array, " E"],
    graph: Any,
    state: Any,
    slots: int,
    cache: CacheFormat | None,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
    remaining: Int[Array, " B"],
    numbers: Int[Array, " B"],
    *images: UInt8[Array, "B I H W 3"],
) -> tuple[Int[Array, "B 1"], _Session]:
    logits, begun = prefill(nnx.merge(graph, state), tokens, starts, slots, *images, cache=cache)
    session = _Session(begun, tokens[:, -1], remaining, numbers)
    new, session = _choose_next(sampling, stops, logits, session)
    return new[:, None], session


@partial(jax.jit, static_argnums=(0, 2), donate_argnums=4)
def _continue(
    sampling: Sampling, stops: Int[Array, " E"], graph: Any, state: Any, session: _Session
) -> tuple[Int[Array, "B C"], _Session]:
    """CHUNK more tokens of each text.

    To stop once all texts have ended, the GPU would have to ask the host after every token.
    """
    model = nnx.merge(graph, state)

    def step(session: _Session, _: None) -> tuple[_Session, Array]:
        logits, cache = decode(model, session.tokens, session.cache)
        new, session = _choose_next(sampling, stops, logits, session._replace(cache=cache))
        return session, new

    session, chunk = lax.scan(step, session, length=CHUNK)
    return chunk.T, session


def _choose_next(
    sampling: Sampling, stops: Int[Array, " E"], logits: Float[Array, "B V"], session: _Session
) -> tuple[Int[Array, " B"], _Session]:
    """Returns the next tokens: NOTHING where a text has ended, NOT_A_NUMBER for broken logits."""
    lengths = session.cache.filled - session.cache.starts
    tokens = choose(logits, sampling, session.numbers, lengths)
    over = session.remaining <= 0
    # The token that is chosen of NaN, often 0, may be a stop token, and would end the text.
    broken = ~over & ~jnp.isfinite(logits).all(axis=-1)
    ended = over | (~broken & jnp.isin(tokens, stops))
    remaining = jnp.where(ended, 0, session.remaining - 1)
    new = jnp.where(broken, NOT_A_NUMBER, jnp.where(ended, NOTHING, tokens))
    return new, session._replace(tokens=tokens, remaining=remaining)


# --- Refusals --------------------------------------------------------------------------------


def require_prompts(config: Any, prompts: Prompts, *, max_tokens: int) -> None:
    """Raises unless `stream` can continue these prompts; needs no model yet."""
    if not len(prompts):
        raise UserError("There is no prompt.")
    require("max_tokens", max_tokens, Count)
    for number, prompt in enumerate(prompts, 1):
        name = "The prompt" if len(prompts) == 1 else f"Prompt {number}"
        if not 1 <= len(prompt) < config.context:
            raise UserError(
                f"{name} has {amount(len(prompt), 'token')}, and must have from 1 to "
                f"{config.context - 1}: the model's context={config.context} must hold one more."
            )
        require_known(f"{name} has", prompt, config.vocab)


def _require_images(config: Any, prompts: Prompts, images: Sequence[Any] | None) -> None:
    """Raises unless prompts have places for the features of all their images, and no others."""
    sees_images = hasattr(config, "image_token")
    if images is None:
        if sees_images:
            raise TypeError("This model sees images: pass those of each prompt, [] if it has none.")
        return
    if not sees_images:
        raise TypeError("This model sees no images: leave them out.")
    if len(images) != len(prompts):
        raise ValueError(f"There are images of {len(images)} prompts, and {len(prompts)} prompts.")
    for number, (prompt, of_one) in enumerate(zip(prompts, images, strict=True), 1):
        places, features = list(prompt).count(config.image_token), len(of_one) * config.features
        if places != features:
            raise UserError(
                f"Prompt {number} has the token {config.image_token}, which stands for a feature, "
                f"{places} times, and its images have {features} features."
            )
