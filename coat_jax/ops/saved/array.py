"""How an op saves one array for its backward pass: in FP8 blocks, or unchanged.

On a GPU, `norm` and `activation` beside this file call kernels instead, which compute and save in
one pass and write the same blocks: those of `coat_jax.kernels.norm` and `.activation`.

With `Precision.exact_forward` the forward pass continues with the original values. Otherwise both
passes compute with the saved values. Values that only the backward pass sees are rounded
stochastically if `Precision.stochastic` is set.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.precision import Precision

SavedArray = Blocks | Array


def save_array(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike,
    size: int | None,
    *,
    stochastic: bool = False,
    antithetic: bool = False,
) -> SavedArray:
    """`x` in FP8 blocks of `size`, or `x` itself if size is None.

    Args:
        x: what to save.
        dtype: an FP8 format.
        size: how many elements share a scale.
        stochastic: whether codes are rounded stochastically.
        antithetic: whether to round by the complement of the random bits, so that the errors of
            two arrays that are multiplied partly cancel.
    """
    if size is None:
        return x
    return to_blocks(x, dtype, size=size, stochastic=stochastic, antithetic=antithetic)


def restore(saved: SavedArray, dtype: DTypeLike, size: int | None) -> Float[Array, "*rows D"]:
    """The saved array, decoded, as `dtype`."""
    if isinstance(saved, Blocks):
        assert size is not None
        return from_blocks(saved, size=size).astype(dtype)
    return saved.astype(dtype)


def round_and_save(
    x: Float[Array, "*rows D"], precision: Precision, *, antithetic: bool = False
) -> tuple[SavedArray, Array]:
    """Returns the input of a norm or an activation as saved, and FP32 values to compute with."""
    saved = save_array(
        x,
        precision.forward,
        precision.block,
        stochastic=precision.saves_stochastically,
        antithetic=antithetic,
    )
    used = x if precision.exact_forward else saved
    return saved, restore(used, jnp.float32, precision.block)


def save_hidden(
    hidden: Sequence[Float[Array, "*rows F"]], precision: Precision
) -> tuple[tuple[SavedArray, ...], tuple[Array, ...]]:
    """`round_and_save` of (gate, up), which are multiplied, or of (up,)."""
    pairs = [round_and_save(h, precision, antithetic=i > 0) for i, h in enumerate(hidden)]
    return tuple(saved for saved, _ in pairs), tuple(values for _, values in pairs)
