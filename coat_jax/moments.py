"""How an optimizer stores its moments: which leaves in expanded FP8, and how they are rounded.

The rule, which looks at a leaf's own shape and at nothing else, so that no mesh changes it:

    FP8    leaves of at least `min_size` elements whose last axis has at least 16
    FP32   all others (norms, biases, narrow tables), where FP8 would save next to nothing

Both are stored in the same three arrays, so that the tree has one shape whatever the rule
says. An FP32 leaf keeps its values in `codes`; its `amax` and `k16` mean nothing.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import expansion
from coat_jax.expansion import Expanded
from coat_jax.formats import E4M3, format_of
from coat_jax.qtensor import scales_shape

MIN_COLUMNS = 16
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Storage:
    """The format of an optimizer's moments.

    Attributes:
        first: FP8 format of the first moment.
        second: FP8 format of the second moment.
        group_size: neighbours along the last axis that share a scale and an exponent.
        min_size: leaves with fewer elements stay in FP32.
        stochastic: whether the second moment is rounded stochastically. Rounded to nearest it
            freezes at b2 = 0.999: one step's decay is less than half a code.
        seed: of the stochastic rounding.
    """

    first: DTypeLike = E4M3
    second: DTypeLike = E4M3
    group_size: int = expansion.GROUP_SIZE
    min_size: int = 16384
    stochastic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        format_of(self.first)
        format_of(self.second)
        if not isinstance(self.group_size, int) or self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size!r} must be one of {GROUP_SIZES}.")
        for name in ("min_size", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number, zero or more.")

    def holds_in_fp8(self, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of this shape is stored in FP8; see the rule above."""
        if self.min_size == 0:
            return True
        return math.prod(shape) >= self.min_size and (shape or (1,))[-1] >= MIN_COLUMNS

    def read(self, stored: Expanded) -> Float[Array, "..."]:
        """The FP32 values of one leaf."""
        if stored.codes.dtype == jnp.float32:
            return stored.codes
        return expansion.decode(stored, group_size=self.group_size)

    def write(
        self,
        values: Float[Array, "..."],
        dtype: DTypeLike,
        noise: Float[Array, "..."] | None = None,
    ) -> Expanded:
        """Stores one leaf, rounded stochastically where noise is given."""
        if not self.holds_in_fp8(values.shape):
            shape = scales_shape(values.shape, self.group_size)
            unused = jnp.zeros(shape, jnp.float32), jnp.full(shape, expansion.STEPS, jnp.uint8)
            return Expanded(values.astype(jnp.float32), *unused)
        return expansion.encode(values, dtype, group_size=self.group_size, noise=noise)
