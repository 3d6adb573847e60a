"""Parameters of the AdamW kernel: reading them in FP32, rounding and storing them.

`join` and `split` are the counterpart of `coat_jax.numerics.corrections`: the same bits as there,
for any input.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import FAST
from coat_jax.kernels.triton.noise import mix, noise_bits


@triton.jit
def load_param(param, correction, start, offsets, mask, CORRECTED: tl.constexpr):
    """Parameters in FP32; if CORRECTED, BF16 parameters with their corrections."""
    p = tl.load(param + start + offsets, mask=mask, other=0.0)
    if CORRECTED:
        p = join(p, tl.load(correction + start + offsets, mask=mask, other=0))
    return p.to(tl.float32)


@triton.jit
def store_param(
    p, param, correction, start, offsets, mask, key, group,
    CORRECTED: tl.constexpr, STOCHASTIC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rounds and stores parameters: at random if CORRECTED or STOCHASTIC, by `key` and `group`."""
    if CORRECTED or STOCHASTIC:
        noise, _ = noise_bits(mix(key ^ 0x5BD1E995), group, 0, 0, GROUP)
    if CORRECTED:
        p, corrected = split(p, noise)
        tl.store(correction + start + offsets, corrected, mask=mask)
    elif STOCHASTIC:
        bits = p.to(tl.uint32, bitcast=True) + noise
        rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        p = tl.where(p == p, rounded, p)  # noqa: PLR0124, NaN stays NaN
    tl.store(param + start + offsets, p.to(param.dtype.element_ty), mask=mask)


@triton.jit
def join(value, correction):
    """The 24-bit numbers in FP32."""
    if FAST:  # one instruction for each number: its byte, and its sign in the bytes above
        shifted = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0, 0x8804;"
            "prmt.b32 $1, $4, 0, 0x9914;"
            "prmt.b32 $2, $4, 0, 0xAA24;"
            "prmt.b32 $3, $4, 0, 0xBB34;",
            "=&r,=&r,=&r,=&r,r",
            [correction],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        shifted = correction.to(tl.int32) << 8
    bits = value.to(tl.uint16, bitcast=True).to(tl.int32) << 16
    joined = tl.where(bits << 1 == 0, bits, bits + shifted)
    return joined.to(tl.float32, bitcast=True)


@triton.jit
def split(x, noise):
    """The BF16 numbers and their corrections; `noise` has 16 random bits."""
    bits = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)  # noqa: PLR0124
    bits += noise >> 8
    correction = (bits >> 8).to(tl.int8)
    value = ((bits + 0x8000) >> 16).to(tl.uint16)
    return value.to(tl.bfloat16, bitcast=True), correction
