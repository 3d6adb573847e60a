"""Formats of cached keys and values: what a code stands for, and how many bytes it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.errors import UserError
from coat_jax.numerics.cache_formats import (
    StoredHeads,
    decode_heads,
    encode_heads,
    format_of_cache,
    require_cache_format,
)

LARGEST = {"int8": 127, "fp8": 448}
FORMATS = [None, "int8", "fp8", "int4"]


def heads(dtype="float32"):
    """Of very different sizes; some with a mean, one all zero and one constant."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 5, 128)) * 10.0 ** rng.integers(-6, 6, (6, 5, 1))
    x[:2] += 3 * x[:2].max(axis=-1, keepdims=True)
    x[2, 0], x[2, 1] = 0, -0.3
    return jnp.asarray(x, dtype)


def in_fp64(array):
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_codes_are_the_nearest_ones_with_a_scale_that_bf16_has(name):
    x, (codes, scale, zero) = heads(), encode_heads(heads(), name)
    assert zero is None
    assert scale.dtype == jnp.bfloat16
    largest, scale = np.abs(in_fp64(x)).max(axis=-1), in_fp64(scale)
    exact = np.where(largest == 0, 1, largest / LARGEST[name])
    np.testing.assert_allclose(scale, exact, rtol=2**-8)
    shares = in_fp64(x) / scale[..., None]
    if name == "int8":
        assert np.abs(in_fp64(codes) - shares).max() <= 0.5 + 1e-5
        np.testing.assert_array_equal(np.abs(in_fp64(codes)).max(axis=-1)[largest > 0], 127)
    else:
        # E4M3 rounds within 2^-4, or half its smallest step. 448 (1 + 2^-9) saturates.
        assert (
            np.abs(in_fp64(codes) - shares) <= np.maximum(2.0**-10, np.abs(shares) / 15.9)
        ).all()
        np.testing.assert_array_equal(np.abs(in_fp64(codes)).max(axis=-1)[largest > 0], 448)
    decoded = decode_heads(StoredHeads(codes, jnp.asarray(scale, jnp.bfloat16)), jnp.float32)
    np.testing.assert_array_equal(decoded, np.float32(in_fp64(codes) * scale[..., None]))


def test_int4_has_both_halves_of_a_head_in_a_byte_and_ends_at_both_extremes():
    x, stored = heads("bfloat16"), encode_heads(heads("bfloat16"), "int4")
    bytes_, scale, zero = stored
    assert (bytes_.dtype, bytes_.shape) == (jnp.uint8, (6, 5, 64))
    codes = np.concatenate([np.asarray(bytes_) & 15, np.asarray(bytes_) >> 4], axis=-1)
    scale, zero = in_fp64(scale), in_fp64(zero)
    np.testing.assert_array_equal(zero, in_fp64(x).min(axis=-1))
    span = in_fp64(x).max(axis=-1) - zero
    np.testing.assert_allclose(scale, np.where(span == 0, 1, span / 15), rtol=2**-8)
    shares = (in_fp64(x) - zero[..., None]) / scale[..., None]
    # The largest one may be 15 (1 + 2^-9), which is 15 and 0.03.
    assert np.abs(codes - shares).max() <= 0.5 + 1e-5
    assert (codes.max(axis=-1) == np.where(span == 0, 0, 15)).all()
    decoded = in_fp64(decode_heads(stored, jnp.float32))
    np.testing.assert_allclose(decoded, codes * scale[..., None] + zero[..., None], rtol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_says_how(name):
    stored = encode_heads(heads("bfloat16"), name)
    assert format_of_cache(stored) == name
    assert decode_heads(stored, jnp.bfloat16).dtype == jnp.bfloat16
    if name is None:
        np.testing.assert_array_equal(stored.codes, heads("bfloat16"))


@pytest.mark.parametrize(("name", "most"), [("int8", 0.51), ("fp8", 0.51), ("int4", 0.27)])
def test_bytes_of_a_head(name, most):
    x = heads("bfloat16")
    assert sum(array.nbytes for array in jax.tree.leaves(encode_heads(x, name))) <= most * x.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_a_number_stays_none_and_spoils_no_other_head(name):
    x = jnp.ones((3, 8)).at[1, 2].set(jnp.nan)
    decoded = decode_heads(encode_heads(x, name), jnp.float32)
    assert jnp.isnan(decoded[1, 2])
    assert jnp.isfinite(decoded[::2]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_very_small_and_very_large_heads_are_finite(name):
    x = jnp.array([1e-45, 1e-38, 2.0**-126, 1e38])[:, None] * jnp.linspace(-1, 1, 16)
    decoded = decode_heads(encode_heads(x, name), jnp.float32)
    # INT4 is off by half a step of a 15th of the range, at most.
    assert (jnp.abs(decoded - x).max(axis=1) <= 0.07 * jnp.abs(x).max(axis=1) + 2.0**-126).all()


def test_formats_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"cache='int5' must be one of \('int8', 'fp8', 'int4'\)"):
        require_cache_format("int5", 64)
    with pytest.raises(UserError, match=r'a head of 15 is odd\. Use cache="int8"'):
        encode_heads(jnp.ones((2, 15)), "int4")
    require_cache_format("int8", 15)


def test_rounding_in_one_program_is_that_of_several():
    """Within a program, XLA must not drop the scale's rounding to BF16."""

    @jax.jit
    def both(x, name="int8"):
        stored = encode_heads(x, name)
        return stored, decode_heads(stored, jnp.float32)

    stored, decoded = both(heads())
    np.testing.assert_array_equal(decoded, decode_heads(stored, jnp.float32))
