"""INT4 codes of weights, with a scale for every 128 neighbouring inputs of an output channel.

    w[n, k] ~ scale[n, g] (u[n, k] - zero[n, g])          u = 0 .. 15, k in group g

Two codes share a byte: its low bits have one of the first half of a group, its high bits the one 64
places after it. Scales are in BF16.

Without `zero` it is 8, and the scales of a channel are one number times powers of two:

    scale[n, g] = s[n] 2^-e[n, g]                         e = 0 .. 9

E4M3 has all numbers (u - 8) 2^-e. So such a weight also has FP8 codes, with one scale for each
channel (`expand`): products of few and of many rows are computed differently, but from the same
numbers.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from coat_jax.numerics.formats import E4M3

GROUP = 128
ZERO = 8  # where none is given
LARGEST, SMALLEST = 7, -8
MOST_EXPONENT = 9  # 2^-9 is the smallest number of E4M3
# The channel's scale is tried at 8 places of an octave, from 1.2 times that of its largest element.
TRIED = [1.2 * 2 ** (-i / 8) for i in range(8)]

Packed = UInt8[Array, "N K/2"]


def pack(u: Int[Array, "N K"]) -> Packed:
    """Two codes a byte."""
    halves = u.astype(jnp.uint8).reshape(u.shape[0], -1, 2, GROUP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(u.shape[0], -1)


def unpack(codes: Packed) -> UInt8[Array, "N K"]:
    """The inverse of `pack`."""
    bytes_of = codes.reshape(codes.shape[0], -1, GROUP // 2)
    return jnp.stack([bytes_of & 15, bytes_of >> 4], axis=2).reshape(codes.shape[0], -1)


def group_scales(weight: Float[Array, "N K"]) -> Float[Array, "N G"]:
    """Scales with little squared error; NaN for a channel with a NaN or an infinity.

    For each s that is tried, each group has the better one of two exponents: the one with which its
    largest element has a code, and the next smaller scale, which saturates it.
    """
    groups = weight.astype(jnp.float32).reshape(weight.shape[0], -1, GROUP)
    needed = jnp.max(jnp.abs(groups), axis=-1) / LARGEST
    top = jnp.max(needed, axis=-1)
    top = jnp.where(top > 0, top, 1.0)

    def with_scale(share: Array) -> tuple[Array, Array]:
        s = (top * share).astype(jnp.bfloat16).astype(jnp.float32)[:, None]
        room = jnp.floor(jnp.log2(s / jnp.maximum(needed, top[:, None] * 2.0**-20)))
        tried = [jnp.clip(room + more, 0, MOST_EXPONENT) for more in (0, 1)]
        scales = jnp.stack([s * jnp.exp2(-e) for e in tried])
        rounded = jnp.clip(jnp.round(groups / scales[..., None]), SMALLEST, LARGEST)
        # In units of the largest, because squares of small numbers would underflow.
        errors = (rounded * scales[..., None] - groups) / top[:, None, None]
        errors = jnp.sum(jnp.square(errors), axis=-1)
        return jnp.where(errors[1] < errors[0], scales[1], scales[0]), jnp.sum(
            jnp.min(errors, 0), -1
        )

    scales, errors = lax.map(with_scale, jnp.array(TRIED, jnp.float32))
    best = jnp.argmin(errors, axis=0)[None, :, None]
    chosen = jnp.take_along_axis(scales, best, axis=0)[0]
    finite = jnp.all(jnp.isfinite(weight), axis=1, keepdims=True)
    return jnp.where(finite, chosen, jnp.nan).astype(jnp.bfloat16)


def encode(weight: Float[Array, "N K"], scale: Float[Array, "N G"]) -> Packed:
    """The codes of a weight whose zero is 8."""
    groups = weight.astype(jnp.float32).reshape(*scale.shape, GROUP)
    whole = jnp.clip(jnp.round(groups / scale.astype(jnp.float32)[..., None]), SMALLEST, LARGEST)
    return pack((whole + ZERO).reshape(weight.shape))


def values(
    codes: Packed, scale: Float[Array, "N G"], zero: UInt8[Array, "N G"] | None = None
) -> Float[Array, "N K"]:
    """The weight that codes stand for, in FP32."""
    return _scaled(_centred(codes, zero), scale.astype(jnp.float32))


def expand(
    codes: Packed, scale: Float[Array, "N G"]
) -> tuple[Float[Array, "N K"], Float[Array, " N"]]:
    """The codes in E4M3, and the scale of each channel, for scales that have this form."""
    of_channel = channel_scales(scale)
    powers = scale.astype(jnp.float32) / of_channel[:, None]
    return _scaled(_centred(codes, None), powers).astype(E4M3), of_channel


def channel_scales(scale: Float[Array, "N G"]) -> Float[Array, " N"]:
    """The numbers that `expand` divides scales by."""
    largest = jnp.max(scale.astype(jnp.float32), axis=1)
    return jnp.where(largest > 0, largest, 1.0)


def _centred(codes: Packed, zero: UInt8[Array, "N G"] | None) -> Int[Array, "N G 128"]:
    u = unpack(codes).astype(jnp.int8).reshape(codes.shape[0], -1, GROUP)
    return u - (ZERO if zero is None else zero.astype(jnp.int8)[..., None])


def _scaled(whole: Int[Array, "N G 128"], scale: Float[Array, "N G"]) -> Float[Array, "N K"]:
    return (whole.astype(jnp.float32) * scale[..., None]).reshape(whole.shape[0], -1)


def are_of_channel(scale: Float[Array, "N G"]) -> bool:
    """Whether the scales of each channel are one number of BF16 times powers of two, 1 to 2^-9."""
    wide = jnp.asarray(scale).astype(jnp.float32)
    mantissas, exponents = jnp.frexp(wide)
    alike = jnp.all(
        (mantissas == mantissas[:, :1]) & (wide == wide.astype(jnp.bfloat16).astype(jnp.float32))
    )
    return bool(alike & (jnp.ptp(exponents, axis=1).max() <= MOST_EXPONENT))
