"""RMSNorm and LayerNorm, which save their input in FP8 blocks.

The result has the dtype of the input. If `convert` made the norm from one of Flax's that has a
`dtype`, the result has that dtype.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.kernels.norm import NormKind
from coat_jax.nn.parameters import value_of, vector
from coat_jax.precision import COAT, Precision, precision_of


class _Norm(nnx.Module):
    dtype: DTypeLike | None = None
    bias: nnx.Param | None = None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        precision: Precision | str = COAT,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs  # nothing random
        self.num_features = num_features
        scale = vector(num_features, fill=1.0, dtype=param_dtype)
        self.scale = nnx.data(scale if use_scale else None)
        self.epsilon = epsilon
        self.precision = precision_of(precision)

    def as_op_norm(self) -> ops.Norm:
        """The norm as an argument of `coat.ops`, which compute it together with what follows."""
        kind: NormKind = "layer" if isinstance(self, LayerNorm) else "rms"
        return ops.Norm(value_of(self.scale), value_of(self.bias), kind, self.epsilon)

    def __call__(self, x: Float[Array, "*rows D"], mask: None = None) -> Float[Array, "*rows D"]:
        """Normalizes the last axis. Flax's norms take a mask; here it must be None."""
        if mask is not None:
            raise UserError(
                "Norms of coat.nn take no mask: their statistics are those of all elements of the "
                "last axis. Use Flax's norm. A rule of coat.nn.convert keeps it, as in "
                '{"*.norm": "bf16"}.'
            )
        y = ops.norm(x, self.as_op_norm(), precision=self.precision)
        return y if self.dtype is None else y.astype(self.dtype)


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + epsilon) * scale, in FP32 inside.

    Attributes:
        scale: [num_features], or None.
        epsilon: added to the mean square.
        precision: how the input is saved.
        dtype: of the result; None for that of the input.
    """


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias, in FP32 inside.

    It takes the arguments of `RMSNorm`, and `use_bias`.

    Attributes:
        scale: [num_features], or None.
        bias: [num_features], or None.
        epsilon: added to the variance.
        precision: how the input is saved.
        dtype: of the result; None for that of the input.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_bias: bool = True,
        param_dtype: DTypeLike = jnp.float32,
        **settings: Any,
    ):
        super().__init__(num_features, param_dtype=param_dtype, **settings)
        bias = vector(num_features, fill=0.0, dtype=param_dtype)
        self.bias = nnx.data(bias if use_bias else None)


AnyNorm = RMSNorm | LayerNorm


def require_norm_or_none(name: str, norm: Any) -> None:
    """Raises unless the argument `name` is a norm of this module, or None."""
    if norm is not None and not isinstance(norm, AnyNorm):
        raise TypeError(
            f"{name} is a {type(norm).__module__}.{type(norm).__name__}, and must be "
            "a coat.nn.RMSNorm, a coat.nn.LayerNorm or None."
        )
