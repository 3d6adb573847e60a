"""Which of Flax's layers a conversion changes, and why it leaves others alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from coat_jax import ops
from coat_jax.nn.children import set_class
from coat_jax.nn.embed import Embed
from coat_jax.nn.norm import LayerNorm, RMSNorm
from coat_jax.precision import Precision

LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
NORMS = (nnx.RMSNorm, nnx.LayerNorm)
OURS = (ops.DotGeneral, ops.Einsum)
# Classes that have the same attributes.
REPLACED: dict[type, Any] = {nnx.RMSNorm: RMSNorm, nnx.LayerNorm: LayerNorm, nnx.Embed: Embed}


def convert_layer(module: Any, precision: Precision) -> None:
    """Converts one of Flax's layers in place; or back, one that was converted before."""
    if isinstance(module, nnx.Einsum):
        module.einsum_op = ops.Einsum(precision) if precision.fp8_linear else jnp.einsum
    elif isinstance(module, LINEAR):
        fp8 = precision.fp8_linear
        module.dot_general = ops.DotGeneral(precision) if fp8 else jax.lax.dot_general
    elif type(module) in REPLACED:
        set_class(module, REPLACED[type(module)])
        if not isinstance(module, Embed):
            module.precision = precision


def formats_of(module: Any, precision: Precision) -> str:
    """Names what `convert_layer` makes of a layer."""
    if isinstance(module, nnx.Embed):
        return "coat.nn.Embed, whose gradient is summed in FP32"
    if isinstance(module, LINEAR) and not precision.fp8_linear:
        return "what it was before it was converted"
    forward = "fp8" if isinstance(module, NORMS) else precision.forward_products
    return {"fp8": "FP8", "int8": "INT8 and FP8", "bf16": "FP8 in the backward pass"}[forward]


def why_not(module: Any, precision: Precision, source: str) -> str:
    """Why a module stays as it is; empty if `convert_layer` should change it.

    Args:
        module: any module that has parameters.
        precision: its precision.
        source: what says so.
    """
    if isinstance(module, LINEAR):
        if isinstance(_product_of(module), OURS):  # converted before
            return ""
        return why_not_linear(module) if precision.fp8_linear else f"{source} is not FP8"
    if isinstance(module, NORMS):
        return why_not_norm(module) if precision.block else f"{source} leaves norms unchanged"
    if isinstance(module, nnx.Embed):
        fp8 = precision.fp8_linear or precision.block
        return _why_not_embed(module) if fp8 else f"{source} is not FP8"
    if type(module).__module__.startswith("coat_jax.nn"):
        return "it already has a precision"
    return "there is no FP8 version of this kind of module"


def why_not_linear(module: Any) -> str:
    """Why the product of one of LINEAR stays as it is; empty if it can become FP8."""
    if isinstance(module, nnx.Einsum):
        return _why_not_einsum(module)
    if isinstance(module, nnx.LinearGeneral) and module.batch_axis:
        return "its weight has batch axes"
    own = _product_of(module)
    return "" if own in (None, jax.lax.dot_general) else "it has a dot_general of its own"


def _product_of(module: Any) -> Any:
    """What one of LINEAR multiplies with."""
    if isinstance(module, nnx.Einsum):
        return module.einsum_op
    return getattr(module, "dot_general_cls", None) or module.dot_general


def why_not_norm(module: Any) -> str:
    """Why one of NORMS stays as it is; empty if ours computes the same."""
    if type(module) not in NORMS:
        kind = nnx.RMSNorm if isinstance(module, nnx.RMSNorm) else nnx.LayerNorm
        return f"it is not nnx.{kind.__name__} itself, and may compute something else"
    if has_own_promotion(module):
        return "it has a promote_dtype of its own"
    last = all(axes in (-1, (-1,)) for axes in (module.reduction_axes, module.feature_axes))
    if not last or module.axis_name is not None:
        return "it normalizes other axes than the last"
    return ""


def has_own_promotion(module: Any) -> bool:
    """Whether a layer of Flax promotes dtypes with another function than Flax's."""
    return module.promote_dtype is not dtypes.promote_dtype


def _why_not_embed(module: nnx.Embed) -> str:
    if isinstance(module, Embed):
        return "it sums its gradient in FP32 already"
    if type(module) is not nnx.Embed:
        return "it is not nnx.Embed itself, and may compute something else"
    if jnp.dtype(module.dtype).itemsize >= jnp.dtype(jnp.float32).itemsize:
        return f"it sums its gradient in {jnp.dtype(module.dtype).name} already"
    return ""


def _why_not_einsum(module: nnx.Einsum) -> str:
    if module.einsum_op is not jnp.einsum:
        return "it has an einsum_op of its own"
    if module.einsum_str is None:
        return "its equation is known only when it is called"
    inputs, _, output = module.einsum_str.replace(" ", "").partition("->")
    x, _, w = inputs.partition(",")
    if "." in w or set(x) & set(w) & set(output):
        return f"its weight has batch axes: {module.einsum_str}"
    return ""
