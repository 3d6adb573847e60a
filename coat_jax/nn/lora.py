"""LoRA adapters on base weights that are frozen in FP8.

    model = coat.nn.freeze(model)                                       # its LoRALinear layers
    optimizer = nnx.Optimizer(model, coat.optax.fp8_adamw(1e-3), wrt=nnx.LoRAParam)

`freeze` takes a model with Flax's own `nnx.LoRALinear` layers. Their weights then take one byte per
parameter, and are no longer an `nnx.Param`. Their adapters stay as they are, so only adapters have
gradients and moments.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.nn.children import children, replace, require_module
from coat_jax.nn.parameters import value_of
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
        precision: of the products, and of the saved input.
    """

    def __init__(self, layer: nnx.LoRALinear, *, precision: Precision | str = COAT):
        """Rounds the weight of `layer`; all other arrays are shared with it."""
        if type(layer) is not nnx.LoRALinear:
            raise ValueError(
                f"{type(layer).__name__} is a subclass of nnx.LoRALinear. What it adds would be "
                "lost. Call coat.ops.adapted_linear in it."
            )
        weight = ops.freeze(layer.kernel[...], precision=precision)
        metadata = layer.kernel.get_metadata()
        sharding = {k: metadata[k] for k in ("out_sharding",) if metadata.get(k) is not None}
        self.codes = FrozenWeight(weight.codes, **sharding)
        self.scale = FrozenWeight(weight.scale)
        self.bias = nnx.data(layer.bias)
        self.lora_a, self.lora_b = layer.lora.lora_a, layer.lora.lora_b
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        return ops.adapted_linear(
            x,
            ops.Frozen(self.codes[...], self.scale[...]),
            (self.lora_a[...], self.lora_b[...]),
            value_of(self.bias),
            precision=self.precision,
        )


def freeze(model: nnx.Module, precision: Precision | str = COAT) -> nnx.Module:
    """A copy of `model` whose `nnx.LoRALinear` layers have their weights frozen in FP8.

    All other arrays are shared with `model`. Delete `model` to free the memory of its weights.

    Args:
        model: any NNX model.
        precision: of the products: a `coat.Precision` with fp8_linear and without int8_forward, or
            its name.
    """
    require_module("freeze", model)
    copy = nnx.merge(*nnx.split(model))
    if isinstance(copy, nnx.LoRALinear):
        return LoRALinear(copy, precision=precision)
    done: dict[int, Any] = {}
    for owner, key, _, module in list(children(copy)):
        if not isinstance(module, nnx.LoRALinear):
            continue
        if id(module) not in done:
            done[id(module)] = LoRALinear(module, precision=precision)
        replace(owner, key, done[id(module)])
    if not done:
        raise ValueError(
            f"{type(model).__name__} has no nnx.LoRALinear, whose weight could be frozen. Use "
            "nnx.LoRALinear instead of nnx.Linear for the layers to adapt."
        )
    return copy
