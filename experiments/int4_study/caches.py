"""Attention to keys and values that are rounded as a cache stores them, for all tokens at once.

    o[t] = softmax(q[t] K^T / sqrt(H)) V          K, V rounded, of the tokens up to t

Keys are rounded after their norm and rotation. Generation computes the same for each token that it
adds. The tokens of its prompt attend to keys and values that are not rounded yet; here no token
does.
"""

from typing import Any, Literal

from jaxtyping import Array, Float

from coat_jax.models import Llama
from coat_jax.nn.children import set_class
from coat_jax.nn.modular import ModularAttention
from coat_jax.numerics.cache_formats import CacheFormat, decode_heads, encode_heads
from experiments.int4_study import fireq

Cache = CacheFormat | Literal["fireq"]


class RoundedAttention(ModularAttention):
    """Attention to rounded keys and values.

    Attributes:
        cache: how they are rounded.
    """

    cache: Cache

    def _heads(self, x: Float[Array, "B S D"], positions: Array | None) -> Any:
        x, q, k, v = super()._heads(x, positions)
        return x, q, round_heads(k, self.cache), round_heads(v, self.cache)


def round_heads(x: Float[Array, "*heads H"], cache: Cache) -> Float[Array, "*heads H"]:
    """The numbers that a cache has for these heads."""
    if cache == "fireq":
        return fireq.round_heads(x)
    return decode_heads(encode_heads(x, cache), x.dtype)


def round_caches(model: Llama, cache: Cache) -> None:
    """Lets a model whose projections are modules attend to rounded keys and values."""
    for block in model.layers:
        set_class(block.attention, RoundedAttention)
        block.attention.cache = cache
