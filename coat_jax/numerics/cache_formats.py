"""Formats of the keys and values that generation stores, one head of one token at a time.

    format    codes                         a number is about         bytes of a head of 128
    None      the numbers themselves        code                      256 in BF16
    "int8"    -127 .. 127                   code * scale              130
    "fp8"     E4M3                          code * scale              130
    "int4"    0 .. 15, two in a byte        code * scale + zero        68

Each head of each token has its own scale; in INT4 also its own zero point, the smallest number.
Both are in BF16, and codes are computed from what BF16 has made of them. A byte of INT4 has a
column of the head's first half in its low bits, and one of the second half in its high bits.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from coat_jax.errors import UserError
from coat_jax.numerics import eight_bits
from coat_jax.numerics.one_program import one_program

CacheFormat = Literal["int8", "fp8", "int4"]
LARGEST_INT4 = 15


class StoredHeads(NamedTuple):
    """Heads of tokens as they are stored.

    Attributes:
        codes: one for each column; in INT4 uint8 of half as many columns.
        scale: of each head; None where numbers are stored as they are.
        zero: what is added, in INT4; else None.
    """

    codes: Array  # [*heads, H]
    scale: BFloat16[Array, "*heads"] | None = None
    zero: BFloat16[Array, "*heads"] | None = None


def require_cache_format(name: Any, head_dim: int) -> None:
    """Raises unless heads of this width can be stored in this format."""
    if name is not None and name not in get_args(CacheFormat):
        raise UserError(
            f"cache={name!r} must be one of {get_args(CacheFormat)}, or None for the model's dtype."
        )
    if name == "int4" and head_dim % 2:
        raise UserError(
            f"INT4 stores two columns of a head in a byte, and a head of {head_dim} is odd. Use "
            'cache="int8".'
        )


def format_of_cache(stored: StoredHeads) -> CacheFormat | None:
    """The format in which these were stored."""
    if stored.zero is not None:
        return "int4"
    return None if stored.scale is None else eight_bits.format_of_codes(stored.codes.dtype)


@one_program("x")
def encode_heads(x: Float[Array, "*heads H"], name: CacheFormat | None) -> StoredHeads:
    """Stores heads in a format."""
    require_cache_format(name, x.shape[-1])
    if name is None:
        return StoredHeads(x)
    if name != "int4":
        scale = _through_bf16(eight_bits.scale_of(jnp.max(jnp.abs(x), axis=-1), name))
        return StoredHeads(eight_bits.encode(x, scale[..., None], name), scale.astype(jnp.bfloat16))
    wide = x.astype(jnp.float32)
    zero = _through_bf16(jnp.min(wide, axis=-1))
    span = jnp.max(wide, axis=-1) - zero
    # BF16 may have rounded the zero point up to the largest number.
    scale = jnp.maximum(span / LARGEST_INT4, eight_bits.SMALLEST_SCALE)
    scale = _through_bf16(jnp.where(span <= 0, 1.0, scale))
    codes = jnp.round((wide - zero[..., None]) / scale[..., None])
    low, high = jnp.split(jnp.clip(codes, 0, LARGEST_INT4).astype(jnp.uint8), 2, axis=-1)
    return StoredHeads(low | high << 4, scale.astype(jnp.bfloat16), zero.astype(jnp.bfloat16))


def decode_heads(stored: StoredHeads, dtype: DTypeLike) -> Float[Array, "*heads H"]:
    """The numbers that codes stand for, computed in FP32."""
    codes, scale, zero = stored
    if scale is None:
        return codes.astype(dtype)
    if zero is not None:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    wide = codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
    if zero is not None:
        wide += zero.astype(jnp.float32)[..., None]
    return wide.astype(dtype)


def _through_bf16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds to BF16 and stays in FP32. XLA may drop a cast to BF16 and back."""
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
