"""A linear layer."""

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.nn.parameters import LECUN, value_of, vector, weight
from coat_jax.precision import COAT, Precision, precision_of


class Linear(nnx.Module):
    """y = x kernel + bias, with forward, backward and residual in FP8.

    Args:
        in_features: columns of the input.
        out_features: columns of the output.
        use_bias: whether there is a bias, which is zero at first.
        precision: see `coat.Precision`.
        sharding: the mesh axes of the kernel's two axes, as in ("fsdp", "tensor"); the bias is
            sharded like the columns of the kernel. Empty: nothing is sharded.
        kernel_init: draws the kernel.
        param_dtype: the dtype of the parameters.
        rngs: where the kernel's random numbers come from.

    Attributes:
        kernel: [inputs, outputs].
        bias: [outputs], or None.
        precision: of the products, and of the residuals.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        precision: Precision | str = COAT,
        sharding: tuple[str | None, ...] = (),
        kernel_init: Initializer = LECUN,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.kernel = weight(
            rngs, (in_features, out_features), sharding, init=kernel_init, dtype=param_dtype
        )
        bias = vector(out_features, sharding[1:], fill=0.0, dtype=param_dtype)
        self.bias = nnx.data(bias if use_bias else None)
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        return ops.linear(x, value_of(self.kernel), value_of(self.bias), precision=self.precision)
