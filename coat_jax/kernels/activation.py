"""The non-linear part of an MLP, and its gradient: element by element, in FP32.

hidden = (gate, up)     a = act(gate) * up
hidden = (up,)          a = act(up)

`gradient_bounds` tells without computing them how large gradients can be: from what bounds each row
of the activation's gradient, and from what the exponents of the row's blocks allow.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.numerics.blocks import Blocks, power_of_two
from coat_jax.numerics.formats import format_of

# Those that the Triton kernels compute, and any other of ACTIVATIONS.
InKernels = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Activation = InKernels | str

# A new activation is one entry, as in ACTIVATIONS["swish"] = jax.nn.swish.
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


def has_kernel(name: str) -> bool:
    """Whether the Triton kernels know an activation; through XLA any is computed."""
    return name in get_args(InKernels)


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
    hidden: Sequence[Blocks], da_bound: Float[Array, "*rows"], activation: Activation
) -> tuple[Float[Array, ""], ...]:
    """What no magnitude in the gradients of `hidden` exceeds.

    `hidden` counts with the largest values that its exponents allow: nothing is read but those.

    Args:
        hidden: what was kept.
        da_bound: what no magnitude in each row of the gradient of the activation exceeds.
        activation: the activation.
    """
    da_bound = da_bound[..., None]
    first, *gated = (format_of(h.codes.dtype).max * power_of_two(h.exponents) for h in hidden)
    value, slope = steepest(first, activation)
    limits = (da_bound * slope * gated[0], da_bound * value) if gated else (da_bound * slope,)
    return tuple(jnp.max(each, initial=0.0) for each in limits)


def steepest(m: Float[Array, "..."], activation: Activation) -> tuple[Array, Array | float]:
    """What neither |act(x)| nor the magnitude of its slope exceeds where |x| <= m."""
    require_activation(activation)
    if activation == "relu2":
        return m * m, 2 * m
    return m, 1.13  # gelu has the largest slope: 1.1290 at sqrt(2)
