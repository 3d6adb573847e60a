"""Quantization to any small format: which elements share a scale, and how it is computed.

    codes = round(x / scale) + zero,    scale = (high - low) / (range of the codes)
    x     ~ scale (codes - zero)        zero = 0, except for asymmetric integers

    over         which elements share a scale
    "tensor"     all elements
    "channel"    those with the same index along `axis`
    "group"      `size` neighbours along the last axis (`numerics.qtensor`)
    "block"      the same, with the next larger power of two as the scale (`numerics.blocks`)

    fit          low and high
    "max"        the smallest and the largest element: nothing saturates
    "percentile" the same without the outermost elements
    "mse"        "max" times the factor that has the least squared error, found by search

low and high can also be given, for example as parameters that are learnt: `quantize` has gradients
for them. For signed formats -low = high is the largest magnitude. Results are rounded values, not
codes: the quantizer is a simulation, for studies and for quantization-aware training.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from coat_jax.numerics.integer_format import IntegerFormat, integer_format
from coat_jax.numerics.minifloat import Minifloat, minifloat
from coat_jax.numerics.qtensor import (
    join_groups,
    require_float,
    require_group_size,
    split_groups,
)
from coat_jax.numerics.simulated_rounding import ROUNDING_MODES, RoundingMode

AnyFormat = Minifloat | IntegerFormat
Over = Literal["tensor", "channel", "group", "block"]
Fit = Literal["max", "percentile", "mse"]

GRANULARITIES: tuple[Over, ...] = ("tensor", "channel", "group", "block")
FITS: tuple[Fit, ...] = ("max", "percentile", "mse")
# "mse" tries factors of the range of "max", in two rounds: from 1 down to 2^-8 in steps of 2^(1/8),
# then in steps of 2^(1/64) from the lower to the upper neighbour of the best one.
COARSE = 2.0 ** (-np.arange(65) / 8)
FINE = 2.0 ** (np.arange(-8, 9) / 64)
SLACK = 1 + 2.0**-20  # for rounding errors of x / scale


class Range(NamedTuple):
    """The numbers that codes cover, one `low` and one `high` per scale."""

    low: Float[Array, "*scales"]
    high: Float[Array, "*scales"]


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How arrays are quantized.

    Attributes:
        format: the format of the codes, or its name, as in "E4M3", "INT8" or "INT4:asymmetric".
        over: which elements share a scale; see above.
        fit: how the range is computed; see above.
        size: elements of a group or block.
        axis: of channels. A weight [inputs, outputs] has its output channels along -1.
        percentile: for "percentile": how many of 100 magnitudes are within the range.
        rounding: "nearest", "stochastic" or "truncate".
    """

    format: AnyFormat
    over: Over = "tensor"
    fit: Fit = "max"
    size: int = 128
    axis: int = -1
    percentile: float = 99.9
    rounding: RoundingMode = "nearest"

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            object.__setattr__(self, "format", format_named(self.format))
        if not isinstance(self.format, AnyFormat):
            raise TypeError(
                f"format={self.format!r} must be a Minifloat, an IntegerFormat or the name of "
                "one, such as 'E4M3' or 'INT8'."
            )
        choices = (("over", GRANULARITIES), ("fit", FITS), ("rounding", ROUNDING_MODES))
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}.")
        require_group_size(self.size, "size")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile={self.percentile!r} must be above 50, and 100 at most.")

    def __call__(
        self, x: Float[Array, "*shape"], noise: Float[Array, "*shape"] | None = None
    ) -> Float[Array, "*shape"]:
        """Quantizes with the range that fits `x`; the gradient is straight-through."""
        found = jax.tree.map(jax.lax.stop_gradient, self.range_of(x))
        return self.quantize(x, found, noise)

    def range_of(self, x: Float[Array, "*shape"]) -> Range:
        """The range that fits `x`, of shape [scales].

        A range that is not finite is an error, except under `jit`, where it is returned. XLA's
        maximum on CPUs may lose a NaN, and "percentile" may leave out an infinity.
        """
        rows, known = self._rows(x)
        magnitudes = jnp.where(known, jnp.abs(rows), 0.0)
        if self._one_sided():
            low, high = jnp.min(rows, axis=-1), jnp.max(rows, axis=-1)
            low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
        else:
            high = jnp.max(magnitudes, axis=-1)
            low = -high
        if self.fit == "percentile":
            return self._percentiles(rows, known)
        if self.fit == "mse":
            return self._least_error(rows, Range(low, high))
        return _checked(Range(low, high))

    def quantize(
        self,
        x: Float[Array, "*shape"],
        covered: Range,
        noise: Float[Array, "*shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Rounds `x` to codes over a range, and returns their values, in the dtype of `x`.

        The gradient is 1 for elements within the range and 0 for saturated ones. The gradient for
        the range is that of LSQ (arXiv 1902.08153), as if power-of-two scales were not rounded.

        Args:
            x: what to quantize.
            covered: the range: from `range_of`, or parameters of the same shapes.
            noise: uniform in [0, 1), for stochastic rounding.
        """
        x = jnp.asarray(x)  # NumPy's FP64 becomes FP32
        rows, _ = self._rows(x)
        shape = (rows.shape[0],)
        if jnp.shape(covered.low) != shape or jnp.shape(covered.high) != shape:
            raise ValueError(
                f"The range has shapes {jnp.shape(covered.low)} and {jnp.shape(covered.high)}; "
                f"over {self.over!r} an array of shape {x.shape} has {shape[0]} scales."
            )
        dither = None if noise is None else self._rows(noise)[0]
        values = self._values(rows, _checked(covered), dither)
        return self._joined(values, x.shape).astype(x.dtype)

    # --- Parts -------------------------------------------------------------------------------

    def _one_sided(self) -> bool:
        return isinstance(self.format, IntegerFormat) and not self.format.symmetric

    def _rows(self, x: Float[Array, "*shape"]) -> tuple[Float[Array, "R K"], Bool[Array, "R K"]]:
        """The elements that share a scale as rows, and which elements of the rows are not padding.

        A short last group is padded with zeros.
        """
        require_float("x", x.dtype)
        if x.size == 0:
            raise ValueError(f"An array of shape {x.shape} has no elements, and so no range.")
        x = x.astype(jnp.float32)
        if self.over == "tensor":
            rows = x.reshape(1, -1)
        elif self.over == "channel":
            self._require_axis(x)
            rows = jnp.moveaxis(x, self.axis, 0).reshape(x.shape[self.axis], -1)
        else:
            grouped = split_groups(x, self.size)
            there = split_groups(jnp.ones(x.shape, jnp.float32), self.size)
            by_row = (-1, grouped.shape[-1])
            return grouped.reshape(by_row), there.reshape(by_row) > 0
        return rows, jnp.ones(rows.shape, bool)

    def _require_axis(self, x: Array) -> None:
        if not -x.ndim <= self.axis < x.ndim:
            raise ValueError(f"axis={self.axis} is not an axis of an array of shape {x.shape}.")

    def _joined(self, rows: Float[Array, "R K"], shape: tuple[int, ...]) -> Array:
        """The inverse of `_rows`."""
        if self.over == "tensor":
            return rows.reshape(shape)
        if self.over == "channel":
            axis = self.axis % len(shape)
            rest = shape[:axis] + shape[axis + 1 :]
            return jnp.moveaxis(rows.reshape(shape[axis], *rest), 0, axis)
        return join_groups(rows.reshape(*shape[:-1], -1, rows.shape[-1]), shape)

    def _percentiles(self, rows: Float[Array, "R K"], known: Bool[Array, "R K"]) -> Range:
        """The range without the outermost elements; NaN in a row makes its range NaN."""
        q = self.percentile / 100
        lost = jnp.any(jnp.isnan(rows), axis=-1)
        rows = jnp.where(known, rows, jnp.nan)  # nanquantile then leaves out the padding
        if self._one_sided():
            tails = jnp.nanquantile(rows, jnp.array([1 - q, q]), axis=-1)
            low, high = jnp.minimum(tails[0], 0.0), jnp.maximum(tails[1], 0.0)
        else:
            high = jnp.nanquantile(jnp.abs(rows), q, axis=-1)
            low = -high
        return _checked(Range(*(jnp.where(lost, jnp.nan, end) for end in (low, high))))

    def _least_error(self, rows: Float[Array, "R K"], widest: Range) -> Range:
        """The widest range times the factor that has the least squared error."""
        unit = jnp.maximum(-widest.low, widest.high)
        unit = jnp.where(unit > 0, unit, 1.0)[:, None]  # squares of small numbers would underflow

        def errors(shares: Float[Array, " R"]) -> Float[Array, " R"]:
            values = self._values(rows, _part(widest, shares), None, "nearest")
            return jnp.sum(jnp.square((values - rows) / unit), axis=-1)

        best = _least(errors, jnp.ones(rows.shape[0], jnp.float32), COARSE)
        best = _least(errors, best, FINE)
        return _checked(_part(widest, jnp.minimum(best, 1.0)))

    def _values(
        self,
        rows: Float[Array, "R K"],
        covered: Range,
        noise: Float[Array, "R K"] | None,
        mode: RoundingMode | None = None,
    ) -> Float[Array, "R K"]:
        """The rounded values of rows."""
        mode = self.rounding if mode is None else mode
        fmt = self.format
        low, high = (end[:, None] for end in covered)
        if not self._one_sided():
            scale = self._scale(jnp.maximum(-low, high) / fmt.full_scale)
            return fmt.round(_within(rows / scale, fmt.full_scale), mode, noise) * scale
        assert isinstance(fmt, IntegerFormat)
        scale = self._scale((high - low) / (fmt.max - fmt.min))
        zero = jax.lax.stop_gradient(jnp.clip(jnp.round(fmt.min - low / scale), fmt.min, fmt.max))
        # Clipped before rounding: saturated values then have gradients for the ends of the range,
        # even if these are not exactly codes.
        inside = jnp.clip(rows / scale + zero, fmt.min, fmt.max)
        return (fmt.round(inside, mode, noise) - zero) * scale

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


def format_named(name: str) -> AnyFormat:
    """The format with this name: "E4M3", "INT8"; see `minifloat` and `integer_format`."""
    if name.upper().startswith("INT"):
        return integer_format(name)
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


def _checked(covered: Range) -> Range:
    """Raises if a range is empty or not finite, unless it is traced: its values are unknown."""
    ends = tuple(covered)
    if any(isinstance(end, jax.core.Tracer) for end in ends):
        return covered
    low, high = (np.asarray(end) for end in ends)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError("The range is not finite: the array has a NaN or an infinity.")
    if (low > high).any():
        first = np.flatnonzero(low > high)[0]
        raise ValueError(f"The range from {low[first]} to {high[first]} is empty.")
    return Range(*(jnp.asarray(end, jnp.float32) for end in ends))


def _within(x: Float[Array, "..."], limit: float) -> Float[Array, "..."]:
    """`x` clipped; the derivative is 1 up to the limit, with some slack for rounding errors."""
    return jnp.where(jnp.abs(x) <= limit * SLACK, x, jnp.copysign(limit, x))


def _part(widest: Range, shares: Float[Array, " R"]) -> Range:
    return Range(widest.low * shares, widest.high * shares)


def _least(
    errors: Callable[[Array], Array], start: Float[Array, " R"], factors: np.ndarray
) -> Float[Array, " R"]:
    """For each row, the start times the factor with the least error; the first one in a tie."""
    tried = jax.lax.map(lambda factor: errors(start * factor), jnp.asarray(factors, jnp.float32))
    return start * jnp.asarray(factors, jnp.float32)[jnp.argmin(tried, axis=0)]
