"""BF16 numbers with a correction of 8 bits each: together they are FP32 numbers of 24 bits.

    FP32          s eeeeeeee mmmmmmm cccccccc xxxxxxxx
    BF16          s eeeeeeee mmmmmmm
    correction                       cccccccc             int8

`split` rounds an FP32 number to 24 bits, which leaves 16 significant bits, and stores the nearest
BF16 number to the result. The correction is the signed distance of the two, in units in the last
place of the 24-bit number. The bits of FP32 numbers are ordered like their magnitudes, so this is
one line of integer arithmetic, even where a power of two lies between the two numbers and the units
below it are half as large:

    24 bits = 256 * (16 bits of the BF16 number) + correction          -128 <= correction <= 127

Ties between two BF16 numbers go to the one further from zero. (Ties to even would need 257
corrections for every second BF16 number.) `join` is the inverse, bit for bit, except that a BF16
zero is zero whatever its correction: magnitudes below 2^-134 become zero, and a parameter that is
set to zero stays zero. A BF16 number with a correction of zero is unchanged.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int8, UInt32

DTYPE = jnp.int8
NAN = np.uint32(0x7FC00000)


@jax.custom_jvp
def join(value: BFloat16[Array, "..."], correction: Int8[Array, "..."]) -> Float32[Array, "..."]:
    """The 24-bit numbers, in FP32."""
    bits = lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32) << 16
    joined = bits + (correction.astype(jnp.uint32) << 8)  # modulo 2^32: signed
    return lax.bitcast_convert_type(jnp.where(bits << 1 == 0, bits, joined), jnp.float32)


@jax.custom_jvp
def split(
    x: Float32[Array, "..."], dither: UInt32[Array, "..."]
) -> tuple[BFloat16[Array, "..."], Int8[Array, "..."]]:
    """The BF16 numbers and their corrections.

    Args:
        x: the numbers.
        dither: 8 random bits for each number, with which the rounding is right on average.
    """
    bits = jnp.where(jnp.isnan(x), NAN, lax.bitcast_convert_type(x, jnp.uint32))
    bits = bits + dither
    correction = lax.bitcast_convert_type((bits >> 8).astype(jnp.uint8), DTYPE)
    value = lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return value, correction


# As for a cast, the derivative of the rounding is 1.
@join.defjvp
def _join_jvp(primals: Any, tangents: Any) -> Any:
    return join(*primals), tangents[0].astype(jnp.float32)


@split.defjvp
def _split_jvp(primals: Any, tangents: Any) -> Any:
    value, correction = split(*primals)
    no_tangent = np.zeros(correction.shape, jax.dtypes.float0)
    return (value, correction), (tangents[0].astype(value.dtype), no_tangent)
