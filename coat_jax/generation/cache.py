"""A model, token by token: the keys and values of past tokens are stored, not recomputed.

    slot      0   1   2   3   4   5   6   7
    text 0    .   .   a   b   c   d   -   -       starts at slot 2
    text 1    e   f   g   h   i   j   -   -       starts at slot 0;  6 slots are filled

All texts end at the same slot, so that a new token of each takes the same one: one write into
the cache, wherever the texts began. A token's position is its slot less the text's start. A token
sees the slots from its text's start to its own, or the last `window` of them.

`prefill` runs the forward pass of training; the slots before a text are a segment of their own.
`decode` computes the same for one new token of each text. Only the scales of FP8 products differ,
because they come from fewer rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax import nn
from coat_jax.models import Config, Llama
from coat_jax.models.llama import shard_batch
from coat_jax.nn.parameters import divides_evenly


class Cache(NamedTuple):
    """The past of a batch of texts, in T slots.

    Attributes:
        past: keys and values of all layers, in the model's dtype.
        starts: the first slot of each text.
        filled: how many slots are taken, from the first on.
    """

    past: nn.Past  # [L, B, T, K, H] each
    starts: Int[Array, " B"]
    filled: Int[Array, ""]


def prefill(
    model: Any, tokens: Int[Array, "B S"], starts: Int[Array, " B"], slots: int, *images: Array
) -> tuple[Float[Array, "B V"], Cache]:
    """Returns the logits after the last token of each text, and a cache with room for more.

    Args:
        model: a `Llama`, or a model that has one as its `decoder`.
        tokens: the texts, each at the right end of its row.
        starts: where they begin; what stands before is ignored.
        slots: of the cache, S or more.
        *images: those of all texts, if the model sees images.
    """
    decoder, length = model.decoder, tokens.shape[1]
    places = jnp.arange(length) - starts[:, None]
    positions, segments = jnp.maximum(places, 0), (places >= 0).astype(jnp.int32)

    def layer(block: nn.TransformerBlock, x: Array, _: None) -> tuple[Array, nn.Past]:
        return block.prefill(x, positions, segments)

    x, new = _run_layers(decoder, model.embed_tokens(tokens, *images), None, layer)
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
    places = jnp.arange(past.keys.shape[2])
    visible = (places >= cache.starts[:, None]) & (places <= slot)
    if model.config.window is not None:
        visible &= places > slot - model.config.window

    def layer(block: nn.TransformerBlock, x: Array, past: nn.Past) -> tuple[Array, nn.Past]:
        return block.decode(x, positions, past, slot, visible)

    x, new = _run_layers(model, model.embed_tokens(tokens[:, None]), past, layer)
    past = jax.tree.map(
        lambda old, one: lax.dynamic_update_slice_in_dim(old, one, slot, axis=2), past, new
    )
    return model.logits(model.norm(x))[:, 0], Cache(past, cache.starts, slot + 1)


Layer = Callable[[nn.TransformerBlock, Array, Any], tuple[Array, nn.Past]]


def _run_layers(
    model: Llama, x: Float[Array, "B S D"], past: nn.Past | None, layer: Layer
) -> tuple[Float[Array, "B S D"], nn.Past]:
    """Returns the residual stream after all layers, and their new keys and values, stacked."""
    config = model.config

    def step(x: Array, block: nn.TransformerBlock, past: nn.Past | None) -> tuple[Array, nn.Past]:
        x, new = layer(block, x, past)
        return shard_batch(x, config.batch_axes), new

    if config.scan:
        graph, stacked = nnx.split(model.layers)
        return lax.scan(lambda x, of: step(x, nnx.merge(graph, of[0]), of[1]), x, (stacked, past))
    news = []
    for i, block in enumerate(model.layers):
        x, new = step(x, block, jax.tree.map(lambda a, i=i: a[i], past))
        news.append(new)
    return x, jax.tree.map(lambda *of: jnp.stack(of), *news)


def _pad(new: Float[Array, "L B S K H"], slots: int, config: Config) -> Float[Array, "..."]:
    """Appends empty slots, and shards the result as batches and heads are sharded."""
    empty = slots - new.shape[2]
    padded = jnp.pad(new, [(0, empty if axis == 2 else 0) for axis in range(new.ndim)])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return padded
    tensor = config.axes.tensor if divides_evenly(config.kv_heads, config.axes.tensor) else None
    spec = PartitionSpec(None, config.batch_axes or None, None, tensor)
    return lax.with_sharding_constraint(padded, spec)
