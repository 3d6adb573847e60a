"""Small floating-point formats of any shape, simulated in FP32.

    code   sign | exponent field e | mantissa field m
    value  2^(e - bias) (1 + m / 2^M)            normal,     e > 0
           2^(1 - bias) m / 2^M                  subnormal,  e = 0

E and M are the numbers of bits of e and m. With E = 0 there are only subnormal numbers: integers,
in equal steps on both sides of zero, so that INT8 is E0M7. `Minifloat` lists the codes of a format
and rounds to their values: to nearest, or to either neighbour with probabilities that make the
result right on average. The results are in FP32, so any machine can simulate any format.
`numerics.quantizer` adds scales.

Rounding saturates: infinity becomes the largest value. NaN stays NaN, even if the format has none.
Magnitudes below 2^-126 count as zero, because XLA and GPUs flush them. Only formats with 8 exponent
bits have values that small.
"""

import dataclasses
import functools
import math
import re
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from coat_jax.validation import Between, require_fields

Specials = Literal["none", "nan", "ieee", "fnuz"]

SPECIALS: tuple[Specials, ...] = get_args(Specials)
MOST_EXPONENT_BITS, MOST_MANTISSA_BITS = 8, 15
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149  # of FP32
MOST_TOP_EXPONENT = 15  # of `Minifloat.full_scale`: that of E5M2
LIFT = 64  # binades by which numbers are moved towards 1 while they are rounded


class Place(NamedTuple):
    """Where magnitudes lie between the values of a format: (whole + fraction) * unit * back.

    Rounding replaces the fraction with 0 or 1.

    Attributes:
        whole: the value below, in units.
        fraction: of the distance to the next value.
        unit: that distance, moved towards 1 by `LIFT` binades.
        back: the factor that moves it back.
    """

    whole: Float[Array, "..."]
    fraction: Float[Array, "..."]
    unit: Float[Array, "..."]
    back: Float[Array, "..."]


@dataclasses.dataclass(frozen=True)
class Minifloat:
    """A format.

    Attributes:
        exponent_bits: E, from 0 to 8.
        mantissa_bits: M, from 0 to 15.
        signed: whether there is a sign bit. Without one, negative numbers become zero.
        subnormals: whether an exponent field of 0 stands for subnormal numbers. If not, it is one
            more binade of normal ones, of which the first code is zero.
        zero: whether there is a zero. Only formats without subnormals can lack it, as UE8M0 does.
        specials: which codes are not numbers: "none"; "nan": the largest code of each sign is NaN
            (OCP's E4M3); "ieee": the largest exponent field is infinity and NaN (E5M2, BF16);
            "fnuz": the negative zero is NaN.
        bias: of the exponent; None is 2^(E - 1) - 1, or 0 for E = 0.
    """

    exponent_bits: Annotated[int, Between(least=0, most=MOST_EXPONENT_BITS)]
    mantissa_bits: Annotated[int, Between(least=0, most=MOST_MANTISSA_BITS)]
    signed: bool = True
    subnormals: bool = True
    zero: bool = True
    specials: Specials = "none"
    bias: int | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        if self.bias is None:
            default = 2 ** (self.exponent_bits - 1) - 1 if self.exponent_bits else 0
            object.__setattr__(self, "bias", default)
        if self.exponent_bits == 0 and (not self.subnormals or self.specials == "ieee"):
            raise ValueError(
                "Without exponent bits all numbers are subnormal, and none are infinite: "
                'subnormals=True and specials="none" or "nan".'
            )
        if self.subnormals and not self.zero:
            raise ValueError("Subnormal numbers begin with zero: zero=False needs subnormals=False")
        if self.specials == "fnuz" and not self.signed:
            raise ValueError('specials="fnuz" makes the negative zero NaN: it needs signed=True.')
        finite = self.magnitudes
        if finite.size == 0 or finite[-1] == 0:
            raise ValueError(f"{self._shape()} has no code for any number but zero: add bits.")
        if finite[-1] > LARGEST or self.tiny < SMALLEST:
            raise ValueError(
                f"{self._shape()} with bias={self.bias} spans {self.tiny:.3g} to {finite[-1]:.3g}, "
                "beyond FP32, in which it is simulated. Choose another bias; with 8 exponent bits, "
                'specials="ieee" has the range of BF16.'
            )

    def _shape(self) -> str:
        return f"{'' if self.signed else 'U'}E{self.exponent_bits}M{self.mantissa_bits}"

    @property
    def name(self) -> str:
        """The name that `minifloat` reads: the bits, then what is unusual, as in "E4M3:none"."""
        usual = _usual(self.exponent_bits, self.mantissa_bits, self.signed)
        parts = [self._shape()]
        for field in ("subnormals", "zero"):
            if (own := getattr(self, field)) != getattr(usual, field):
                parts.append(field if own else f"no_{field}")
        if self.specials != usual.specials:
            parts.append(self.specials)
        if self.bias != usual.bias:
            parts.append(f"bias={self.bias}")
        return ":".join(parts)

    @property
    def bits(self) -> int:
        """The width of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def values(self) -> Float[np.ndarray, " codes"]:
        """The value of each code in FP64, NaN and infinities included."""
        return _values(self)

    @property
    def magnitudes(self) -> Float[np.ndarray, " n"]:
        """The finite values with sign +, ascending: the index of each is its code."""
        positive = self.values[: 1 << (self.exponent_bits + self.mantissa_bits)]
        return positive[np.isfinite(positive)]

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.magnitudes[-1])

    @property
    def full_scale(self) -> float:
        """The magnitude to which a scale maps the largest element: `max`, but below 2^16.

        The limit keeps products of codes, and scales, within FP32, even if the format has the same
        range as FP32.
        """
        return math.ldexp(self.max, min(0, MOST_TOP_EXPONENT + 1 - math.frexp(self.max)[1]))

    @property
    def tiny(self) -> float:
        """The smallest positive value."""
        magnitudes = self.magnitudes
        return float(magnitudes[magnitudes > 0][0])

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value; if E = 0, where they would begin."""
        assert self.bias is not None
        return 1 - self.bias if self.subnormals else -self.bias

    @property
    def container(self) -> Any:
        """The narrowest dtype of JAX's ordinary floats that holds all values: BF16 or FP32."""
        return jnp.bfloat16 if self.mantissa_bits <= 7 else jnp.float32

    @property
    def label(self) -> str:
        """The name for tables, which calls E0M7 by its usual name INT8."""
        integer = self.exponent_bits == 0 and self == Minifloat(0, self.mantissa_bits)
        return f"INT{self.bits}" if integer else self.name

    def round(
        self, x: Float[Array, "..."], noise: Float[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        """Rounds to values of the format, in FP32. The derivative is 1, like that of a cast.

        Args:
            x: what to round.
            noise: uniform in [0, 1), of the shape of `x`, for stochastic rounding. Without it, `x`
                is rounded to nearest, with ties to even (with M = 0 to the larger value).
        """
        return _round(jnp.asarray(x, jnp.float32), noise, self)

    def place(self, x: Float[Array, "..."]) -> Place:
        """The values that the magnitudes of `x`, in FP32, lie between; they saturate."""
        magnitude = jnp.minimum(jnp.abs(x), self.max)
        # Moved towards 1, so that units in the last place and their reciprocals are normal numbers.
        small = magnitude < 1
        moved = magnitude * jnp.where(small, 2.0**LIFT, 2.0**-LIFT)
        by = jnp.where(small, LIFT, -LIFT)
        exponent = (jax.lax.bitcast_convert_type(moved, jnp.int32) >> 23) - 127
        exponent = jnp.maximum(exponent, self.min_exponent + by)
        scaled = moved * _power(self.mantissa_bits - exponent)
        unit = _power(exponent - self.mantissa_bits)
        # Below the smallest value, that value is the unit. (A subnormal one is the unit anyway.)
        least = jnp.where(small, self.tiny * 2.0**LIFT, self.tiny * 2.0**-LIFT).astype(jnp.float32)
        below_least = moved < least
        scaled = jnp.where(below_least, moved / least, scaled)
        unit = jnp.where(below_least, least, unit)
        whole = jnp.floor(scaled)
        return Place(whole, scaled - whole, unit, jnp.where(small, 2.0**-LIFT, 2.0**LIFT))


def minifloat(name: str) -> Minifloat:
    """The format with this name: "E4M3", "UE8M0", "E3M4:ieee", "E4M3:fnuz:bias=11".

    Without suffixes a name means what OCP, IEEE and NVIDIA mean by it: E4M3 has a NaN; E5M2, E5M10
    (FP16) and all formats with 8 exponent bits, such as E8M7 (BF16), have infinities; UE8M0 has no
    zero. The others use all codes for numbers.
    """
    shape, *settings = name.upper().split(":") if isinstance(name, str) else [""]
    found = re.fullmatch(r"(U?)E(\d)M(\d{1,2})", shape)
    if found is None:
        raise ValueError(
            f"{name!r} does not name a small float: write E and M, each with its number of bits, "
            "as in E4M3, UE8M0 or E3M4:ieee."
        )
    fmt = _usual(int(found[2]), int(found[3]), not found[1])
    for setting in map(str.lower, settings):
        if setting in SPECIALS:
            fmt = dataclasses.replace(fmt, specials=setting)
        elif bias := re.fullmatch(r"bias=(-?\d{1,3})", setting):
            fmt = dataclasses.replace(fmt, bias=int(bias[1]))
        elif (field := setting.removeprefix("no_")) in ("subnormals", "zero"):
            changed: dict[str, Any] = {field: field == setting}
            fmt = dataclasses.replace(fmt, **changed)
        else:
            known = ", ".join((*SPECIALS, "no_subnormals", "no_zero", "bias=N"))
            raise ValueError(f"{name!r} has the suffix {setting!r}; it must be one of {known}.")
    return fmt


def names_of_simulated(mantissa_bits: int) -> str:
    """What to write for a format of up to this many mantissa bits; for errors."""
    return (
        f"a name like 'E3M4', with up to {MOST_EXPONENT_BITS} exponent and {mantissa_bits} "
        "mantissa bits (symmetric integers of b bits are E0M(b-1): INT8 is 'E0M7', INT4 is 'E0M3')"
    )


# --- Parts -----------------------------------------------------------------------------------


@functools.cache
def _usual(exponent_bits: int, mantissa_bits: int, signed: bool) -> Minifloat:
    """The format that a name without suffixes means."""
    if (exponent_bits, mantissa_bits, signed) == (8, 0, False):
        return Minifloat(8, 0, signed=False, subnormals=False, zero=False, specials="nan")
    specials: Specials = "none"
    if exponent_bits == 8 or (exponent_bits, mantissa_bits) in ((5, 2), (5, 10)):
        specials = "ieee"
    elif (exponent_bits, mantissa_bits) == (4, 3):
        specials = "nan"
    return Minifloat(exponent_bits, mantissa_bits, signed, specials=specials)


@functools.cache
def _values(fmt: Minifloat) -> Float[np.ndarray, " codes"]:
    assert fmt.bias is not None
    e, m = np.divmod(np.arange(1 << (fmt.exponent_bits + fmt.mantissa_bits)), 2**fmt.mantissa_bits)
    fraction = m / 2.0**fmt.mantissa_bits
    positive = np.ldexp(1 + fraction, e - fmt.bias)
    if fmt.subnormals:
        positive = np.where(e == 0, np.ldexp(fraction, 1 - fmt.bias), positive)
    if fmt.zero:
        positive[0] = 0.0
    if fmt.specials == "nan":
        positive[-1] = np.nan
    elif fmt.specials == "ieee":
        top = e == e[-1]
        positive[top] = np.where(m[top] == 0, np.inf, np.nan)
    values = np.concatenate([positive, -positive]) if fmt.signed else positive
    if fmt.specials == "fnuz":
        values[len(positive)] = np.nan
    values.flags.writeable = False
    return values


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _round(
    x: Float[Array, "..."], noise: Float[Array, "..."] | None, fmt: Minifloat
) -> Float[Array, "..."]:
    whole, fraction, unit, back = fmt.place(x)
    if noise is None:
        up = (fraction > 0.5) | ((fraction == 0.5) & (whole % 2 == 1))
    else:
        up = noise < fraction
    rounded = (whole + up.astype(jnp.float32)) * unit * back
    if not fmt.signed:
        rounded = jnp.where(x < 0, 0.0, rounded)
    if not fmt.zero:
        rounded = jnp.maximum(rounded, fmt.tiny)
    return jnp.copysign(rounded, x) if fmt.signed else rounded


@_round.defjvp
def _round_jvp(fmt: Minifloat, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    return _round(*primals, fmt), tangents[0]


def _power(exponent: Array) -> Float[Array, "..."]:
    """2^exponent, a normal number of FP32."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
