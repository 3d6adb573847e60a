"""The dynamic exponent data type (DE8) of bitsandbytes, which the COAT paper compares with.

    signed      sign bit, z zeros, a one, 6 - z bits of fraction
    unsigned              z zeros, a one, 7 - z bits of fraction
    value       10^-z times the middle of the fraction's part of [0.1, 1];  0 and 1 are codes too

The run of zeros is the exponent, so large values have more digits than small ones: 64 (128)
values within the first decade below the block's largest magnitude, 1 (2) within the seventh.
A block stores 8-bit indices into this table and its largest magnitude in FP32. Codes are not
packed here: for the error only the values matter.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

DECADES = 7


def dynamic_map(*, signed: bool) -> Float[np.ndarray, "256"]:
    """The 256 values of the type, ascending, from -0.993 (or 0) to 1."""
    positive = [0.0, 1.0]
    for zeros in range(DECADES):
        fraction_bits = (6 if signed else 7) - zeros
        edges = np.linspace(0.1, 1.0, 2**fraction_bits + 1)
        positive += list(10.0**-zeros * (edges[:-1] + edges[1:]) / 2)
    negative = [-value for value in positive if 0 < value < 1] if signed else []
    return np.sort(np.array(negative + positive, np.float32))


def nearest(x: Float[Array, "..."], *, signed: bool) -> Float[Array, "..."]:
    """Rounds numbers within [-1, 1] (or [0, 1]) to the nearest value of the type."""
    values = dynamic_map(signed=signed)
    boundaries = (values[1:] + values[:-1]) / 2
    return jnp.asarray(values)[jnp.searchsorted(jnp.asarray(boundaries), x)]


def at_random(x: Float[Array, "..."], uniform: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds numbers within [0, 1] to a neighbouring value, right on average."""
    values = jnp.asarray(dynamic_map(signed=False))
    above = jnp.clip(jnp.searchsorted(values, x), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    return jnp.where(uniform * (high - low) < x - low, high, low)


def smallest(*, signed: bool) -> float:
    """The smallest positive value of the type."""
    values = dynamic_map(signed=signed)
    return float(values[values > 0].min())
