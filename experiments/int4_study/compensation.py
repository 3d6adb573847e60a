"""INT4 codes of a weight that compensate for each other's errors, as GPTQ's (Frantar et al., 2022).

    minimize  sum over inputs x of |x w - x w'|^2         H = X^T X + damping

Inputs of the layer, the rows of w [K, N], are rounded in order. The error of each is subtracted
from those that are not rounded yet, in the way that changes x w the least:

    w[j] -= U[k, j] (w[k] - w'[k]) / U[k, k]              H^-1 = U^T U, U upper triangular

Scales are those of `four_bits.group_scales`, found before. X is what the layer reads in the network
that is not quantized.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from coat_jax import ops
from coat_jax.models import Llama
from coat_jax.models.lazy_arrays import dotted_name
from coat_jax.nn import QuantizedLinear
from coat_jax.nn.modular import Dense
from coat_jax.numerics import four_bits
from coat_jax.numerics.four_bits import GROUP, LARGEST, SMALLEST, ZERO
from coat_jax.quantization.projections import groups_of, replace_projections, unstack

DAMPING = 0.01  # of the mean of H's diagonal
UNROLLED = 16  # rows of a step: a GPU may ask the host before each, and other runs share the GPU


def quantize(model: Llama, token_batches: Sequence[Int[Array, "B S"]]) -> Llama:
    """The model with compensated weights, and inputs in E4M3."""
    products = sum_products(model, token_batches)
    factors = {path: inverse_factor(found) for path, found in products.items()}
    first = {path: group[0] for group in groups_of(model.config) for path in group}

    def make(path: str, kernel: nnx.Param, bias: nnx.Param | None) -> nnx.Module:
        return QuantizedLinear(quantize_weight(kernel[...], factors[first[path]]), bias)

    return replace_projections(unstack(model), make)


@jax.jit
def quantize_weight(weight: Float[Array, "K N"], factor: Float[Array, "K K"]) -> ops.Quantized:
    """A weight in INT4; `factor` is U."""
    scales = four_bits.group_scales(weight.T)
    of_element = jnp.repeat(scales.astype(jnp.float32), GROUP, axis=1).T

    def codes_of(w: Array, scale: Array) -> Array:
        return jnp.clip(jnp.round(w / scale), SMALLEST, LARGEST)

    def round_row(k: Array, w: Array) -> Array:
        error = w[k] - codes_of(w[k], of_element[k]) * of_element[k]
        # U is 0 before k, and w[k] becomes what its code stands for.
        return w - factor[k][:, None] * (error / factor[k, k])

    wide = weight.astype(jnp.float32)
    rounded = lax.fori_loop(0, weight.shape[0], round_row, wide, unroll=UNROLLED)
    return ops.Quantized(four_bits.pack(codes_of(rounded, of_element).T + ZERO), scales)


@jax.jit
def inverse_factor(products: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """U, of X^T X."""
    one = jnp.eye(len(products))
    h = products + DAMPING * jnp.mean(jnp.diag(products)) * one
    # Reversed, Cholesky's factor is an upper one: H = V V^T, and U = V^-1.
    v = jnp.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(v, one)


def sum_products(
    model: Llama, token_batches: Sequence[Int[Array, "B S"]]
) -> dict[str, Float[Array, "K K"]]:
    """X^T X of each input of projections, by the path of the first that reads it."""
    first = {group[0] for group in groups_of(model.config)}
    graph, state = nnx.split(
        replace_projections(
            unstack(model),
            lambda path, kernel, bias: (_Summing if path in first else Dense)(kernel, bias),
        )
    )
    found = [_products(graph, state, tokens) for tokens in token_batches]
    return jax.tree.map(lambda *of_batches: sum(of_batches), *found)


class _Summing(Dense):
    """A projection that sums the products of its input's columns."""

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        rows = x.reshape(-1, x.shape[-1])
        found = jnp.matmul(rows.T, rows, preferred_element_type=jnp.float32)
        self.seen = nnx.Intermediate(found)
        return super().__call__(x)


@partial(jax.jit, static_argnums=0)
def _products(graph: Any, state: Any, tokens: Int[Array, "B S"]) -> dict[str, Array]:
    model = nnx.merge(graph, state)
    x = model.embed_tokens(tokens)
    for block in model.layers:
        x = block(x)
    seen = nnx.to_flat_state(nnx.state(model, nnx.Intermediate))
    return {dotted_name(path[:-1]): leaf.get_value() for path, leaf in seen}
