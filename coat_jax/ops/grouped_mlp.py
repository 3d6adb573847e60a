"""The MLPs of a mixture of experts: each token passes through those that a router chose for it.

    y[t] = sum over j of weights[t, j] * (act(x[t] gate_e) * (x[t] up_e)) down_e,  e = experts[t, j]

Tokens are sorted by expert, so that the rows of each expert are neighbours, and a product with the
weights of all experts is one `lax.ragged_dot`. No token is dropped.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from coat_jax.kernels.activation import Activation, activate
from coat_jax.kernels.dispatch import Implementation
from coat_jax.precision import COAT, Precision


def grouped_mlp(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    *,
    activation: Activation = "silu",
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """The weighted sum of each token's experts.

    Args:
        x: the tokens.
        gate: weights of the gates.
        up: weights of the branches that the gates multiply.
        down: weights back to the width of x.
        experts: the numbers of each token's experts.
        weights: their weights in the sum.
        activation: of the gates.
        precision: not used yet: the products are in the dtype of x.
        implementation: not used yet.
    """
    del precision, implementation
    tokens, chosen = experts.shape
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0])

    def product(rows: Array, weight: Array) -> Array:
        return lax.ragged_dot(rows, weight.astype(rows.dtype), sizes.astype(jnp.int32))

    rows = x[order // chosen]
    hidden = [product(rows, weight).astype(jnp.float32) for weight in (gate, up)]
    y = product(activate(hidden, activation).astype(x.dtype), down)
    of_tokens = y[jnp.argsort(order)].reshape(tokens, chosen, -1)
    return jnp.einsum("tk,tkd->td", weights, of_tokens.astype(jnp.float32)).astype(x.dtype)
