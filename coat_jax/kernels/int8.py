"""Products of INT8 codes, where every row of an operand has a scale of its own.

    x[t, k] ~ codes[t, k] scale[t]        scale[t] = max |x[t]| / 127

    y[t, n] = (sum over k of x codes[t, k] w codes[n, k]) x scale[t] w scale[n]

The sum is over k, so any scale that does not depend on k can be taken out of it: each token of an
input and each column of a weight has one.
For the largest elements of a row, INT8 is more precise than FP8 (its steps are max / 127, those of
E4M3 are 1/8 to 1/16 of each number); elements far below them are rounded to few codes, or to zero.
The sum is exact in INT32, so it depends neither on the order of its terms nor on the mesh.

If a row has a NaN or an infinity, all results of that row are NaN, and only these.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Int32

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import as_3d, launch_sharded
from coat_jax.numerics import eight_bits

ROUNDING_TILE = Tile(128, 64, 4)
MAXIMA_TILE = Tile(32, 256, 1)  # of one warp, so that each thread finds maxima of whole columns


class RowCodes(NamedTuple):
    """An operand in INT8: codes, and the largest magnitude of each row, which sets its scale."""

    codes: Int8[Array, "*rows K"]
    largest: Float[Array, "*rows"]  # NaN for a row that is not finite

    @property
    def scale(self) -> Float[Array, "*rows"]:
        """What the codes of each row are multiplied by."""
        return eight_bits.scale_of(self.largest, "int8")


def round_rows(x: Float[Array, "*rows K"], implementation: Implementation = "xla") -> RowCodes:
    """Rounds each row of an input to INT8."""
    largest = _largest(x, axis=-1)
    if implementation == "xla":
        return RowCodes(_encoded(x, largest[..., None]), largest)
    return RowCodes(_rows_kernel(x, largest), largest)


def round_columns(w: Float[Array, "K N"], implementation: Implementation = "xla") -> RowCodes:
    """Rounds each column of a weight to INT8: the rows [N, K] of its transpose."""
    if implementation == "xla":
        largest = _largest(w, axis=0)
        return RowCodes(_encoded(w, largest).T, largest)
    largest = _largest(_maxima_kernel(w), axis=0)
    return RowCodes(_columns_kernel(w, largest), largest)


class Product(NamedTuple):
    """A product before it is scaled, for kernels that scale it where they read it."""

    sums: Int32[Array, "*rows N"]
    row_scale: Float[Array, "*rows"]
    column_scale: Float[Array, " N"]

    def scaled(self, dtype: DTypeLike) -> Float[Array, "*rows N"]:
        """The product itself."""
        return gemm.scale_sums(self.sums, self.row_scale, self.column_scale).astype(dtype)


def product(x: RowCodes, w: RowCodes) -> Product:
    """x w, for the rows of x and the columns of w."""
    return Product(gemm.product_of_codes(x.codes, w.codes, jnp.float32), x.scale, w.scale)


def _largest(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The largest magnitudes along an axis, in FP32; NaN where not all are finite.

    Their bits are compared as integers, of which those of NaN are the largest. On CPUs, XLA's
    maximum of floats may lose a NaN.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=axis, initial=0), jnp.float32)
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def _encoded(x: Array, largest: Array) -> Int8[Array, "..."]:
    return eight_bits.encode(x, eight_bits.scale_of(largest, "int8"), "int8")


def _rows_kernel(x: Float[Array, "*rows K"], largest: Float[Array, "*rows"]) -> Array:
    """The codes of an input's rows, in half the time that XLA takes.

    The kernel multiplies by the reciprocal of a scale, and XLA divides: ties may be rounded
    differently.
    """
    from coat_jax.kernels.triton.int8 import int8_rows_tile

    rows = as_3d(x)
    inputs = [(rows, "b s k"), (largest.reshape(rows.shape[:-1]), "b s")]
    grid = partial(divide, tile=ROUNDING_TILE)
    (codes,) = launch_sharded(int8_rows_tile, inputs, [("b s k", jnp.int8)], grid)
    return codes.reshape(x.shape)


def _maxima_kernel(w: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """The largest magnitudes of each column in groups of rows: XLA takes several times as long."""
    from coat_jax.kernels.triton.int8 import column_maxima_tile

    outputs = [(f"k/{MAXIMA_TILE.height} n", jnp.float32)]
    grid = partial(divide, tile=MAXIMA_TILE)
    (maxima,) = launch_sharded(column_maxima_tile, [(w, "k n")], outputs, grid)
    return maxima


def _columns_kernel(w: Float[Array, "K N"], largest: Float[Array, " N"]) -> Int8[Array, "N K"]:
    """The codes of a weight's columns, transposed in the pass that rounds them."""
    from coat_jax.kernels.triton.int8 import int8_columns_tile

    inputs = [(w, "k n"), (largest, "n")]
    grid = partial(divide, tile=ROUNDING_TILE)
    (codes,) = launch_sharded(int8_columns_tile, inputs, [("n k", jnp.int8)], grid)
    return codes
