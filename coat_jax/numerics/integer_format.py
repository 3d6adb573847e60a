"""Integers of 2 to 16 bits as a format, simulated in FP32, like the floats of `numerics.minifloat`.

    symmetric     codes -(2^(b - 1) - 1) .. 2^(b - 1) - 1,  x = scale code
    asymmetric    codes -2^(b - 1) .. 2^(b - 1) - 1,        x = scale (code - zero)

Symmetric codes leave out the most negative integer, so that the range is the same on both sides of
zero. The `zero` of asymmetric codes is itself a code, so that the number zero is exact;
`numerics.quantizer` chooses it together with the scale. (`numerics.integers` is something else: the
symmetric INT8 in groups in which optimizers store first moments.)
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from coat_jax.numerics.simulated_rounding import RoundingMode, require_mode, rounds_up

LEAST_BITS, MOST_BITS = 2, 16


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """A format.

    Attributes:
        bits: of a code, from 2 to 16.
        symmetric: whether the code 0 means zero, and the range is the same on both sides of it.
    """

    bits: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        whole = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        if not whole or not LEAST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(
                f"bits={self.bits!r} must be a whole number from {LEAST_BITS} to {MOST_BITS}."
            )

    @property
    def name(self) -> str:
        """The name that `integer_format` reads."""
        return f"INT{self.bits}" + ("" if self.symmetric else ":asymmetric")

    @property
    def max(self) -> float:
        """The largest code."""
        return 2.0 ** (self.bits - 1) - 1

    @property
    def full_scale(self) -> float:
        """The magnitude to which a scale maps the largest element."""
        return self.max

    @property
    def min(self) -> float:
        """The smallest code."""
        return -self.max - (not self.symmetric)

    @property
    def values(self) -> Float[np.ndarray, " codes"]:
        """All codes, ascending."""
        return np.arange(self.min, self.max + 1)

    def round(
        self,
        x: Float[Array, "..."],
        mode: RoundingMode = "nearest",
        noise: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Rounds to codes, in FP32. The derivative is 1, like that of a cast.

        The arguments are those of `Minifloat.round`.
        """
        require_mode(mode, noise)
        return _round(jnp.asarray(x, jnp.float32), noise, self, mode)


def integer_format(name: str) -> IntegerFormat:
    """The format with this name: "INT8", "INT4:asymmetric"."""
    found = re.fullmatch(r"INT(\d{1,2})(:ASYMMETRIC)?", name.upper())
    if found is None:
        raise ValueError(f"{name!r} does not name integers: write INT8, INT4 or INT4:asymmetric.")
    return IntegerFormat(int(found[1]), symmetric=found[2] is None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _round(
    x: Float[Array, "..."],
    noise: Float[Array, "..."] | None,
    fmt: IntegerFormat,
    mode: RoundingMode,
) -> Float[Array, "..."]:
    x = jnp.clip(x, fmt.min, fmt.max)
    magnitude = jnp.abs(x)
    whole = jnp.floor(magnitude)
    up = rounds_up(whole, magnitude - whole, mode, noise)
    return jnp.copysign(whole + up.astype(jnp.float32), x)


@_round.defjvp
def _round_jvp(
    fmt: IntegerFormat, mode: RoundingMode, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> Any:
    return _round(*primals, fmt, mode), tangents[0]
