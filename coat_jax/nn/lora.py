"""LoRA adapters on base weights that are frozen in FP8.

    model = coat.nn.freeze(model)                                       # its LoRALinear layers
    optimizer = nnx.Optimizer(model, coat.optax.fp8_adamw(1e-3), wrt=nnx.LoRAParam)

`freeze` takes a model with Flax's own `nnx.LoRALinear` layers. Their weights then take one byte per
parameter, and are no longer an `nnx.Param`. Their adapters stay as they are, so only adapters have
gradients and moments.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.nn.children import modules_of, require_module, set_class
from coat_jax.nn.convertible import has_own_promotion, why_not_linear
from coat_jax.nn.parameters import metadata, value_of
from coat_jax.precision import COAT, Precision, precision_of


class FrozenWeight(nnx.Variable):
    """A variable that is not a parameter: it has no gradient and no moments."""


class LoRALinear(nnx.Module):
    """y = x w + bias + (x a) c, with w in FP8.

    Attributes:
        codes: the FP8 codes of w, [inputs, outputs].
        scale: the scale of w, one number.
        bias: [outputs], or None.
        lora_a: a, [inputs, rank].
        lora_b: c, [rank, outputs].
        dtype: of the input and the result; by default as in Flax, by the dtypes of x and w.
        precision: of the products, and of the saved input.
    """

    def __init__(self, layer: nnx.LoRALinear, *, precision: Precision | str = COAT):
        """Rounds the weight of `layer`; all other arrays are shared with it."""
        if type(layer) is not nnx.LoRALinear:
            raise ValueError(
                f"{type(layer).__name__} is a subclass of nnx.LoRALinear. What it adds would be "
                "lost. Call coat.ops.adapted_linear in it."
            )
        if why := _what_would_be_lost(layer):
            raise ValueError(f"An nnx.LoRALinear cannot be frozen: {why}. That would be lost.")
        weight = ops.freeze(layer.kernel[...], precision=precision)
        sharding = layer.kernel.get_metadata().get("out_sharding")
        self.codes = FrozenWeight(weight.codes, **metadata(sharding))
        self.scale = FrozenWeight(weight.scale)
        self.bias = nnx.data(layer.bias)
        self.lora_a, self.lora_b = layer.lora.lora_a, layer.lora.lora_b
        self.dtype, self._param_dtype = layer.dtype, layer.kernel.dtype
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        return ops.adapted_linear(
            x.astype(self.dtype or jnp.promote_types(x.dtype, self._param_dtype)),
            ops.Frozen(self.codes[...], self.scale[...]),
            (self.lora_a[...], self.lora_b[...]),
            value_of(self.bias),
            precision=self.precision,
        )


def _what_would_be_lost(layer: nnx.LoRALinear) -> str:
    """Names what a frozen layer would not compute as Flax's does; empty if there is nothing."""
    converted = isinstance(layer.dot_general, ops.DotGeneral)
    if not converted and (why := why_not_linear(layer)):
        return why
    if has_own_promotion(layer) or has_own_promotion(layer.lora):
        return "it has a promote_dtype of its own"
    if layer.lora.dtype != layer.dtype:
        return f"its dtype is {layer.dtype}, but lora_dtype is {layer.lora.dtype}"
    if layer.preferred_element_type is not None:
        return "it has a preferred_element_type"
    return ""


def freeze(model: nnx.Module, precision: Precision | str = COAT) -> nnx.Module:
    """A copy of `model` whose `nnx.LoRALinear` layers have their weights frozen in FP8.

    All other arrays are shared with `model`. Delete `model` to free the memory of its weights.

    Args:
        model: any NNX model.
        precision: of the products: a `coat.Precision` that multiplies in FP8 in both passes, or its
            name.
    """
    require_module("freeze", model)
    copy: nnx.Module = nnx.merge(*nnx.split(model))
    layers = [m for _, m in modules_of(copy) if isinstance(m, nnx.LoRALinear)]
    for layer in layers:
        if isinstance(layer, nnx.LoRALinear):  # not yet frozen by another path
            frozen = vars(LoRALinear(layer, precision=precision))
            vars(layer).clear()
            vars(layer).update(frozen)
            set_class(layer, LoRALinear)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nnx.LoRALinear that is not frozen yet. Use "
            "nnx.LoRALinear instead of nnx.Linear for the layers to adapt."
        )
    return copy
