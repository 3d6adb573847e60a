"""Records for telemetry what an op rounds to FP8: its tensors, and their rounded values.

    probe = recording.norm(probe, x, saved, norm, weights, scales, mode)

Each function returns the probe with the sums of its tensors. `backward.define_op` calls them, only
if an op has a probe.
The values are computed here with `jnp`, whatever kernel rounds them, since a fused kernel does not
return them. See `coat_jax.probes`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.kernels.activation import Activation, activate
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm, normalize
from coat_jax.numerics import statistics
from coat_jax.numerics.blocks import Blocks
from coat_jax.ops.saved.activation import SavedActivation
from coat_jax.ops.saved.array import SavedArray, restore
from coat_jax.ops.saved.attention import AttentionSettings, SavedAttention
from coat_jax.ops.saved.norm import SavedNorm
from coat_jax.ops.saved.projection import Mode, Scales, Weights
from coat_jax.precision import Precision
from coat_jax.probes import OptionalProbe, Probe, of_weight


def probe_of_layers(
    op: str,
    mode: Mode,
    weights: Sequence[str],
    *,
    operands: Sequence[str] = ("input",),
    blocks: Sequence[str] = (),
) -> OptionalProbe:
    """The probe of an op that multiplies.

    Args:
        op: its name.
        mode: how it computes.
        weights: their names.
        operands: names of the other operands, besides weights and gradients.
        blocks: names of the tensors that are saved in blocks, if any are.
    """
    saved = () if mode.precision.block is None else tuple(blocks)
    if mode.format is None:
        return probes.probe(op, saved)
    return probes.probe(op, (*saved, *operands), weights, ("weight", "gradient"))


def saved(
    probe: Probe,
    tensor: str,
    x: Float[Array, "*rows D"],
    result: SavedArray,
    size: int | None,
    dtype: DTypeLike | None = None,
) -> Probe:
    """Records a tensor if it is saved in blocks; `dtype` is their format, if simulated."""
    if size is None or not isinstance(result, Blocks):
        return probe
    blocks = result
    return probe.with_sums(tensor, lambda: statistics.of_blocks(x, blocks, size=size, dtype=dtype))


def products(
    probe: Probe,
    tensor: str,
    values: Callable[[], Float[Array, "*rows K"]],
    scale: Float[Array, ""] | None,
    weights: Weights,
    scales: Scales,
    mode: Mode,
    *,
    first: int = 0,
) -> Probe:
    """Records the operands of forward products.

    Args:
        probe: the probe.
        tensor: the name of the input.
        values: a function that returns the input; called only if something is recorded.
        scale: of the input.
        weights: the weights that multiply the input, in the order of their names, from `first` on.
        scales: of the weights.
        mode: how products are computed.
        first: the place of these weights among those of the op.
    """
    if not mode.precision.int8_forward:
        probe = _operand(probe, tensor, values, scale, mode.format)
        return _of_weights(probe, "weight", lambda i: weights[i], scales, mode.format, first=first)

    def of_input() -> Array:
        return statistics.of_int8(values(), statistics.column_squares(*(w.T for w in weights)))

    def of_columns(weight: Array) -> Array:
        return statistics.of_int8(weight.T, statistics.column_squares(values()))

    probe = probe.with_sums(tensor, of_input)
    for name, weight in zip(probe.weights[first:], weights, strict=False):
        probe = probe.with_sums(of_weight(name, "weight"), partial(of_columns, weight))
    return probe


def _operand(
    probe: Probe,
    tensor: str,
    values: Callable[[], Float[Array, "*rows K"]],
    scale: Float[Array, ""] | None,
    dtype: DTypeLike | None,
) -> Probe:
    """Records a tensor that is rounded to FP8 with one scale."""
    if scale is None or dtype is None:
        return probe
    return probe.with_sums(tensor, lambda: statistics.of_tensor(values(), scale, dtype))


def norm(
    probe: Probe,
    x: Float[Array, "*rows D"],
    result: SavedNorm,
    layer: Norm | None,
    weights: Weights,
    scales: Scales,
    mode: Mode,
) -> Probe:
    """Records the saved input of a norm, and the operands of the products that take the norm."""
    precision = mode.precision

    def values() -> Array:
        used = x if precision.exact_forward else result.x
        n = restore(used, jnp.float32, precision.block)
        return n if layer is None or result.stats is None else normalize(n, result.stats, layer)

    probe = saved(probe, "saved", x, result.x, precision.block, precision.forward)
    return products(probe, "input", values, result.scale, weights, scales, mode)


def activation(
    probe: Probe,
    hidden: Sequence[Float[Array, "*rows F"]],
    result: SavedActivation,
    act: Activation,
    down: Float[Array, "F D"],
    scale: Float[Array, ""] | None,
    mode: Mode,
) -> Probe:
    """Records the saved inputs of an activation, and the operands of the product that takes it."""
    precision = mode.precision
    for name, h, of_h in zip(probe.weights, hidden, result.hidden, strict=False):
        weight = of_weight(name, "saved")
        probe = saved(probe, weight, h, of_h, precision.block, precision.forward)

    def values() -> Array:
        inputs = hidden if precision.exact_forward else result.hidden
        return activate([restore(h, jnp.float32, precision.block) for h in inputs], act)

    return products(
        probe, "down/input", values, result.scale, (down,), (scale,), mode, first=len(hidden)
    )


def attention(
    probe: Probe,
    inputs: Sequence[Float[Array, "B S N H"]],
    output: Float[Array, "B S N H"],
    result: SavedAttention,
    settings: AttentionSettings,
) -> Probe:
    """Records what attention saves."""
    size = settings.precision.attention_block
    names = attention_blocks(settings.precision)
    tensors, results = (*inputs, output), (*result.inputs, result.output)
    for name, x, of_x in zip(names, tensors, results, strict=False):
        probe = saved(probe, name, x, of_x, size, settings.precision.forward)
    return probe


def attention_blocks(precision: Precision) -> tuple[str, ...]:
    """The tensors that attention saves in blocks."""
    if precision.attention_block is None:
        return ()
    return ("query/saved", "key/saved", "value/saved", "out/saved")


def gradients(
    probe: Probe,
    values: Callable[[], Sequence[Float[Array, "*rows N"]]],
    operands: Sequence[Operand],
    mode: Mode,
    *,
    first: int = 0,
) -> Probe:
    """Records the gradients of the weights' outputs, from the `first` of the weights on."""
    scales = tuple(g.scale for g in operands)
    return _of_weights(
        probe, "gradient", lambda i: values()[i], scales, mode.gradient_format, first=first
    )


def _of_weights(
    probe: Probe,
    tensor: str,
    values: Callable[[int], Array],
    scales: Scales,
    dtype: DTypeLike | None,
    *,
    first: int = 0,
) -> Probe:
    for i, (name, scale) in enumerate(zip(probe.weights[first:], scales, strict=False)):
        probe = _operand(probe, of_weight(name, tensor), partial(values, i), scale, dtype)
    return probe
