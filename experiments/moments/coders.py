"""Every way of storing a moment in 8 bits that `optimizer_error` compares.

A coder maps a matrix to its values after encoding and decoding, in FP32. `plain`, `expanded` and
`stochastic` are coat_jax itself. The others answer "what if", and the package has no such option:
another rule for the exponent k (`with_exponent`), another data type under the scale or the
expansion (`dynamic`, `dynamic_expanded`). All share the groups of coat_jax.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics import expansion, noise, qtensor
from coat_jax.numerics.formats import (
    E4M3,
    dithered_cast,
    format_of,
    saturating_cast,
    stochastic_cast,
)
from experiments.moments import dynamic_exponent

Rows = Float[Array, "N D"]
Coder = Callable[[Rows], Rows]
Unit = Float[Array, "N G K"]  # numbers within [-1, 1]

GROUP_SIZE = expansion.GROUP_SIZE


def plain(dtype: DTypeLike, group_size: int = GROUP_SIZE) -> Coder:
    """One scale per group, rounded to nearest."""
    return jax.jit(lambda x: qtensor.dequantize(qtensor.quantize(x, dtype, group_size=group_size)))


def expanded(dtype: DTypeLike, group_size: int = GROUP_SIZE) -> Coder:
    """Dynamic range expansion, rounded to nearest, as in the paper."""

    def code(x: Rows) -> Rows:
        return expansion.decode(
            expansion.encode(x, dtype, group_size=group_size), group_size=group_size
        )

    return jax.jit(code)


def stochastic(seed: int) -> Coder:
    """Dynamic range expansion to E4M3, rounded stochastically."""

    def code(x: Rows) -> Rows:
        uniform = noise.uniform(noise.leaf_key(seed, 1, 0), x.shape, run=GROUP_SIZE)
        return expansion.decode(expansion.encode(x, noise=uniform))

    return jax.jit(code)


def plain_stochastic(x: Rows, uniform: Rows) -> Rows:
    """E4M3 with one scale per group, rounded stochastically."""
    grouped, random = (qtensor.split_groups(a, GROUP_SIZE) for a in (x, uniform))
    scale = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / format_of(E4M3).max
    codes = stochastic_cast(grouped / jnp.where(scale > 0, scale, 1.0), E4M3, random)
    return qtensor.join_groups(codes.astype(jnp.float32) * scale, x.shape)


@dataclasses.dataclass(frozen=True)
class Exponent:
    """A rule for k = log2_range / log2(max / min) of a group; by default that of coat_jax.

    Attributes:
        steps: k is rounded down to a multiple of 1 / steps; None keeps it in FP32.
        floor: the smallest k.
        ceiling: the largest k.
        log2_range: log2 of the range of codes that the group is spread over.
        added: None leaves zeros out of the minimum. A number is added to minimum and maximum,
            and zeros count, as in the authors' kernel.
    """

    steps: int | None = expansion.STEPS
    floor: float = 1.0
    ceiling: float = expansion.MAX_STEPS / expansion.STEPS
    log2_range: float = format_of(E4M3).log2_range
    added: float | None = None

    def __call__(self, magnitude: Float[Array, "N G K"]) -> Float[Array, "N G"]:
        """The k of each group."""
        largest = jnp.max(magnitude, axis=-1)
        if self.added is None:
            smallest = jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1)
            smallest = jnp.where(largest > 0, smallest, 1.0)
            largest = jnp.where(largest > 0, largest, 1.0)
        else:
            smallest = jnp.min(magnitude, axis=-1) + self.added
            largest = largest + self.added
        k = self.log2_range / jnp.maximum(jnp.log2(largest) - jnp.log2(smallest), 1e-6)
        if self.steps is not None:
            k = jnp.floor(k * self.steps + expansion.TOLERANCE) / self.steps
        return jnp.clip(k, self.floor, self.ceiling)


# k may be below 1 where one element is tiny, the range is smaller, and zeros count as 1e-20.
AUTHORS = Exponent(floor=1 / 16, ceiling=math.inf, log2_range=math.log2(448 * 448 / 2), added=1e-20)


def smallest_at(bottom: int) -> Exponent:
    """The rule that places a group's smallest element at 2^-bottom; coat_jax's is 2^-9."""
    return Exponent(log2_range=math.log2(format_of(E4M3).max) + bottom)


def with_exponent(rule: Exponent) -> Coder:
    """Expansion to E4M3 with another rule for k, rounded to nearest."""
    through = _through_power(rule, format_of(E4M3).tiny / format_of(E4M3).max)

    def to_nearest(unit: Unit, k: Float[Array, "N G 1"]) -> Unit:
        del k
        return _from_e4m3(saturating_cast(unit * format_of(E4M3).max, E4M3))

    return jax.jit(lambda x: through(x, to_nearest))


def stochastic_with_exponent(rule: Exponent, x: Rows, uniform: Rows) -> Rows:
    """Expansion to E4M3 with another rule for k, rounded stochastically: unbiased in x."""
    through = _through_power(rule, format_of(E4M3).tiny / format_of(E4M3).max)
    grouped = qtensor.split_groups(uniform, GROUP_SIZE)

    def at_random(unit: Unit, k: Float[Array, "N G 1"]) -> Unit:
        image = unit * format_of(E4M3).max
        return _from_e4m3(stochastic_cast(image, E4M3, grouped, curvature=1 - 1 / k))

    return through(x, at_random)


def expanded_with_exponent(
    rounding: Literal["dithered", "stochastic"], steps: int | None, x: Rows, uniform: Rows
) -> Rows:
    """Expansion to E4M3 as coat_jax rounds either moment, with k in multiples of 1 / `steps`.

    With steps=None k stays in FP32. Unlike above, small values may become zero.
    """
    fit = expansion.fit_of(E4M3, rounding)
    rule = Exponent(steps, fit.min_steps / expansion.STEPS, log2_range=fit.log2_range)
    grouped = qtensor.split_groups(uniform, GROUP_SIZE)

    def cast(unit: Unit, k: Float[Array, "N G 1"]) -> Unit:
        image = unit * format_of(E4M3).max
        if rounding == "dithered":
            return _from_e4m3(dithered_cast(image, E4M3, grouped))
        return _from_e4m3(stochastic_cast(image, E4M3, grouped, curvature=1 - 1 / k))

    return _through_power(rule, 0.0)(x, cast)


def dynamic(*, signed: bool) -> Coder:
    """DE8, with one scale per group."""

    def code(x: Rows) -> Rows:
        grouped = qtensor.split_groups(x, GROUP_SIZE)
        amax = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
        unit = grouped / jnp.where(amax > 0, amax, 1.0)
        return qtensor.join_groups(dynamic_exponent.nearest(unit, signed=signed) * amax, x.shape)

    return jax.jit(code)


def dynamic_stochastic(x: Rows, uniform: Rows) -> Rows:
    """Unsigned DE8 with one scale per group, rounded stochastically."""
    grouped, random = (qtensor.split_groups(a, GROUP_SIZE) for a in (x, uniform))
    amax = jnp.max(grouped, axis=-1, keepdims=True)
    unit = dynamic_exponent.at_random(grouped / jnp.where(amax > 0, amax, 1.0), random)
    return qtensor.join_groups(unit * amax, x.shape)


def dynamic_expanded(*, signed: bool) -> Coder:
    """Dynamic range expansion to DE8 instead of FP8."""
    tiny = dynamic_exponent.smallest(signed=signed)
    through = _through_power(Exponent(log2_range=-math.log2(tiny)), tiny)

    def to_de8(unit: Unit, k: Float[Array, "N G 1"]) -> Unit:
        del k
        return dynamic_exponent.nearest(unit, signed=signed)

    return jax.jit(lambda x: through(x, to_de8))


def _from_e4m3(codes: Float[Array, "N G K"]) -> Unit:
    return codes.astype(jnp.float32) / format_of(E4M3).max


def _through_power(rule: Exponent, tiny: float) -> Callable[[Rows, Callable[..., Unit]], Rows]:
    """Expands to [-1, 1], rounds there and comes back; what is not zero becomes `tiny` at least."""

    def code(x: Rows, round_unit: Callable[..., Unit]) -> Rows:
        grouped = qtensor.split_groups(x, GROUP_SIZE)
        magnitude = jnp.abs(grouped)
        k = rule(magnitude)[..., None]
        amax = jnp.max(magnitude, axis=-1, keepdims=True)
        log2_ratio = jnp.log2(magnitude) - jnp.log2(jnp.where(amax > 0, amax, 1.0))
        image = jnp.where(magnitude > 0, jnp.maximum(jnp.exp2(k * log2_ratio), tiny), 0.0)
        rounded = jnp.abs(round_unit(jnp.copysign(image, grouped), k))
        values = amax * jnp.exp2(jnp.log2(rounded) / k)
        return qtensor.join_groups(jnp.copysign(values, grouped), x.shape)

    return code
