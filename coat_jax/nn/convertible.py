"""Which of Flax's layers a conversion replaces or changes, and why it leaves others alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from coat_jax.nn.embed import Embed
from coat_jax.nn.norm import LayerNorm, RMSNorm

LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
NORMS = (nnx.RMSNorm, nnx.LayerNorm)


def why_not_linear(module: Any) -> str:
    """Why the product of one of LINEAR stays as it is; empty if it can become FP8."""
    if isinstance(module, nnx.Einsum):
        return _why_not_einsum(module)
    if isinstance(module, nnx.LinearGeneral) and module.batch_axis:
        return "its weight has batch axes"
    own = getattr(module, "dot_general_cls", None) or module.dot_general
    return "" if own in (None, jax.lax.dot_general) else "it has a dot_general of its own"


def why_not_norm(module: Any) -> str:
    """Why one of NORMS stays as it is; empty if `as_norm` can replace it."""
    if type(module) not in NORMS:
        kind = nnx.RMSNorm if isinstance(module, nnx.RMSNorm) else nnx.LayerNorm
        return f"it is not nnx.{kind.__name__} itself, and may compute something else"
    if has_own_promotion(module):
        return "it has a promote_dtype of its own"
    last = all(axes in (-1, (-1,)) for axes in (module.reduction_axes, module.feature_axes))
    if not last or module.axis_name is not None:
        return "it normalizes other axes than the last"
    return ""


def why_not_embed(module: nnx.Embed) -> str:
    """Why an embedding stays as it is; empty if `as_embed` should replace it."""
    if isinstance(module, Embed):
        return "it sums its gradient in FP32 already"
    if type(module) is not nnx.Embed:
        return "it is not nnx.Embed itself, and may compute something else"
    if jnp.dtype(module.dtype).itemsize >= jnp.dtype(jnp.float32).itemsize:
        return f"it sums its gradient in {jnp.dtype(module.dtype).name} already"
    return ""


def has_own_promotion(module: Any) -> bool:
    """Whether a layer of Flax promotes dtypes with another function than Flax's."""
    return module.promote_dtype is not dtypes.promote_dtype


def as_embed(module: nnx.Embed) -> Embed:
    """The embedding of coat.nn with the attributes of Flax's."""
    new = nnx.eval_shape(lambda: Embed(module.num_embeddings, module.features, rngs=nnx.Rngs(0)))
    copy_attributes(module, new)
    return new


def as_norm(module: Any) -> RMSNorm | LayerNorm:
    """The norm of coat.nn with the attributes of one of Flax's; a norm of coat.nn is returned."""
    if isinstance(module, RMSNorm | LayerNorm):
        return module
    kind = RMSNorm if isinstance(module, nnx.RMSNorm) else LayerNorm
    new = nnx.eval_shape(lambda: kind(module.num_features))
    copy_attributes(module, new)
    return new


def copy_attributes(module: nnx.Module, new: nnx.Module) -> None:
    """Gives `new` the attributes of `module`; Flax traverses the same ones in both."""
    for name, value in vars(module).items():
        if not name.startswith("_pytree__"):  # what Flax adds
            is_data = module._pytree__nodes.get(name, False)
            setattr(new, name, nnx.data(value) if is_data else value)


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
