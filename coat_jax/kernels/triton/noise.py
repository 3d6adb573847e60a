"""Random bits for stochastic rounding, hashed as in `coat_jax.numerics.noise`.

The bits become the mantissa of a float: they are put under the bits of a number (BASE) whose last
place has the size that the noise needs, so that a single addition applies them.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import FAST


@triton.jit
def mix(x):
    """The hash of `noise.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def of_places(run, lane):
    """`noise.of_places` of runs and lanes, which may be of any shapes that broadcast."""
    return mix((run + 1) * 0x9E3779B9) * (mix(lane.to(tl.uint32) + 1) | 1)


@triton.jit
def noise_bits(key, run, BASE: tl.constexpr, OTHER_BASE: tl.constexpr, GROUP: tl.constexpr):
    """Per element of B groups, as [B, G]: 16 random bits, and those of its neighbour.

    One hash of 32 bits serves two neighbours: the even one has the lower half, the odd one the
    upper. An element's own bits are put under those of BASE, its neighbour's under OTHER_BASE.
    `run` numbers the groups in the whole array.
    """
    row = mix(key + run * 0x9E3779B9)
    pair = tl.arange(0, GROUP // 2).to(tl.uint32)
    bits = mix(row[:, None] + pair[None, :] * 0x9E3779B9)
    own = tl.interleave(lower_half(bits, BASE), upper_half(bits, BASE))
    other = tl.interleave(upper_half(bits, OTHER_BASE), lower_half(bits, OTHER_BASE))
    return own, other


@triton.jit
def lower_half(bits, BASE: tl.constexpr):
    """The lower 16 bits, under those of BASE."""
    return (bits & 0xFFFF) | BASE


@triton.jit
def upper_half(bits, BASE: tl.constexpr):
    """The upper 16 bits, under those of BASE."""
    if FAST:  # one instruction instead of two
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;",
            "=r,r,r",
            [bits, BASE],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return (bits >> 16) | BASE
