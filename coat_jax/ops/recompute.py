"""A function of the residual stream that saves only its input, in FP8 blocks.

    forward     y = f(x)               saves to_blocks(x): 1.06 bytes a value
    backward    recomputes f at the decoded blocks, and computes its gradients there

`jax.checkpoint` saves x itself, two bytes a value in BF16, and computes the gradients at x. The
residual stream itself is not rounded: y is computed from x. Only the backward pass sees the saved
blocks, so by default they are rounded stochastically (`numerics.blocks`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.numerics.formats import E4M3
from coat_jax.ops import recording
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import SavedArray, batch_alike, define_op, restore, save_array
from coat_jax.ops.projection import Mode
from coat_jax.precision import Block, Precision
from coat_jax.validation import require


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
    mode = Mode(Precision(fp8_linear=False, block=block, stochastic=stochastic), "xla")

    def alone(x: Float[Array, "*rows D"], *rest: Any) -> Any:
        with probes.current_scope(None):  # a probe of the outer trace must not leak into it
            return function(x, *rest)

    def forward(mode: Mode, dtype: DTypeLike, x: Float[Array, "*rows D"], *rest: Any) -> Any:
        leaves, structure = jax.tree.flatten(alone(x, *rest))
        y = jax.tree.unflatten(structure, batch_alike(*leaves))
        saved = save_array(x, E4M3, block, stochastic=stochastic)
        return y, (saved, rest), partial(recording.blocks, ("saved",), (x,), (saved,), block, E4M3)

    def backward(
        mode: Mode, dtype: DTypeLike, saved: SavedArray, rest: tuple[Any, ...], dy: Any
    ) -> Any:
        return jax.vjp(alone, restore(saved, dtype, block), *rest)[1](dy), dict

    again = define_op("recompute", forward, backward, blocks=("saved",))

    def run(x: Float[Array, "*rows D"], *rest: Any) -> Any:
        require_real("recompute", x, least_rank=1)
        return again(mode, (x.dtype,), x, *rest)

    return run
