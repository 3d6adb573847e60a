"""Products in a small format without scales, as of a plain cast.

`Precision` has no setting for this, and needs none outside of a study. While a program is traced
under `without_scales`, every operand has the scale 1: what is above a format's largest value
saturates, and what is below half its smallest becomes zero. An operand that is not finite still
makes the product NaN.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import gemm


@contextlib.contextmanager
def without_scales() -> Iterator[None]:
    """Programs that are traced inside round operands without scales."""
    with mock.patch.object(gemm, "tensor_scale", _one):
        yield


def _one(amax: Float[Array, ""], dtype: DTypeLike, axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    del dtype, axes
    return jnp.where(jnp.isfinite(amax), 1.0, jnp.nan)
