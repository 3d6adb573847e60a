"""Blocks of FP8 values that share a power of two as scale: counterpart of `numerics.blocks`.

The largest magnitude is found among bit patterns, as integers. There NaN and infinity are the
largest of all and cannot get lost, as they would in a floating-point maximum.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.formats import round_at_random, round_to_fp8
from coat_jax.kernels.triton.noise import of_places


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as an integer, which orders as |x| does."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def fitting_exponent(bits, F8: tl.constexpr):
    """`blocks.fitting_exponent` of a maximum of `magnitude_bits`."""
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - F8.top_exponent, 1)
    return tl.where(bits < 0x7F800000, exponent, 255)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(exponent):
    """2^(127 - exponent); NaN for an exponent of 255."""
    bits = (254 - tl.minimum(exponent, 253)) << 23
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def round_blocks(v, exponent, number, ANTITHETIC: tl.constexpr, F8: tl.constexpr):
    """The codes of blocks [.., SIZE], as `round_to_fp8` returns them.

    If `number` is None, they are rounded to nearest. Otherwise `number` is the number of each block
    (`numerics.blocks.BlockNumbers`), and they are rounded stochastically; if ANTITHETIC, with the
    complements of the random bits.
    """
    y = v * tl.expand_dims(inverse_power(exponent), -1)
    if number is None:
        y = round_to_fp8(y, F8)
    else:
        lane = tl.arange(0, y.shape[-1])
        bits = of_places(tl.expand_dims(number, -1), lane)
        if ANTITHETIC:
            bits = bits ^ 0xFFFFFFFF  # the interpreter has no ~ for unsigned numbers
        y = round_at_random(y, bits, F8)
    return y


@triton.jit
def load_row_of_blocks(codes, exponents, row, column, NORM: tl.constexpr):
    """Loads a row that is stored in blocks, decoded to FP32."""
    block = tl.arange(0, NORM.width // NORM.block)
    blocks: tl.constexpr = (NORM.columns + NORM.block - 1) // NORM.block
    q = tl.load(codes + row * NORM.columns + column, mask=column < NORM.columns, other=0.0)
    q = q.to(tl.float32)
    e = tl.load(exponents + row * blocks + block, mask=block < blocks, other=127).to(tl.int32)
    values = tl.reshape(q, [NORM.width // NORM.block, NORM.block])
    return tl.reshape(values * power_of_two(e)[:, None], [NORM.width])
