"""`join` and `split` of the AdamW kernel on their own, to compare with `numerics.corrections`."""

import triton
import triton.language as tl

from coat_jax.kernels.triton.params import join, split


@triton.jit
def join_block(values, corrections, joined, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(joined + at, join(tl.load(values + at), tl.load(corrections + at)))


@triton.jit
def split_block(numbers, noise, values, corrections, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value, correction = split(tl.load(numbers + at), tl.load(noise + at))
    tl.store(values + at, value)
    tl.store(corrections + at, correction)
