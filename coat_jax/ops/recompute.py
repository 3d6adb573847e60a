"""A function of the residual stream that saves only its input, in FP8 blocks.

    forward     y = f(x)               saves to_blocks(x): 1.06 bytes a value
    backward    recomputes f at the decoded blocks, and computes its gradients there

`jax.checkpoint` saves x itself, two bytes a value in BF16, and computes the gradients at x. The
residual stream itself is not rounded: y is computed from x. Only the backward pass sees the saved
blocks, so by default they are rounded stochastically (`numerics.blocks`).
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from coat_jax.ops.checks import require_real
from coat_jax.ops.saving import SaveFP8, save_fp8
from coat_jax.precision import Block
from coat_jax.validation import require

NAME = "recompute"  # of the saved input


def recompute(
    function: Callable[..., Any], *, block: int = 16, stochastic: bool = True
) -> Callable[..., Any]:
    """`function`, recomputed as a whole in the backward pass.

    Args:
        function: a function of x and of any other arguments that it needs. These are saved as they
            are, so parameters take no additional memory. Arrays that need a gradient must be
            arguments: the function cannot close over them.
        block: the size of the blocks: 16, 32, 64 or 128.
        stochastic: whether the saved input is rounded stochastically, as with
            `Precision.stochastic`, or to nearest.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> layer = coat.ops.recompute(lambda x, w: jax.nn.gelu(x @ w) @ w.T)
        >>> loss = lambda w, x: jnp.mean(layer(x, w) ** 2)
        >>> gradient = jax.jit(jax.grad(loss))(jnp.ones((64, 256)), jnp.ones((8, 64)))
        >>> gradient.shape
        (64, 256)
    """
    if not callable(function):
        raise TypeError(f"recompute takes a function, not {type(function).__name__}.")
    require("block", block, Block)

    def named(x: Float[Array, "*rows D"], *rest: Any) -> Any:
        return function(save_fp8(x, NAME, block=block, stochastic=stochastic), *rest)

    again = jax.checkpoint(named, policy=SaveFP8((NAME,)))

    def run(x: Float[Array, "*rows D"], *rest: Any) -> Any:
        require_real(NAME, x, least_rank=1)
        return again(x, *rest)

    return run
