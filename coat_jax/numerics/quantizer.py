"""Quantization to any small format: which elements share a scale, and how it is computed.

    codes = round(x / scale),    scale = limit / (largest code),    x ~ scale codes

    over         which elements share a scale
    "tensor"     all elements
    "channel"    those with the same index along `axis`
    "group"      `size` neighbours along the last axis (`numerics.groups`)
    "block"      the same, with the next larger power of two as the scale (`numerics.blocks`)

    fit          limit, the largest magnitude that has a code
    "max"        that of the largest element: nothing saturates
    "percentile" the same without the largest elements
    "mse"        "max" times the factor that has the least squared error, found by search

The limit can also be given, for example as a parameter that is learnt: `quantize` has gradients for
it. Results are rounded values, not codes: the quantizer is a simulation, for studies and for
quantization-aware training.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from coat_jax.numerics.groups import join_groups, split_groups, to_groups
from coat_jax.numerics.minifloat import MOST_MANTISSA_BITS, Minifloat, minifloat
from coat_jax.validation import Between, require_fields

Over = Literal["tensor", "channel", "group", "block"]
Fit = Literal["max", "percentile", "mse"]

GRANULARITIES: tuple[Over, ...] = ("tensor", "channel", "group", "block")
FITS: tuple[Fit, ...] = ("max", "percentile", "mse")
# "mse" tries factors of the limit of "max", in two rounds: from 1 down to 2^-8 in steps of 2^(1/8),
# then in steps of 2^(1/64) from the lower to the upper neighbour of the best one.
COARSE = 2.0 ** (-np.arange(65) / 8)
FINE = 2.0 ** (np.arange(-8, 9) / 64)
SLACK = 1 + 2.0**-20  # for rounding errors of x / scale


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How arrays are quantized.

    Attributes:
        format: the format of the codes, or its name, as in "E4M3" or "INT8".
        over: which elements share a scale; see above.
        fit: how the limit is computed; see above.
        size: elements of a group or block.
        axis: of channels. A weight [inputs, outputs] has its output channels along -1.
        percentile: for "percentile": how many of 100 magnitudes are within the limit.
    """

    format: Minifloat
    over: Over = "tensor"
    fit: Fit = "max"
    size: Annotated[int, Between(least=1)] = 128
    axis: int = -1
    percentile: Annotated[float, Between(above=50, most=100)] = 99.9

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            object.__setattr__(self, "format", format_named(self.format))
        require_fields(self)

    def __call__(
        self, x: Float[Array, "*shape"], noise: Float[Array, "*shape"] | None = None
    ) -> Float[Array, "*shape"]:
        """Quantizes with the limit that fits `x`; the gradient is straight-through."""
        return self.quantize(x, jax.lax.stop_gradient(self.limit_of(x)), noise)

    def limit_of(self, x: Float[Array, "*shape"]) -> Float[Array, " scales"]:
        """The limit that fits `x`.

        A limit that is not finite is an error, except under `jit`, where it is returned. XLA's
        maximum on CPUs may lose a NaN, and "percentile" may leave out an infinity.
        """
        rows, known = self._rows(x)
        limit = jnp.max(jnp.where(known, jnp.abs(rows), 0.0), axis=-1)
        if self.fit == "percentile":
            lost = jnp.any(jnp.isnan(rows), axis=-1)
            magnitudes = jnp.where(known, jnp.abs(rows), jnp.nan)  # nanquantile leaves out padding
            limit = jnp.nanquantile(magnitudes, self.percentile / 100, axis=-1)
            limit = jnp.where(lost, jnp.nan, limit)
        elif self.fit == "mse":
            limit = self._least_error(rows, limit)
        return _checked(limit)

    def quantize(
        self,
        x: Float[Array, "*shape"],
        limit: Float[Array, " scales"],
        noise: Float[Array, "*shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Rounds `x` to codes up to a limit, and returns their values, in the dtype of `x`.

        The gradient is 1 for elements within the limit and 0 for saturated ones. The gradient for
        the limit is that of LSQ (arXiv 1902.08153), as if power-of-two scales were not rounded.

        Args:
            x: what to quantize.
            limit: the largest magnitude that has a code: from `limit_of`, or a parameter.
            noise: uniform in [0, 1), for stochastic rounding; without it, rounds to nearest.
        """
        x = jnp.asarray(x)  # NumPy's FP64 becomes FP32
        rows, _ = self._rows(x)
        if jnp.shape(limit) != rows.shape[:1]:
            raise ValueError(
                f"The limit has shape {jnp.shape(limit)}; over {self.over!r} an array of shape "
                f"{x.shape} has {rows.shape[0]} scales."
            )
        dither = None if noise is None else self._rows(noise)[0]
        values = self._values(rows, _checked(limit), dither)
        return self._joined(values, x.shape).astype(x.dtype)

    # --- Parts -------------------------------------------------------------------------------

    def _rows(self, x: Float[Array, "*shape"]) -> tuple[Float[Array, "R K"], Bool[Array, "R K"]]:
        """The elements that share a scale as rows, and which elements of the rows are not padding.

        A short last group is padded with zeros.
        """
        if x.size == 0:
            raise ValueError(f"An array of shape {x.shape} has no elements, and so no range.")
        size = self.size
        if self.over == "tensor":
            x, size = x.reshape(-1), x.size
        elif self.over == "channel":
            if not -x.ndim <= self.axis < x.ndim:
                raise ValueError(f"axis={self.axis} is not an axis of an array of shape {x.shape}.")
            x = jnp.moveaxis(x, self.axis, 0).reshape(x.shape[self.axis], -1)
            size = x.shape[-1]
        grouped = to_groups(x, size)
        there = split_groups(jnp.ones(x.shape, jnp.float32), size)
        by_row = (-1, grouped.shape[-1])
        return grouped.reshape(by_row), there.reshape(by_row) > 0

    def _joined(self, rows: Float[Array, "R K"], shape: tuple[int, ...]) -> Array:
        """The inverse of `_rows`."""
        if self.over == "tensor":
            return rows.reshape(shape)
        if self.over == "channel":
            axis = self.axis % len(shape)
            rest = shape[:axis] + shape[axis + 1 :]
            return jnp.moveaxis(rows.reshape(shape[axis], *rest), 0, axis)
        return join_groups(rows.reshape(*shape[:-1], -1, rows.shape[-1]), shape)

    def _least_error(
        self, rows: Float[Array, "R K"], widest: Float[Array, " R"]
    ) -> Float[Array, " R"]:
        """The widest limit times the factor that has the least squared error."""
        # In units of the widest, because squares of small numbers would underflow.
        unit = jnp.where(widest > 0, widest, 1.0)[:, None]

        def errors(shares: Float[Array, " R"]) -> Float[Array, " R"]:
            values = self._values(rows, widest * shares, None)
            return jnp.sum(jnp.square((values - rows) / unit), axis=-1)

        best = _least(errors, jnp.ones(rows.shape[0], jnp.float32), COARSE)
        best = _least(errors, best, FINE)
        return widest * jnp.minimum(best, 1.0)

    def _values(
        self,
        rows: Float[Array, "R K"],
        limit: Float[Array, " R"],
        noise: Float[Array, "R K"] | None,
    ) -> Float[Array, "R K"]:
        """The rounded values of rows."""
        largest = self.format.full_scale
        scale = self._scale(limit[:, None] / largest)
        return self.format.round(_within(rows / scale, largest), noise) * scale

    def _scale(self, exact: Float[Array, "R 1"]) -> Float[Array, "R 1"]:
        """The scale: for blocks the next power of two; 1 where all elements are zero."""
        exact = jnp.where(exact == 0, 1.0, exact)
        if self.over != "block":
            return exact
        exact_bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(exact), jnp.int32)
        bits = (exact_bits + np.int32(0x7F_FFFF)) & np.int32(0x7F80_0000)
        power = jax.lax.bitcast_convert_type(bits, jnp.float32)
        # The gradient is that of the exact scale, while the value is exactly a power of two.
        return power + (exact - jax.lax.stop_gradient(exact))


def format_named(name: str) -> Minifloat:
    """The format with this name: "E4M3", or "INT8" for E0M7; see `minifloat`."""
    if found := re.fullmatch(r"INT(\d{1,2})", name.upper()):
        bits = int(found[1])
        if not 2 <= bits <= MOST_MANTISSA_BITS + 1:
            raise ValueError(f"{name!r} must have from 2 to {MOST_MANTISSA_BITS + 1} bits.")
        return Minifloat(0, bits - 1)
    return minifloat(name)


def sqnr_bits(x: Float[Array, "..."], values: Float[Array, "..."]) -> Float[Array, ""]:
    """The number of bits that are right: log2 of the rms of `x` divided by the rms of the error.

    Infinite if there is no error. One bit is 6.02 dB.
    """
    if x.shape != values.shape:
        raise ValueError(
            f"sqnr_bits compares arrays of one shape, not {x.shape} and {values.shape}."
        )
    x, values = x.astype(jnp.float32), values.astype(jnp.float32)
    unit = jnp.max(jnp.abs(x), initial=0.0)
    unit = jnp.where(unit > 0, unit, 1.0)
    signal = jnp.sum(jnp.square(x / unit))
    return 0.5 * jnp.log2(signal / jnp.sum(jnp.square((values - x) / unit)))


def _checked(limit: Float[Array, " scales"]) -> Float[Array, " scales"]:
    """Raises if a limit is negative or not finite, unless it is traced: its value is unknown."""
    if isinstance(limit, jax.core.Tracer):
        return limit
    if not np.isfinite(limit).all():
        raise ValueError("The limit is not finite: the array has a NaN or an infinity.")
    if (np.asarray(limit) < 0).any():
        raise ValueError(f"A limit of {np.min(limit)} is negative.")
    return jnp.asarray(limit, jnp.float32)


def _within(x: Float[Array, "..."], limit: float) -> Float[Array, "..."]:
    """`x` clipped; the derivative is 1 up to the limit, with some slack for rounding errors."""
    return jnp.where(jnp.abs(x) <= limit * SLACK, x, jnp.copysign(limit, x))


def _least(
    errors: Callable[[Array], Array], start: Float[Array, " R"], factors: np.ndarray
) -> Float[Array, " R"]:
    """For each row, the start times the factor with the least error; the first one in a tie."""
    tried = jax.lax.map(lambda factor: errors(start * factor), jnp.asarray(factors, jnp.float32))
    return start * jnp.asarray(factors, jnp.float32)[jnp.argmin(tried, axis=0)]
