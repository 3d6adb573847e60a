"""INT4 codes of a weight that compensate for each other's errors: GPTQ (Frantar et al., 2022).

    minimize  sum over inputs x of |x w - x w'|^2         H = X^T X + damping

The inputs of the layer, rows of w [K, N], are rounded in order. The error of each is subtracted
from those that are not rounded yet, in the way that changes x w the least:

    w[j] -= U[k, j] (w[k] - w'[k]) / U[k, k]              H^-1 = U^T U, U upper triangular

Scales are those of `four_bits.group_scales`, found before. X is what the layer reads in the model
that is not quantized.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.numerics import four_bits
from coat_jax.numerics.four_bits import GROUP, LARGEST, SMALLEST

DAMPING = 0.01  # of the mean of H's diagonal
UNROLLED = 16  # rows of a step: without, a GPU waits between the launches of a row


@jax.jit
def quantize_weight(weight: Float[Array, "K N"], products: Float[Array, "K K"]) -> ops.Quantized:
    """A weight in INT4, whose inputs have the products X^T X."""
    factor, scales = inverse_factor(products), four_bits.group_scales(weight.T)

    def round_group(group: Array, w: Array) -> Array:
        first = group * GROUP
        scale = scales[:, group].astype(jnp.float32)
        of_rows = lax.dynamic_slice_in_dim(factor, first, GROUP)
        within = lax.dynamic_slice_in_dim(of_rows, first, GROUP, axis=1)

        def round_row(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, errors = carry
            rounded = jnp.clip(jnp.round(rows[k] / scale), SMALLEST, LARGEST) * scale
            error = (rows[k] - rounded) / within[k, k]
            return rows - within[k][:, None] * error, errors.at[k].set(error)

        rows = lax.dynamic_slice_in_dim(w, first, GROUP)
        _, errors = lax.fori_loop(
            0, GROUP, round_row, (rows, jnp.zeros_like(rows)), unroll=UNROLLED
        )
        # U is 0 left of its diagonal. Rows of this group become what their codes stand for.
        return w - jnp.matmul(of_rows.T, errors, precision=lax.Precision.HIGHEST)

    wide = weight.astype(jnp.float32)
    rounded = lax.fori_loop(0, scales.shape[1], round_group, wide)
    return ops.Quantized(four_bits.encode(rounded.T, scales), scales)


def inverse_factor(products: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """U, of X^T X in units of its largest number."""
    one, largest = jnp.eye(len(products), dtype=products.dtype), jnp.max(jnp.diag(products))
    h = products / jnp.where(largest > 0, largest, 1.0)
    damping = DAMPING * jnp.mean(jnp.diag(h))
    h += jnp.where(largest > 0, damping, 1.0) * one  # without inputs, nothing is compensated
    # Reversed, Cholesky's factor is an upper one: H = V V^T, and U = V^-1.
    v = jnp.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(v, one)
