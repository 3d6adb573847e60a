"""A linear layer for inference, its weight in 8 or 4 bits; see `coat.ops.quantized_linear`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.nn.lora import FrozenWeight
from coat_jax.nn.parameters import metadata, value_of
from coat_jax.ops import Quantized
from coat_jax.ops.quantized import Activations, quantized_linears, require_quantized


class QuantizedLinear(nnx.Module):
    """y = x w + bias, with w ~ codes * scale. It has no trainable parameters.

    Attributes:
        codes, scale, input_scale, zero: of w; see `coat.ops.Quantized`.
        bias: [N], or None.
        activations: how inputs are rounded: "none", "static" or "dynamic".
    """

    def __init__(
        self,
        weight: Quantized,
        bias: nnx.Param | None = None,
        *,
        activations: Activations = "dynamic",
        sharding: tuple[str | None, ...] = (),
    ):
        """Holds a weight from `coat.ops.quantize_weight`.

        Args:
            weight: w.
            bias: of the layer.
            activations: see `coat.ops.quantized_linear`.
            sharding: the mesh axes of w, inputs first.
        """
        require_quantized("QuantizedLinear", weight, activations)
        self.codes = FrozenWeight(weight.codes, **metadata(sharding[::-1]))
        of_groups = sharding[::-1] if weight.format == "int4" else sharding[1:]
        self.scale = FrozenWeight(weight.scale, **metadata(of_groups))
        given, zero = weight.input_scale, weight.zero
        self.input_scale = nnx.data(None if given is None else FrozenWeight(given))
        zeros = None if zero is None else FrozenWeight(zero, **metadata(of_groups))
        self.zero = nnx.data(zeros)
        self.bias = nnx.data(bias)
        self.activations: Activations = activations

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        return ops.quantized_linear(
            x, self.weight(), value_of(self.bias), activations=self.activations
        )

    def weight(self) -> Quantized:
        """The weight as arrays."""
        more = value_of(self.input_scale), value_of(self.zero)
        return Quantized(self.codes[...], self.scale[...], *more)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        held: tuple[Array | None, ...] = self.weight()
        return sum(int(array.nbytes) for array in held if array is not None)


class QuantizedArrays(NamedTuple):
    """The arrays of several quantized layers."""

    weights: list[Quantized]
    biases: list[Array | None]
    activations: list[Activations]


def arrays_of(layers: Sequence[Any]) -> QuantizedArrays | None:
    """The arrays of layers; None unless all are quantized."""
    if not all(isinstance(layer, QuantizedLinear) for layer in layers):
        return None
    return QuantizedArrays(
        [layer.weight() for layer in layers],
        [value_of(layer.bias) for layer in layers],
        [layer.activations for layer in layers],
    )


def apply_all(
    layers: Sequence[Callable[[Array], Array]], x: Float[Array, "*rows K"]
) -> list[Float[Array, "*rows N"]]:
    """Applies several layers to one input. Quantized ones may share a kernel."""
    arrays = arrays_of(layers)
    if arrays is None or len(modes := {*arrays.activations}) != 1:
        return [layer(x) for layer in layers]
    return quantized_linears(x, arrays.weights, arrays.biases, activations=modes.pop())
