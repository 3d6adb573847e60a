"""The non-linear part of an MLP, and its gradient: element by element, in FP32.

hidden = (gate, up)     a = act(gate) * up
hidden = (up,)          a = act(up)

`gradient_bounds` tells from block maxima alone how large a gradient can be: what scales an FP8
operand with the range of E5M2 well enough, for a fraction of the work of computing it.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.blocks import Blocks, power_of_two
from coat_jax.formats import format_of
from coat_jax.qtensor import split_groups

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def require_activation(name: str) -> None:
    """Raises unless there is an activation of this name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} must be one of {tuple(ACTIVATIONS)}.")


def activate(
    hidden: Sequence[Float[Array, "*rows F"]], activation: Activation
) -> Float[Array, "*rows F"]:
    """The activation of a gate and what it gates, or of one array; in FP32."""
    first, *gated = (h.astype(jnp.float32) for h in hidden)
    a = ACTIVATIONS[activation](first)
    return a * gated[0] if gated else a


def activate_backward(
    hidden: Sequence[Float[Array, "*rows F"]], da: Float[Array, "*rows F"], activation: Activation
) -> tuple[Float[Array, "*rows F"], ...]:
    """The gradients of `hidden`, in FP32."""
    first, *gated = (h.astype(jnp.float32) for h in hidden)
    da = da.astype(jnp.float32)
    a, pull = jax.vjp(ACTIVATIONS[activation], first)
    return (*pull(da * gated[0]), da * a) if gated else pull(da)


def gradient_bounds(
    hidden: Sequence[Blocks], da: Float[Array, "*rows F"], activation: Activation, size: int
) -> tuple[Float[Array, ""], ...]:
    """What no magnitude in the gradients of `hidden` exceeds; mostly 2 to 8 times the largest.

    By block: the largest |da|, times the largest values that the exponents of `hidden` allow.
    """
    d = jnp.max(jnp.abs(split_groups(da.astype(jnp.float32), size)), axis=-1)
    first, *gated = (
        format_of(h.codes.dtype).max * power_of_two(h.exponents.reshape(d.shape)) for h in hidden
    )
    value, slope = steepest(first, activation)
    bounds = (d * slope * gated[0], d * value) if gated else (d * slope,)
    return tuple(jnp.max(bound) for bound in bounds)


def steepest(m: Float[Array, "..."], activation: Activation) -> tuple[Array, Array | float]:
    """What neither |act(x)| nor the magnitude of its slope exceeds where |x| <= m."""
    return (m * m, 2 * m) if activation == "relu2" else (m, 1.13)
