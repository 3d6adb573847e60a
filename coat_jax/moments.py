"""How an optimizer stores its moments: which leaves in expanded FP8, and how they are rounded.

The rule, which looks at a leaf's own shape and at nothing else, so that no mesh changes it:

    FP8    leaves of at least `min_size` elements whose last axis has at least 16
    FP32   all others (norms, biases, narrow tables), where FP8 would save next to nothing

Both are stored in the same three arrays, so that the tree has one structure whatever the rule
says. An FP32 leaf has its values in `codes`. Its `amax` and `k16` mean nothing and are tiny:
of the parameter's rank and divisible like it, so that its sharding fits, but a few bytes.
(They are not empty, because orbax refuses to save empty arrays.)

Adam's moments are rounded differently. The second is rounded stochastically. The first moves by
a tenth per step at b1 = 0.9 and is rounded to nearest, with half the error, except for its smallest
codes (`expansion.encode_dithered`): rounded to nearest there, an element whose gradient has
become zero would keep its momentum for ever. With a slower decay all codes would stand still like
that, so the first moment is then rounded stochastically, too.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, UInt32

from coat_jax import expansion, noise
from coat_jax.expansion import Expanded, Rounding
from coat_jax.formats import E4M3, format_of
from coat_jax.qtensor import join_groups, scales_shape, split_groups

MIN_COLUMNS = 16
# In units of the last place, what a code must lose per step to be rounded to nearest: half of it
# is rounded away.
MIN_DECAY = 0.75
DIVISIBLE_BY = 8  # devices along one axis, for the unused scales of an FP32 leaf
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Storage:
    """The format of an optimizer's moments.

    Attributes:
        first: FP8 format of the first moment.
        second: FP8 format of the second moment.
        group_size: neighbours along the last axis that share a scale and an exponent.
        min_size: leaves with fewer elements stay in FP32.
        stochastic: whether moments are rounded stochastically, as above. Rounded to nearest they
            freeze: at b2 = 0.999 one step's decay is less than half a code.
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

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of `amax` and `k16` of a leaf."""
        scales = scales_shape(shape, self.group_size)
        if self.holds_in_fp8(shape):
            return scales
        return tuple(math.gcd(size, DIVISIBLE_BY) if size else 0 for size in scales)

    def read(self, stored: Expanded) -> Float[Array, "..."]:
        """The FP32 values of one leaf."""
        if stored.codes.dtype == jnp.float32:
            return stored.codes
        return expansion.decode(stored, group_size=self.group_size)

    def write(
        self,
        values: Float[Array, "..."],
        dtype: DTypeLike,
        key: UInt32[Array, ""] | None = None,
        *,
        never_zero: Bool[ArrayLike, "*rows #G 1"] | bool = False,
    ) -> Expanded:
        """Stores one leaf.

        Args:
            values: the leaf.
            dtype: its FP8 format.
            key: of `coat_jax.noise`: rounds stochastically, so that what is read is right on
                average. Without a key, or with `stochastic=False`, rounds to nearest.
            never_zero: see `expansion.encode`: for leaves that a transformation divides by.
        """
        if not self.holds_in_fp8(values.shape):
            return self._in_fp32(values)
        dither = None
        if key is not None and self.stochastic:
            dither = noise.uniform(key, values.shape, run=self.group_size)
        return expansion.encode(
            values, dtype, group_size=self.group_size, noise=dither, never_zero=never_zero
        )

    def write_moments(
        self,
        m: Float[Array, "..."],
        v: Float[Array, "..."],
        key: UInt32[Array, ""],
        b1: float | Array,
    ) -> tuple[Expanded, Expanded]:
        """Stores both moments of Adam, as described above."""
        if not self.holds_in_fp8(m.shape):
            return self._in_fp32(m), self._in_fp32(v)
        size = self.group_size
        if not self.stochastic:
            mu = expansion.encode(m, self.first, group_size=size)
            return mu, expansion.encode(v, self.second, group_size=size)
        for_v, for_m = noise.uniform_pair(key, v.shape, run=size)
        nu = expansion.encode(v, self.second, group_size=size, noise=for_v)
        if self.rounding_of_first(b1) == "dithered":
            return expansion.encode_dithered(m, self.first, for_m, group_size=size), nu
        mu = expansion.encode(m, self.first, group_size=size, noise=for_m)
        if isinstance(b1, jax.Array):
            dithered = expansion.encode_dithered(m, self.first, for_m, group_size=size)
            mu = jax.tree.map(lambda a, b: jnp.where(self._decays_fast(b1), a, b), dithered, mu)
        return mu, nu

    def rounding_of_first(self, b1: float | Array) -> Rounding:
        """How a first moment is rounded that decays by b1.

        A b1 that is computed in the program counts as a slow one here. Through XLA its value
        decides when the program runs; the Triton kernel rounds stochastically, right for any b1.
        """
        if not self.stochastic:
            return "nearest"
        if isinstance(b1, jax.Array):
            return "stochastic"
        return "dithered" if self._decays_fast(b1) else "stochastic"

    def _decays_fast(self, b1: float | Array) -> bool | Array:
        """Whether every normal code decays by itself when it is rounded to nearest.

        The one that loses the smallest part of its distance to the next is the second of a binade.
        """
        return (2 ** format_of(self.first).mantissa_bits + 1) * (1 - b1) >= MIN_DECAY

    def rounding_of_second(self) -> Rounding:
        """How a second moment is rounded."""
        return "stochastic" if self.stochastic else "nearest"

    def smallest_second(self, stored: Expanded) -> Float[Array, "..."]:
        """Per element of a second moment, the smallest non-zero that its group could hold."""
        if stored.codes.dtype == jnp.float32:
            return jnp.zeros([], jnp.float32)
        smallest = stored.amax * expansion.resolution(stored.codes.dtype, self.rounding_of_second())
        groups = split_groups(stored.codes, self.group_size).shape
        per_element = jnp.broadcast_to(smallest.reshape(groups[:-1])[..., None], groups)
        return join_groups(per_element, stored.codes.shape)

    def _in_fp32(self, values: Float[Array, "..."]) -> Expanded:
        shape = self.scales_shape(values.shape)
        unused = jnp.zeros(shape, jnp.float32), jnp.full(shape, expansion.STEPS, jnp.uint8)
        return Expanded(values.astype(jnp.float32), *unused)
