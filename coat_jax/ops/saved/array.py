"""What an operation keeps of an array for its backward pass: FP8 blocks, or the array itself.

The forward pass goes on with what was kept, so that both passes see one tensor; or with what came,
where `Precision.exact_forward` asks for it.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics.blocks import Blocks, from_blocks, to_blocks
from coat_jax.precision import Precision

Kept = Blocks | Array


def keep(x: Float[Array, "*rows D"], dtype: DTypeLike, size: int | None) -> Kept:
    """What to keep of `x`: FP8 in blocks of `size`, or `x` where size is None."""
    return x if size is None else to_blocks(x, dtype, size=size)


def restore(kept: Kept, dtype: DTypeLike, size: int | None) -> Float[Array, "*rows D"]:
    """The array that `kept` stands for, as `dtype`."""
    if isinstance(kept, Blocks):
        assert size is not None
        return from_blocks(kept, size=size).astype(dtype)
    return kept.astype(dtype)


def keep_rows(x: Float[Array, "*rows D"], precision: Precision) -> tuple[Kept, Array]:
    """What a norm or an activation keeps of `x`; and the FP32 values that it goes on with."""
    kept = keep(x, precision.forward, precision.block)
    seen = x if precision.exact_forward else kept
    return kept, restore(seen, jnp.float32, precision.block)
