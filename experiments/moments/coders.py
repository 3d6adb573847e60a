"""Ways of storing a moment in 8 bits: its values after encoding and decoding, in FP32.

`plain` and `expanded` are coat_jax itself. `dynamic` is the dynamic exponent data type (DE8) of
bitsandbytes:

    signed      sign bit, z zeros, a one, 6 - z bits of fraction
    unsigned              z zeros, a one, 7 - z bits of fraction
    value       10^-z times the middle of the fraction's part of [0.1, 1];  0 and 1 are codes too

A group stores 8-bit indices into this table and its largest magnitude in FP32; for the error only
the values matter. All coders have the groups of coat_jax.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics import expansion
from coat_jax.numerics.formats import E4M3, format_of, stochastic_cast
from coat_jax.numerics.groups import join_groups, split_groups
from coat_jax.numerics.quantizer import Quantizer

Rows = Float[Array, "N D"]
Coder = Callable[[Rows], Rows]

GROUP_SIZE = expansion.GROUP_SIZE
DECADES = 7  # of DE8


def plain(dtype: DTypeLike) -> Coder:
    """One scale per group, rounded to nearest."""
    return jax.jit(Quantizer(format_of(dtype).name, "group", size=GROUP_SIZE))


def plain_stochastic(x: Rows, uniform: Rows) -> Rows:
    """E4M3 with one scale per group, rounded stochastically."""
    grouped, random = (split_groups(a, GROUP_SIZE) for a in (x, uniform))
    scale = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / format_of(E4M3).max
    codes = stochastic_cast(grouped / jnp.where(scale > 0, scale, 1.0), E4M3, random)
    return join_groups(codes.astype(jnp.float32) * scale, x.shape)


def expanded(dtype: DTypeLike) -> Coder:
    """Dynamic range expansion, rounded to nearest, as in the paper."""
    return jax.jit(lambda x: expansion.decode(expansion.encode(x, dtype)))


def dynamic(*, signed: bool) -> Coder:
    """DE8, rounded to nearest."""
    values = dynamic_map(signed=signed)
    boundaries = (values[1:] + values[:-1]) / 2

    def code(x: Rows) -> Rows:
        grouped = split_groups(x, GROUP_SIZE)
        amax = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
        unit = grouped / jnp.where(amax > 0, amax, 1.0)
        codes = jnp.searchsorted(jnp.asarray(boundaries), unit)
        return join_groups(jnp.asarray(values)[codes] * amax, x.shape)

    return jax.jit(code)


def dynamic_stochastic(x: Rows, uniform: Rows) -> Rows:
    """Unsigned DE8, rounded to a neighbouring value, right on average."""
    values = jnp.asarray(dynamic_map(signed=False))
    grouped, random = (split_groups(a, GROUP_SIZE) for a in (x, uniform))
    amax = jnp.max(grouped, axis=-1, keepdims=True)
    unit = grouped / jnp.where(amax > 0, amax, 1.0)
    above = jnp.clip(jnp.searchsorted(values, unit), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    chosen = jnp.where(random * (high - low) < unit - low, high, low)
    return join_groups(chosen * amax, x.shape)


def dynamic_map(*, signed: bool) -> Float[np.ndarray, "256"]:
    """The 256 values of DE8, ascending, from -0.993 (or 0) to 1."""
    positive = [0.0, 1.0]
    for zeros in range(DECADES):
        fraction_bits = (6 if signed else 7) - zeros
        edges = np.linspace(0.1, 1.0, 2**fraction_bits + 1)
        positive += list(10.0**-zeros * (edges[:-1] + edges[1:]) / 2)
    negative = [-value for value in positive if 0 < value < 1] if signed else []
    return np.sort(np.array(negative + positive, np.float32))
