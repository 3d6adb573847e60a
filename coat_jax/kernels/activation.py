"""The non-linear part of an MLP, and its gradient: element by element, in FP32.

hidden = (gate, up)     a = act(gate) * up
hidden = (up,)          a = act(up)
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
