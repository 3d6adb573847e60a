"""Telemetry: statistics of what an op rounds to FP8, by the names of its tensors.

The functions are called only while `coat_jax.telemetry` traces a loss; see `definition.define_op`.
The values are computed here with `jnp`, whatever kernel rounds them, since a fused kernel does not
return them. Tensors of the op's i-th weight have the names "weight/i" and "gradient/i".
"""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.activation import Limited, activate
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm, Stats, normalize
from coat_jax.numerics import statistics
from coat_jax.numerics.blocks import Blocks
from coat_jax.ops.definition import SavedArray, restore
from coat_jax.ops.projection import Layers, Mode, Scales
from coat_jax.probes import Probe


def blocks(
    names: Sequence[str],
    tensors: Sequence[Float[Array, "*rows D"]],
    saved: Sequence[SavedArray],
    size: int | None,
    dtype: DTypeLike,
) -> Probe:
    """The statistics of tensors that are saved in blocks; `dtype` is the blocks' format."""
    return {
        name: statistics.of_blocks(x, of_x, size=size, dtype=dtype)
        for name, x, of_x in zip(names, tensors, saved, strict=True)
        if size is not None and isinstance(of_x, Blocks)
    }


def products(
    tensor: str,
    values: Float[Array, "*rows K"],
    scale: Float[Array, ""] | None,
    layers: Layers,
    scales: Scales,
    mode: Mode,
    *,
    first: int = 0,
) -> Probe:
    """The statistics of the operands of forward products.

    Args:
        tensor: the name of the input.
        values: of the input.
        scale: of the input.
        layers: whose weights multiply the input.
        scales: of the weights.
        mode: how products are computed.
        first: the number of the first of these weights among those of the op.
    """
    weights = layers.weights
    named = {f"weight/{i}": weight for i, weight in enumerate(weights, first)}
    if mode.precision.forward_products == "int8":
        squares = statistics.column_squares(values)
        columns = statistics.column_squares(*(weight.T for weight in weights))
        of_weights = {name: statistics.of_int8(w.T, squares) for name, w in named.items()}
        return {tensor: statistics.of_int8(values, columns), **of_weights}
    operands = zip((tensor, *named), (values, *weights), (scale, *scales), strict=True)
    return _of_tensors(operands, mode.precision.forward)


def _of_tensors(
    named: Iterable[tuple[str, Array, Float[Array, ""] | None]], dtype: DTypeLike
) -> Probe:
    """The statistics of tensors that are rounded to FP8 with one scale, by their names."""
    return {
        name: statistics.of_tensor(x, scale, dtype) for name, x, scale in named if scale is not None
    }


def norm(
    x: Float[Array, "*rows D"],
    saved: tuple[SavedArray, Norm | None, Stats | None, Float[Array, ""] | None],
    layers: Layers,
    scales: Scales,
    mode: Mode,
) -> Probe:
    """The statistics of a norm's saved input, and of the products that take the norm."""
    (of_x, norm, stats, scale), precision = saved, mode.precision
    n = restore(x if precision.exact_forward else of_x, jnp.float32, precision.block)
    if norm is not None and stats is not None:
        n = normalize(n, stats, norm)
    in_blocks = blocks(("saved",), (x,), (of_x,), precision.block, precision.forward)
    return in_blocks | products("input", n, scale, layers, scales, mode)


def activation(
    hidden: Sequence[Float[Array, "*rows F"]],
    saved: tuple[Sequence[SavedArray], Float[Array, ""] | None],
    act: Limited,
    down: Layers,
    scales: Scales,
    mode: Mode,
) -> Probe:
    """The statistics of an activation's saved inputs, and of the product that takes it."""
    (of_hidden, scale), precision = saved, mode.precision
    used = hidden if precision.exact_forward else of_hidden
    a = activate([restore(h, jnp.float32, precision.block) for h in used], act)
    names = [f"{name}/saved" for name in ("gate", "up")[-len(hidden) :]]
    in_blocks = blocks(names, hidden, of_hidden, precision.block, precision.forward)
    return in_blocks | products("down/input", a, scale, down, scales, mode, first=len(hidden))


def gradients(
    tensors: Sequence[Float[Array, "*rows N"]], operands: Sequence[Operand], mode: Mode
) -> Probe:
    """The statistics of the gradients of the weights' outputs."""
    named = (
        (f"gradient/{i}", dy, g.scale)
        for i, (dy, g) in enumerate(zip(tensors, operands, strict=True))
    )
    return _of_tensors(named, mode.precision.backward)
