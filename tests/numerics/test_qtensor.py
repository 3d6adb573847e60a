"""Laws of linear FP8 quantization, codes * scale with scale = max|group| / FP8 max.

The scale is one FP32 division, a code one division and one cast, decoding one product, and
XLA may divide by multiplying with the reciprocal. Each is within 2^-23 of the exact result,
so that FP32 adds less than FLOAT32_ERROR = 2^-20 to the rounding of the format:

    normal codes     half a last place: 2^-4 of the value (E4M3), 2^-3 (E5M2)
    subnormal codes  half of the smallest code, times the scale

XLA flushes denormals, so a scale under 2^-126 is zero and with it its whole group.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import qtensor
from coat_jax.numerics.formats import E4M3, E5M2, format_of
from coat_jax.numerics.qtensor import QTensor

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_ERROR = 2.0**-20
LEAST_SCALE = 2.0**-126

quantize = jax.jit(qtensor.quantize, static_argnames=("dtype", "group_size"))
dequantize = jax.jit(qtensor.dequantize)
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
seeds = st.integers(0, 2**32 - 1)

MENU = [
    ((), 128),
    ((0, 40), 32),
    ((17,), 16),
    ((5, 127), 128),
    ((2, 3, 65), 32),
    ((2, 1024), 512),
]
everywhere = pytest.mark.parametrize(
    ("shape", "group_size", "dtype"),
    [(*case, E4M3) for case in MENU] + [(*case, E5M2) for case in MENU[2:4]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
# log2 of the largest, binades down to the smallest.
regimes = st.tuples(st.floats(-109, 128), st.sampled_from([0.0, 1.0, 8.0, 30.0, 200.0]))


def hostile(regime, seed, shape):
    """Numbers of both signs and zeros, of magnitudes 2^-126 .. 3.4e38."""
    rng = np.random.default_rng(seed)
    top, spread = regime
    x = np.exp2(np.maximum(top - spread * rng.random(shape), -126))
    return np.float32(
        np.minimum(x, FLOAT32_MAX) * rng.choice([1, -1, 0], shape, p=[0.45, 0.45, 0.1])
    )


def round_trip(x, dtype, group_size):
    """The codes, and per element the scale and the decoded value, in NumPy."""
    q = quantize(x, dtype, group_size=group_size)
    scale = np.asarray(q.scale)
    if x.shape:
        scale = np.repeat(scale, group_size, axis=-1)[..., : x.shape[-1]]
    return np.asarray(q.codes).astype(np.float64), scale, np.asarray(dequantize(q))


@everywhere
@given(regime=regimes, seed=seeds)
def test_zero_stays_zero(shape, group_size, dtype, regime, seed):
    x = hostile(regime, seed, shape)
    codes, _, y = round_trip(x, dtype, group_size)
    assert y.shape == codes.shape == shape
    assert np.all(codes[x == 0] == 0)
    assert np.all(y[x == 0] == 0)


@everywhere
@given(regime=regimes, seed=seeds)
def test_the_error_is_half_a_last_place(shape, group_size, dtype, regime, seed):
    x = hostile(regime, seed, shape)
    _, scale, y = round_trip(x, dtype, group_size)
    fmt = format_of(dtype)
    x, y, scale = x.astype(np.float64), y.astype(np.float64), scale.astype(np.float64)
    bound = np.maximum(2.0 ** -(fmt.mantissa_bits + 1) * np.abs(x), fmt.tiny / 2 * scale)
    # A product under 2^-126 is flushed.
    slack = FLOAT32_ERROR * np.abs(x) + LEAST_SCALE
    assert np.all((np.abs(y - x) <= bound + slack) | (scale == 0))


@everywhere
@given(regime=regimes, seed=seeds)
def test_the_largest_gets_the_largest_code(shape, group_size, dtype, regime, seed):
    x = hostile(regime, seed, shape)
    codes, scale, y = round_trip(x, dtype, group_size)
    limit = format_of(dtype).max
    # The largest is where |x| = limit * scale, up to the rounding of the scale.
    largest = (np.abs(x) >= limit * scale.astype(np.float64) * (1 - FLOAT32_ERROR)) & (scale > 0)
    np.testing.assert_array_equal(np.abs(codes)[largest], limit)
    np.testing.assert_allclose(y[largest], x[largest], rtol=FLOAT32_ERROR)
    places = np.arange(shape[-1] if shape else 1) // group_size
    found = np.atleast_1d(largest | (scale == 0))
    assert all(np.all(found[..., places == place].any(-1)) for place in set(places))


@everywhere
@given(regime=regimes, seed=seeds)
def test_nothing_non_finite_comes_out_of_finite_numbers(shape, group_size, dtype, regime, seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)  # denormals too
    anything = np.where(np.isfinite(bits) & (rng.random(shape) < 0.1), bits, 1e-42)
    x = np.where(rng.random(shape) < 0.2, anything, hostile(regime, seed, shape))
    for part in round_trip(np.float32(x), dtype, group_size):
        assert np.all(np.isfinite(part))


@everywhere
@given(regime=regimes, seed=seeds)
def test_nan_stays_in_its_own_place(shape, group_size, dtype, regime, seed):
    x = hostile(regime, seed, shape)
    lost = np.random.default_rng(seed).random(shape) < 0.2
    _, scale, y = round_trip(np.where(lost, np.float32(np.nan), x), dtype, group_size)
    _, scale_without, y_without = round_trip(np.where(lost, np.float32(0), x), dtype, group_size)
    np.testing.assert_array_equal(scale, scale_without)
    np.testing.assert_array_equal(y, np.where(lost, np.nan, y_without))


@everywhere
@given(regime=regimes, seed=seeds)
def test_infinity_is_the_largest_float32(shape, group_size, dtype, regime, seed):
    x = hostile(regime, seed, shape)
    beyond = np.random.default_rng(seed).random(shape) < 0.2
    sign = np.where(np.signbit(x), -1, 1).astype(np.float32)
    got = round_trip(np.where(beyond, sign * np.float32(np.inf), x), dtype, group_size)
    want = round_trip(np.where(beyond, sign * np.float32(FLOAT32_MAX), x), dtype, group_size)
    for part, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(part, expected)


@formats
def test_the_largest_floats_decode_to_finite_ones(dtype):
    """Rounding of the scale must not take them over the edge: all of the last 65536."""
    last = np.float32(FLOAT32_MAX).view(np.uint32)
    x = np.arange(last - 2**16 + 1, last + 1, dtype=np.uint32).view(np.float32)[:, None]
    _, _, y = round_trip(x, dtype, 16)
    np.testing.assert_allclose(y, x, rtol=FLOAT32_ERROR)


@formats
@pytest.mark.parametrize("group_size", [16, 512])
def test_zero_at_any_place_of_a_group_changes_nothing(dtype, group_size):
    """One zero among constants, and one non-zero among zeros, at every place."""
    hole = np.float32(3e-3) * (1 - np.eye(group_size, dtype=np.float32))
    for x in (hole, np.float32(-0.3) * np.eye(group_size, dtype=np.float32)):
        np.testing.assert_allclose(round_trip(x, dtype, group_size)[2], x, rtol=FLOAT32_ERROR)


@formats
def test_values_of_the_format_are_exact(dtype):
    """With a scale that is a power of two, quantizing what was dequantized is the identity."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    values = values[np.isfinite(values)] * np.float32(2**-10)
    np.testing.assert_array_equal(round_trip(values, dtype, 256)[2], values)


@formats
def test_result_does_not_depend_on_the_leading_shape(dtype):
    x = hostile((0.0, 8.0), 0, (24, 200))
    want = quantize(x, dtype, group_size=64)
    for lead in ((2, 3, 4), (24, 1)):
        got = quantize(x.reshape(*lead, 200), dtype, group_size=64)
        assert got.scale.shape == (*lead, 4)
        np.testing.assert_array_equal(got.codes.reshape(24, 200), want.codes)
        np.testing.assert_array_equal(got.scale.reshape(24, 4), want.scale)


@formats
def test_vmap_changes_nothing(dtype):
    """But for a last place of the scale: XLA may divide by multiplying."""
    x = hostile((0.0, 8.0), 0, (6, 40))
    want = quantize(x, dtype, group_size=16)
    mapped = jax.vmap(lambda row: quantize(row, dtype, group_size=16))(x)
    np.testing.assert_array_equal(mapped.codes, want.codes)
    np.testing.assert_allclose(mapped.scale, want.scale, rtol=FLOAT32_ERROR)
    rows = jax.vmap(dequantize)(mapped)
    np.testing.assert_allclose(rows, dequantize(want), rtol=FLOAT32_ERROR)


def test_qtensor_passes_through_jit_as_a_tree():
    q = quantize(np.ones((3, 200), np.float32), group_size=64)
    doubled = jax.jit(lambda q: QTensor(q.codes, 2 * q.scale, q.group_size))(q)
    assert doubled.group_size == 64
    np.testing.assert_allclose(dequantize(doubled), np.full((3, 200), 2.0), rtol=FLOAT32_ERROR)
    assert len(jax.tree.leaves(q)) == 2
    assert jax.tree.structure(q) != jax.tree.structure(QTensor(q.codes, q.scale, 32))


def test_dtypes_and_shapes_are_as_documented():
    q = quantize(np.ones((3, 200), jnp.bfloat16), E5M2, group_size=64)
    assert (q.codes.dtype, q.codes.shape) == (E5M2, (3, 200))
    assert (q.scale.dtype, q.scale.shape) == (jnp.float32, (3, 4))
    assert dequantize(q).dtype == jnp.float32
    assert quantize(np.ones(3, np.float32), group_size=16).codes.dtype == E4M3


@pytest.mark.parametrize(("shape", "group_size"), MENU, ids=str)
def test_joining_undoes_splitting(shape, group_size):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    groups = qtensor.split_groups(x, group_size)
    scales = qtensor.scales_shape(shape, group_size)
    columns = shape[-1] if shape else 1
    assert groups.shape == (*(scales or (1,)), max(min(group_size, columns), 1))
    assert float(groups.sum()) == x.sum()
    np.testing.assert_array_equal(qtensor.join_groups(groups, shape), x)


def on_explicit_mesh(x, spec):
    """Puts x on 2 x 4 devices whose axes are part of its type."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_scales_take_the_sharding_of_the_array(spec):
    x = hostile((0.0, 8.0), 0, (16, 256))
    q = quantize(on_explicit_mesh(x, spec), group_size=32)
    expected = P(*spec, *[None] * (2 - len(spec)))
    assert jax.typeof(q.codes).sharding.spec == jax.typeof(q.scale).sharding.spec == expected
    want = quantize(x, group_size=32)
    np.testing.assert_array_equal(q.codes, want.codes)
    np.testing.assert_array_equal(q.scale, want.scale)


@pytest.mark.parametrize(("spec", "parts"), [(P(None, "b"), 4), (P(None, ("a", "b")), 8)], ids=str)
def test_an_explicit_sharding_that_cuts_groups_is_refused_with_a_remedy(spec, parts):
    x = on_explicit_mesh(np.ones((16, 256), np.float32), spec)
    size = 512 // parts
    remedy = rf"into {parts} parts.*groups of {size}.*divides {256 // parts}\."
    with pytest.raises(ValueError, match=remedy):
        quantize(x, group_size=size)


@pytest.mark.parametrize("group_size", [0, -1, 1.5, True, "16", None])
def test_a_wrong_group_size_is_refused(group_size):
    for call in (
        lambda: qtensor.quantize(jnp.ones(4), group_size=group_size),
        lambda: qtensor.dequantize(QTensor(jnp.ones(4, E4M3), jnp.ones(1), group_size)),
        lambda: qtensor.split_groups(jnp.ones(4), group_size),
    ):
        with pytest.raises(ValueError, match=r"group_size must be a positive whole number, not"):
            call()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_only_real_floats_are_quantized(dtype):
    with pytest.raises(TypeError, match=rf"x has dtype {jnp.dtype(dtype).name}.*real floats"):
        qtensor.quantize(jnp.ones(4, dtype), group_size=16)


def test_only_fp8_is_quantized_to():
    with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3"):
        qtensor.quantize(jnp.ones(4), jnp.float16, group_size=16)
