"""A model, token by token: the keys and values of past tokens are stored, not recomputed.

    slot      0   1   2   3   4   5   6   7
    text 0    .   .   a   b   c   d   -   -       starts at slot 2
    text 1    e   f   g   h   i   j   -   -       starts at slot 0;  6 slots are filled

All texts end at the same slot, so that a new token of each takes the same one: one write into
each array of the cache, wherever the texts began. A token's position is its slot less the text's
start. A token sees the slots from its text's start to its own, or the last `window` of them.

`prefill` runs the forward pass of training; the slots before a text are a segment of their own.
`decode` computes the same for one new token of each text. Only the scales of FP8 products differ,
because they come from fewer rows. With a `CacheFormat` it reads rounded keys and values, and
`prefill` does not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from coat_jax import nn
from coat_jax.models import Config, Llama
from coat_jax.models.llama import shard_batch
from coat_jax.nn.parameters import divides_evenly
from coat_jax.numerics.cache_formats import CacheFormat


class Cache(NamedTuple):
    """The past of a batch of texts, in T slots.

    Attributes:
        past: keys and values of all layers, in the model's dtype or a `CacheFormat`.
        starts: the first slot of each text.
        filled: how many slots are taken, from the first on.
    """

    past: nn.Past  # codes [L, B, K, T, H]
    starts: Int[Array, " B"]
    filled: Int[Array, ""]


def prefill(
    model: Any,
    tokens: Int[Array, "B S"],
    starts: Int[Array, " B"],
    slots: int,
    *images: Array,
    cache: CacheFormat | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits after the last token of each text, and a cache with room for more.

    Args:
        model: a `Llama`, or a model that has one as its `decoder`.
        tokens: the texts, each at the right end of its row.
        starts: where they begin; what stands before is ignored.
        slots: of the cache, S or more.
        *images: those of all texts, if the model sees images.
        cache: the format of keys and values; by default they have the model's dtype.
    """
    decoder, length = model.decoder, tokens.shape[1]
    places = jnp.arange(length) - starts[:, None]
    positions, segments = jnp.maximum(places, 0), (places >= 0).astype(jnp.int32)

    def layer(block: nn.TransformerBlock, x: Array, number: Any) -> tuple[Array, nn.Past]:
        del number
        return block.prefill(x, positions, segments, cache)

    x, new = _run_layers(decoder, model.embed_tokens(tokens, *images), layer)
    past = jax.tree.map(lambda n: _pad(n, slots, decoder.config), new)
    logits = decoder.logits(decoder.norm(x[:, -1:]))[:, 0]
    return logits, Cache(past, starts, jnp.int32(length))


def decode(
    model: Llama, tokens: Int[Array, " B"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits after one more token of each text, and the cache with it.

    Args:
        model: the model.
        tokens: the next one of each text.
        cache: with a slot to spare: where there is none, the last one is overwritten.
    """
    slot, past = cache.filled, cache.past
    positions = (slot - cache.starts)[:, None]
    first = cache.starts
    if model.config.window is not None:
        first = jnp.maximum(first, slot - model.config.window + 1)

    def layer(block: nn.TransformerBlock, x: Array, number: Any) -> tuple[Array, nn.Past]:
        x, new = block.decode(x, positions, nn.Visible(past, number, first, slot))
        return x, jax.tree.map(_in_words, new)

    x, new = _run_layers(model, model.embed_tokens(tokens[:, None]), layer)
    past = jax.tree.map(lambda old, one: _write(old, one, slot), past, new)
    return model.logits(model.norm(x))[:, 0], Cache(past, cache.starts, slot + 1)


Layer = Callable[[nn.TransformerBlock, Array, Any], tuple[Array, nn.Past]]


def _run_layers(
    model: Llama, x: Float[Array, "B S D"], layer: Layer
) -> tuple[Float[Array, "B S D"], nn.Past]:
    """Returns the residual stream after all layers, and their new keys and values, stacked."""
    config = model.config

    def step(x: Array, block: nn.TransformerBlock, number: Any) -> tuple[Array, nn.Past]:
        x, new = layer(block, x, number)
        return shard_batch(x, config.batch_axes), new

    if config.scan:
        graph, stacked = nnx.split(model.layers)
        layers = stacked, jnp.arange(config.layers)
        return lax.scan(lambda x, of: step(x, nnx.merge(graph, of[0]), of[1]), x, layers)
    news = []
    for i, block in enumerate(model.layers):
        x, new = step(x, block, i)
        news.append(new)
    return x, jax.tree.map(lambda *of: jnp.stack(of), *news)


def _in_words(stored: Shaped[Array, "... H"]) -> Shaped[Array, "... W"]:
    """Codes of one byte four at a time, which a GPU copies faster; other arrays as they are."""
    if stored.dtype.itemsize > 1 or stored.shape[-1] % 4:
        return stored
    fours = stored.reshape(*stored.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(fours, jnp.uint32)


def _write(old: Array, words: Array, slot: Int[Array, ""]) -> Array:
    """Writes the stored heads of one token, which are `_in_words`, into a slot."""
    written = lax.dynamic_update_slice_in_dim(_in_words(old), words, slot, axis=3)
    if written.dtype == old.dtype:
        return written
    return lax.bitcast_convert_type(written, old.dtype).reshape(old.shape)


def _pad(new: Shaped[Array, "L B K S *H"], slots: int, config: Config) -> Shaped[Array, "..."]:
    """Appends empty slots, and shards the result as batches and heads are sharded."""
    empty = slots - new.shape[3]
    padded = jnp.pad(new, [(0, empty if axis == 3 else 0) for axis in range(new.ndim)])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return padded
    tensor = config.axes.tensor if divides_evenly(config.kv_heads, config.axes.tensor) else None
    spec = PartitionSpec(None, config.batch_axes or None, tensor)
    return lax.with_sharding_constraint(padded, spec)
