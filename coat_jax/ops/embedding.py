"""Embedding lookup, whose gradient is summed in FP32 whatever the dtype of the table.

The gradient of a row is a sum over all positions with its token, thousands for a frequent one.
JAX's own gradient of a lookup in a BF16 table is summed in BF16. Such a sum stops growing when it
is 256 times larger than what is added, so most of the gradient of a frequent token is lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops.checks import require_real


def embedding(table: Float[Array, "V D"], tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """The rows of a table.

    Args:
        table: one row for each token of the vocabulary.
        tokens: token numbers. A negative number, or one of V or more, has a row of NaN.
    """
    require_real("embedding", table)
    if table.ndim != 2 or not table.shape[0]:
        raise ValueError(f"embedding takes a table [V, D] of at least one row, not {table.shape}.")
    table, tokens = jnp.asarray(table), in_int32("tokens", tokens)
    return shard_inside(
        _embedding,
        lambda: merge_specs(*explicit_spec(tokens), explicit_spec(table)[1]),
        table,
        tokens,
    )


def in_int32(name: str, tokens: Int[Array, "..."]) -> Int[Array, "..."]:
    """Tokens in a dtype that can hold -100 and any V; larger numbers become the largest one.

    JAX would truncate 64-bit NumPy arrays to 32 bits, and turn token 2^32 + 1 into token 1.
    """
    if not hasattr(tokens, "dtype") or not jnp.issubdtype(tokens.dtype, jnp.integer):
        given = getattr(tokens, "dtype", type(tokens).__name__)
        raise TypeError(f"{name} must be an array of whole numbers, not {given}.")
    if tokens.dtype == jnp.int32:
        return jnp.asarray(tokens)
    own, limits = np.iinfo(tokens.dtype), np.iinfo(np.int32)
    clip = np.clip if isinstance(tokens, np.ndarray | np.generic) else jnp.clip
    inside = clip(tokens, max(own.min, limits.min), min(own.max, limits.max))
    return jnp.asarray(inside.astype(np.int32))


def _forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    rows = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return rows, (table, tokens)


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, tokens = saved
    zeros = jnp.zeros(table.shape, np.promote_types(table.dtype, np.float32))
    summed = zeros.at[tokens].add(
        gradient.astype(zeros.dtype), mode="drop", wrap_negative_indices=False
    )
    return summed.astype(table.dtype), None


_embedding = jax.custom_vjp(lambda table, tokens: _forward(table, tokens)[0])
_embedding.defvjp(_forward, _backward)
