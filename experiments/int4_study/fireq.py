"""FireQ's quantization (Baek et al., 2025), as far as it is simulated here.

    w ~ E4M3(c s) / p           weights: c = -8 .. 7, and s in E4M3 for 128 inputs of a channel
    x ~ E4M3(x / a) a           inputs, a = max |x| / 448 for each token
    k ~ c max |k| / 7           keys and values, c = -7 .. 7 for each head of each token

s is max |w p| / 7, rounded. p is a power of two for each weight: the smallest, from 1, with which
no s is below the smallest number of E4M3. The product c s is rounded once more, because the kernel
looks it up in a table of E4M3 numbers.

Before, keys are multiplied by factors, and queries divided by them, so that all pairs of columns
that are rotated together are equally large on a text:

    factor[j] = a / max over tokens of sqrt(k[j]^2 + k[j + H/2]^2)

Three parts are left out: the second scaling of the few largest columns of keys, after the rotation;
factors for the channels of inputs; and FP8 for queries and for the scales of the cache.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.models import Llama
from coat_jax.nn import QuantizedLinear
from coat_jax.numerics.formats import E4M3, format_of, nearest
from coat_jax.numerics.four_bits import GROUP, LARGEST, SMALLEST
from coat_jax.quantization.calibration import observe
from coat_jax.quantization.projections import replace_projections, unstack

LARGEST_E4M3, SMALLEST_E4M3 = format_of(E4M3).max, format_of(E4M3).tiny
MOST_EXPONENT = 14  # of p


def quantize(model: Llama) -> Llama:
    """The model with FireQ's weights, and inputs in E4M3."""
    return replace_projections(
        unstack(model),
        lambda path, kernel, bias: QuantizedLinear(quantize_weight(kernel[...]), bias),
    )


@jax.jit
def quantize_weight(weight: Float[Array, "K N"]) -> ops.Quantized:
    """The numbers that the kernel multiplies: a weight in FP8, all scales 1 / p."""
    groups = weight.T.astype(jnp.float32).reshape(weight.shape[1], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    p = _power(largest)
    s = jnp.maximum(nearest(largest * p / LARGEST, E4M3), SMALLEST_E4M3)
    codes = jnp.clip(jnp.round(groups * p / s), SMALLEST, LARGEST)
    products = nearest(codes * s, E4M3).astype(E4M3).reshape(weight.T.shape)
    return ops.Quantized(products, jnp.full(weight.shape[1], 1 / p))


def _power(largest: Float[Array, "N G 1"]) -> Float[Array, ""]:
    """p, from the largest magnitude of each group."""
    smallest = jnp.min(jnp.where(largest > 0, largest, jnp.inf)) / LARGEST
    needed = jnp.ceil(jnp.log2(SMALLEST_E4M3 / smallest))
    room = jnp.floor(jnp.log2(LARGEST_E4M3 / jnp.max(largest)))
    return jnp.exp2(jnp.clip(jnp.minimum(needed, room), 0, MOST_EXPONENT))


def round_heads(x: Float[Array, "*heads H"]) -> Float[Array, "*heads H"]:
    """Keys or values as the cache has them."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return (jnp.round(wide / scale) * scale).astype(x.dtype)


def fold_keys(model: Llama, token_batches: Iterable[Int[ArrayLike, "B S"]]) -> Llama:
    """A model that computes the same, with equally large pairs of columns of keys.

    a is the median of a head's pairs. As each token has a scale, it decides nothing.
    """
    config = model.config
    if config.scan or config.qkv_bias or config.qk_norm:
        raise UserError(
            "fold_keys scales the columns of query and key in a list of layers: it takes a model "
            f"with neither biases nor norms of these, not {config}."
        )
    folded = nnx.clone(model)
    for block, pairs in zip(folded.layers, observe(model, token_batches).pairs, strict=True):
        factors = np.tile(np.median(pairs, axis=1, keepdims=True) / pairs, 2)  # [K, H]
        of_queries = np.repeat(1 / factors, config.heads // config.kv_heads, axis=0)
        attention = block.attention
        attention.key[...] = attention.key[...] * factors.ravel()
        attention.query[...] = attention.query[...] * of_queries.ravel()
    return folded
