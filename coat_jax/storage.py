"""How an optimizer stores its moments: which leaves in 8 bits, and in which formats.

    8 bits    leaves of at least `min_size` elements whose last axis has at least 16
    FP32      all others (norms, biases, narrow tables), where 8 bits would save next to nothing

The rule depends only on a leaf's own shape, so that it is the same on every mesh. The structure of
the tree does not depend on it: an FP32 leaf has its values in `codes`, and placeholders for `amax`
and `exponent_x16`, of a few bytes, with the parameter's rank and divisible axes, so that its
sharding fits them. (They are not empty, because orbax refuses to save empty arrays.)

Adam's two moments are stored together, as the two factors of its update:

    second    v as an 8-bit logarithm (`numerics.logarithms`), rounded stochastically
    first     the direction m / sqrt(v) as an 8-bit integer (`numerics.integers`)

The directions of a group are of similar size, while the moments themselves span many binades. An
error of v also scales the m that is read, so it leaves the direction unchanged. Where v is below
the smallest number that its group can hold, the root of that number stands for sqrt(v).

The formats of the COAT paper are FP8 with dynamic range expansion (`numerics.expansion`) for both
moments: `PAPER`. With stochastic rounding, `Storage(first=E4M3, second=E4M3)`, the first moment is
rounded to nearest except for its smallest codes (`dithered` in `expansion.encode`), or
stochastically if it decays so slowly that rounding to nearest would undo the decay of every code.

For experiments with other formats, both may be a `Minifloat` of up to 7 mantissa bits, or its name,
as in `Storage(first="E2M5", second="UE4M4")`. XLA simulates these: codes take two bytes.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, UInt32

from coat_jax.numerics import expansion, integers, logarithms, mesh_axes, noise
from coat_jax.numerics.expansion import Expanded, Rounding
from coat_jax.numerics.formats import E4M3, SMALLEST_NORMAL, format_of, named_format
from coat_jax.numerics.groups import join_groups, scales_shape, split_groups
from coat_jax.numerics.minifloat import Minifloat, names_of_simulated
from coat_jax.validation import Between, Seed, require_fields

DIRECTION = integers.DTYPE  # the format of a first moment that is stored over the root of v
LOGARITHM = logarithms.DTYPE  # the format of a second moment
MIN_COLUMNS = 16
# Rounding to nearest undoes a decay of up to half a unit in the last place, so a code must lose
# this many units per step to be rounded to nearest.
MIN_DECAY = 0.75
MIN_CHANGE = 0.049  # the least 1 - b1 with which large codes of a direction are rounded to nearest
DIVISIBLE_BY = 8  # the devices along one axis over which a placeholder can be sharded
MOST_SIMULATED_BITS = 7  # of a mantissa: simulated codes are in BF16
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
GroupSize = Annotated[int, GROUP_SIZES]


@dataclasses.dataclass(frozen=True)
class Storage:
    """The format of an optimizer's moments.

    Attributes:
        first: format of Adam's first moment: `DIRECTION` (int8) or an FP8 format; or, simulated,
            any signed `Minifloat`.
        second: format of Adam's second moment: `LOGARITHM` (uint8) or an FP8 format; or, simulated,
            any `Minifloat`.
        other: FP8 format of the moments of other optimizers, which `compress` stores.
        group_size: neighbours along the last axis that share a scale and an exponent.
        min_size: leaves with fewer elements stay in FP32. With 0 every leaf is stored in 8 bits,
            even if its last axis is too narrow for that to save anything.
        stochastic: whether moments are rounded stochastically, as above. Rounded to nearest they
            freeze: at b2 = 0.999 one step's decay is less than half a code.
        seed: of the stochastic rounding.
    """

    first: DTypeLike = DIRECTION
    second: DTypeLike = LOGARITHM
    other: DTypeLike = E4M3
    group_size: GroupSize = expansion.GROUP_SIZE
    min_size: Annotated[int, Between(least=0)] = 16384
    stochastic: bool = True
    seed: Seed = 0

    def __post_init__(self) -> None:
        require_fields(self)
        for field, own in (("first", DIRECTION), ("second", LOGARITHM), ("other", E4M3)):
            object.__setattr__(self, field, _format(field, getattr(self, field), own))

    @property
    def simulated(self) -> bool:
        """Whether a moment is stored in a `Minifloat`."""
        return any(isinstance(dtype, Minifloat) for dtype in (self.first, self.second))

    def quantizes(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a leaf of this shape is stored in 8 bits; see the rule above."""
        if self.min_size == 0:
            return True
        return math.prod(shape) >= self.min_size and (shape or (1,))[-1] >= MIN_COLUMNS

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of `amax` and `exponent_x16` of a leaf."""
        scales = scales_shape(shape, self.group_size)
        return scales if self.quantizes(shape) else placeholder_shape(scales)

    def read(self, stored: Expanded, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Returns the FP32 values of one leaf; for a first moment in `DIRECTION`, its directions.

        Args:
            stored: the leaf.
            dtype: its format. Required if it is simulated, because the dtype of simulated codes
                does not identify the format.
        """
        if stored.codes.dtype == jnp.float32:
            return stored.codes
        if isinstance(dtype, Minifloat):
            return expansion.decode(stored, group_size=self.group_size, dtype=dtype)
        return _CODERS.get(stored.codes.dtype, expansion).decode(stored, group_size=self.group_size)

    def read_moments(
        self, mu: Expanded, nu: Expanded
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns both moments of Adam."""
        m, v = self.read(mu, self.first), self.read(nu, self.second)
        if mu.codes.dtype == DIRECTION:
            m = m * self._root(v, nu)
        return m, v

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
            key: a key of `numerics.noise`, for stochastic rounding, with which the decoded value
                is right on average. Without a key, or with `stochastic=False`, rounds to nearest.
            never_zero: for leaves that a transformation divides by; see `expansion.encode`.
        """
        if not self.quantizes(values.shape):
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
        b2: float | Array,
    ) -> tuple[Expanded, Expanded]:
        """Stores both moments of Adam, as described above."""
        if not self.quantizes(m.shape):
            return self._in_fp32(m), self._in_fp32(v)
        for_m = for_v = None
        if self.stochastic:
            for_v, for_m = noise.uniform_pair(key, v.shape, run=self.group_size)
        if self.second == LOGARITHM:
            nu = logarithms.encode(v, group_size=self.group_size, noise=for_v)
        else:
            nu = expansion.encode(v, self.second, group_size=self.group_size, noise=for_v)
        if self.first == DIRECTION:
            m = m / self._root(v, nu)
        return self._write_first(m, for_m, b1, b2), nu

    def write_momentum(
        self, m: Float[Array, "..."], key: UInt32[Array, ""], b: float | Array
    ) -> Expanded:
        """Stores a first moment without a second one; it decays by `b` per step."""
        if not self.quantizes(m.shape):
            return self._in_fp32(m)
        for_m = noise.uniform(key, m.shape, run=self.group_size) if self.stochastic else None
        return self._write_first(m, for_m, b, 1.0)

    def _root(self, v: Float[Array, "..."], nu: Expanded) -> Float[Array, "..."]:
        """sqrt(v), with at least the smallest number that the groups of `nu` can hold."""
        smallest = jnp.maximum(self.smallest_second(nu), SMALLEST_NORMAL)
        return jnp.sqrt(jnp.maximum(v, smallest))

    def _write_first(
        self,
        m: Float[Array, "..."],
        for_m: Float[Array, "..."] | None,
        b1: float | Array,
        b2: float | Array,
    ) -> Expanded:
        """Returns a first moment in FP8, or directions."""
        size = self.group_size
        if self.first == DIRECTION:
            below = stochastic_below(b1, b2)
            return integers.encode(m, group_size=size, noise=for_m, stochastic_below=below)
        encode = partial(expansion.encode, m, self.first, group_size=size, noise=for_m)
        if for_m is None or not isinstance(b1, jax.Array):
            return encode(dithered=self.rounding_of_first(b1) == "dithered")
        both = encode(dithered=True), encode()
        return jax.tree.map(lambda a, b: jnp.where(self._decays_fast(b1), a, b), *both)

    def rounding_of_first(self, b1: float | Array) -> Rounding:
        """Returns how a first moment that decays by b1 is rounded.

        Large codes of a direction are rounded to nearest all the same: see `stochastic_below`.
        A traced b1 counts as a slow decay: the Triton kernel then rounds stochastically, which is
        right for any b1. The XLA path chooses by the value of b1 when the program runs.
        """
        if not self.stochastic:
            return "nearest"
        if self.first == DIRECTION or isinstance(b1, jax.Array):
            return "stochastic"
        return "dithered" if self._decays_fast(b1) else "stochastic"

    def _decays_fast(self, b1: float | Array) -> bool | Array:
        """Returns whether every normal code decays by itself when it is rounded to nearest.

        The second code of a binade loses the smallest share of its distance to the next one.
        """
        return (2 ** format_of(self.first).mantissa_bits + 1) * (1 - b1) >= MIN_DECAY

    def smallest_second(self, stored: Expanded) -> Float[Array, "..."]:
        """Returns the smallest positive number that the group of each second moment can hold."""
        if stored.codes.dtype == jnp.float32:
            return jnp.zeros([], jnp.float32)
        smallest = stored.amax * self.resolution_of_second()
        groups = split_groups(stored.codes, self.group_size).shape
        per_element = jnp.broadcast_to(smallest.reshape(groups[:-1])[..., None], groups)
        return join_groups(per_element, stored.codes.shape)

    def resolution_of_second(self) -> float:
        """Returns the smallest non-zero second moment that a group can hold if its largest is 1."""
        if self.second == LOGARITHM:
            return logarithms.RESOLUTION
        return expansion.resolution(self.second, "stochastic" if self.stochastic else "nearest")

    def _in_fp32(self, values: Float[Array, "..."]) -> Expanded:
        shape = self.scales_shape(values.shape)
        unused = jnp.zeros(shape, jnp.float32), jnp.full(shape, expansion.STEPS, jnp.uint8)
        return Expanded(
            values.astype(jnp.float32), *(mesh_axes.varying_like(leaf, values) for leaf in unused)
        )


_CODERS = {jnp.dtype(DIRECTION): integers, jnp.dtype(LOGARITHM): logarithms}


def placeholder_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a small, unused array that can be sharded like this shape."""
    return tuple(math.gcd(size, DIVISIBLE_BY) if size else 0 for size in shape)


def stochastic_below(b1: float | Array, b2: float | Array) -> Float[Array, ""]:
    """Returns the magnitude below which codes of a direction are rounded stochastically.

    Rounding to nearest halves the squared error of the others. Without a gradient, m / sqrt(v)
    decays by b1 / sqrt(b2) per step, which rounding to nearest would undo for small codes. If b1 is
    above 0.95, it is infinite: while gradients hardly change, a step moves m by only (1 - b1) of
    its distance to their mean, and a code rounded to nearest would stop far away.
    """
    root = jnp.sqrt(jnp.maximum(jnp.asarray(b2, jnp.float32), SMALLEST_NORMAL))
    lost = 1 - b1 / root
    to_nearest = (lost > 0) & (1 - b1 >= MIN_CHANGE)
    return jnp.where(to_nearest, MIN_DECAY / jnp.maximum(lost, 1e-6), jnp.inf)


def _format(field: str, value: DTypeLike | Minifloat, own: DTypeLike) -> Any:
    """Returns whichever of E4M3, E5M2 and `own` a field names, or a `Minifloat`."""
    fmt = named_format(value, own)
    if fmt is None:
        raise ValueError(
            f"{field}={value!r} is not a format of an optimizer's moments. Use its default "
            f"jnp.{jnp.dtype(own).name}, coat.formats.E4M3 (more precision) or coat.formats.E5M2 "
            "(more range). To simulate another one, first and second also take "
            f"{names_of_simulated(MOST_SIMULATED_BITS)}."
        )
    if isinstance(fmt, Minifloat) and (
        field == "other"
        or fmt.container != jnp.bfloat16
        or not fmt.zero
        or (field == "first" and not fmt.signed)
    ):
        raise ValueError(
            f"{field}={fmt.name!r} cannot be simulated: only first and second can, in formats "
            f"that have a zero and up to {MOST_SIMULATED_BITS} mantissa bits, first with a sign."
        )
    return fmt


# The formats and the rounding of the COAT paper.
PAPER = Storage(first=E4M3, second=E4M3, stochastic=False)
