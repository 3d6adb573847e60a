"""What an operation keeps of an array for its backward pass: FP8 blocks, or the array itself.

The forward pass goes on with what was kept, not with what came: both passes see one tensor.
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.blocks import Blocks, from_blocks, to_blocks

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
