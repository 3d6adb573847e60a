"""Laws of the quantizer: scales, ranges, gradients. Its formats have tests of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks, qtensor
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.quantizer import (
    FITS,
    GRANULARITIES,
    Quantizer,
    Range,
    format_named,
    sqnr_bits,
)

FORMATS = ("INT8", "E4M3", "E2M1", "E0M7", "E8M3", "UE4M4", "INT4:asymmetric")
SHAPE = (32, 72)  # the last group of 32 in a row is a short one
SIGNED = tuple(name for name in FORMATS if not name.startswith("U"))
formats = pytest.mark.parametrize("name", FORMATS)
overs = pytest.mark.parametrize("over", GRANULARITIES)


def values_of(quantizer, x, *noise):
    """What the quantizer returns, from one program: JAX compiles single operations one by one."""
    return jax.jit(quantizer)(x, *noise)


@functools.cache
def fitted(name, over):
    """The program that quantizes an array with the ranges of each fit."""
    return jax.jit(lambda x: {fit: Quantizer(name, over, fit, size=32)(x) for fit in FITS})


BITS_RIGHT = jax.jit(sqnr_bits)


def bits_of(x, quantizer):
    """How many bits of `x` the quantizer gets right."""
    program = jax.jit(lambda x: sqnr_bits(x, quantizer(x)))
    return float(program(x))


def normal(*shape, seed=0):
    """In NumPy, as all that is not tried here: JAX compiles a program for each operation."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@formats
@overs
def test_every_value_is_a_code_times_its_scale(name, over):
    x = normal(6, 40)
    quantizer = Quantizer(name, over, size=16)
    values, covered = jax.jit(lambda x: (quantizer(x), quantizer.range_of(x)))(x)
    values = np.asarray(values, np.float64)
    fmt = quantizer.format
    table = fmt.values[np.isfinite(fmt.values)]
    rows = {
        "tensor": values.reshape(1, -1),
        "channel": values.T,
        "group": np.pad(values, [(0, 0), (0, 8)]).reshape(-1, 16),
        "block": np.pad(values, [(0, 0), (0, 8)]).reshape(-1, 16),
    }[over]
    assert covered.high.shape == (len(rows),)
    for row, low, high in zip(rows, *map(np.asarray, covered), strict=True):
        scale = max(-low, high) / fmt.full_scale
        if name.endswith("asymmetric"):
            scale = (high - low) / (fmt.max - fmt.min)
        if over == "block":
            scale = 2.0 ** np.ceil(np.log2(scale))
        codes = row / scale
        if name.endswith("asymmetric"):
            codes = codes + np.round(fmt.min - low / scale)
        nearest = table[np.abs(codes[:, None] - table).argmin(-1)]
        np.testing.assert_allclose(codes, nearest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_groups_are_those_of_qtensor_and_blocks_those_of_blocks(dtype):
    name, x = {E4M3: "E4M3", E5M2: "E5M2"}[dtype], normal(5, 70)
    groups = jax.jit(lambda x: qtensor.dequantize(qtensor.quantize(x, dtype, group_size=32)))(x)
    found = values_of(Quantizer(name, "group", size=32), x)
    np.testing.assert_allclose(found, groups, rtol=1e-6)
    stored = jax.jit(lambda x: blocks.from_blocks(blocks.to_blocks(x, dtype, size=32), size=32))(x)
    np.testing.assert_array_equal(values_of(Quantizer(name, "block", size=32), x), stored)


@pytest.mark.costly
@formats
@overs
def test_zeros_stay_zero(name, over):
    for values in fitted(name, over)(jnp.zeros(SHAPE)).values():
        np.testing.assert_array_equal(values, 0.0)


@pytest.mark.costly
@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("fit", FITS)
def test_the_result_scales_with_the_input(name, fit):
    x, program = normal(*SHAPE), fitted(name, "tensor")
    for factor in (2.0**-100, 2.0**100):
        np.testing.assert_array_equal(
            program(x * factor)[fit], np.asarray(program(x)[fit]) * factor
        )


@pytest.mark.costly
@formats
def test_channels_do_not_see_each_other(name):
    x = normal(8, 16)
    quantizer = Quantizer(name, "channel", axis=0)
    whole = values_of(quantizer, x)
    program = jax.jit(quantizer)
    for row in range(8):
        alone = program(x[row : row + 1])
        np.testing.assert_allclose(alone, np.asarray(whole)[row : row + 1], rtol=1e-6)
    across = values_of(Quantizer(name, "channel", axis=1), x.T)
    np.testing.assert_allclose(across, np.transpose(whole), rtol=1e-6)


@pytest.mark.costly
@formats
@pytest.mark.parametrize("over", ["tensor", "channel", "group"])
def test_the_search_is_never_worse_than_the_maximum(name, over):
    x = normal(*SHAPE) ** 3
    bits = {fit: BITS_RIGHT(x, values) for fit, values in fitted(name, over)(x).items()}
    assert bits["mse"] >= bits["max"]
    assert bits["mse"] >= bits["percentile"] - 0.02  # its grid may miss the best by so much


def test_the_search_finds_what_a_fine_grid_finds():
    x = normal(64, 64) ** 3
    quantizer = Quantizer("INT4")
    amax = float(np.max(np.abs(x)))

    @jax.jit
    def bits(limit):
        return sqnr_bits(x, quantizer.quantize(x, Range(-limit[None], limit[None])))

    fine = max(float(bits(amax * share)) for share in np.linspace(0.02, 1, 300, dtype=np.float32))
    found = bits_of(x, Quantizer("INT4", fit="mse"))
    assert found > fine - 0.005


def test_a_percentile_is_numpys():
    x = normal(4, 100)
    channels = Quantizer("INT8", "channel", "percentile", axis=0, percentile=90)
    covered = jax.device_get(jax.jit(channels.range_of)(x))
    np.testing.assert_allclose(covered.high, np.quantile(np.abs(x), 0.9, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(covered.low, -covered.high)
    asymmetric = Quantizer("INT8:asymmetric", fit="percentile", percentile=90)
    sides = jax.jit(asymmetric.range_of)(x)
    np.testing.assert_allclose(sides.low, [np.quantile(x, 0.1)], rtol=1e-6)
    np.testing.assert_allclose(sides.high, [np.quantile(x, 0.9)], rtol=1e-6)


def test_the_padding_of_a_short_group_does_not_count():
    x = normal(1, 20)
    groups = Quantizer("INT8", "group", "percentile", size=16, percentile=75)
    short = jax.device_get(jax.jit(groups.range_of)(x))
    np.testing.assert_allclose(short.high[1], np.quantile(np.abs(x[0, 16:]), 0.75), rtol=1e-6)


def test_asymmetric_codes_follow_data_on_one_side():
    """All 16 codes are above zero, where symmetric ones have 7."""
    x = np.abs(normal(64, 64))
    one, both = (bits_of(x, Quantizer(n)) for n in ("INT4:asymmetric", "INT4"))
    assert one > both + 0.9


@pytest.mark.costly
@pytest.mark.parametrize("name", SIGNED)
def test_the_gradient_is_straight_through(name):
    x = normal(4, 32)
    quantizer = Quantizer(name)

    def loss(x):
        values = quantizer(x)
        return jnp.sum(jnp.sin(values)), jnp.cos(values)

    program = jax.jit(jax.grad(loss, has_aux=True))
    gradient, expected = map(np.asarray, program(x))
    inside = np.abs(x) < 0.9 * np.max(np.abs(x))
    np.testing.assert_allclose(gradient[inside], expected[inside], rtol=1e-5, atol=1e-6)


def test_saturated_elements_pass_their_gradient_to_a_learnt_range():
    quantizer, covered = Quantizer("INT4"), Range(jnp.array([-1.0]), jnp.array([1.0]))
    x, weights = jnp.array([0.0, 0.5, 3.0, -4.0]), jnp.array([1.0, 1.0, 2.0, 5.0])

    def loss(x, covered):
        values = quantizer.quantize(x, covered)
        return jnp.sum(weights * values), values

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (of_x, of_range), values = gradients(x, covered)
    np.testing.assert_array_equal(of_x, [1, 1, 0, 0])
    # LSQ: a saturated element moves with the end; 0.5 moves with its rounding error.
    whole = float(of_range.high[0] - of_range.low[0])
    error = float(values[1]) - 0.5
    assert whole == pytest.approx(2 - 5 + error, abs=1e-6)


def test_a_range_can_be_learnt():
    """Gradient descent on the squared error comes near what the search finds."""
    x = normal(4096) ** 3
    quantizer = Quantizer("INT4")

    @jax.jit
    def loss(log_limit):
        limit = jnp.exp(log_limit)[None]
        return jnp.mean((quantizer.quantize(x, Range(-limit, limit)) - x) ** 2)

    step = jax.jit(lambda limit: limit - 0.05 * jax.grad(loss)(limit))
    limit = functools.reduce(lambda limit, _: step(limit), range(200), np.log(np.max(np.abs(x))))
    best = np.mean((np.asarray(values_of(Quantizer("INT4", fit="mse"), x)) - x) ** 2)
    assert loss(limit) < 1.05 * best


def test_stochastic_rounding_is_right_on_average():
    x = np.broadcast_to(normal(1, 50), (512, 50))
    noise = np.broadcast_to((np.arange(512, dtype=np.float32)[:, None] + 0.5) / 512, x.shape)
    quantizer = Quantizer("E2M1", rounding="stochastic")
    values = np.asarray(values_of(quantizer, x, noise))
    np.testing.assert_allclose(values.mean(0), x[0], atol=2e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_result_has_the_dtype_of_the_input(dtype):
    assert jax.eval_shape(Quantizer("E4M3"), normal(3, 4).astype(dtype)).dtype == dtype


def test_a_program_gives_what_single_operations_give():
    x = normal(16, 48)
    quantizer = Quantizer("E3M2", "group", "mse", size=16)
    np.testing.assert_allclose(jax.jit(quantizer)(x), quantizer(x), rtol=1e-6)


def test_bits_that_are_right():
    x = normal(1000)
    assert float(sqnr_bits(x, x * (1 + 2.0**-8))) == pytest.approx(8, abs=1e-3)
    assert sqnr_bits(x, x) == jnp.inf


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("fit", FITS)
def test_ranges_that_are_not_finite_are_refused(value, fit):
    x = normal(4, 4)
    x[1, 1] = value
    with pytest.raises(ValueError, match="range is not finite: the array has a NaN or an inf"):
        Quantizer("E4M3", fit=fit)(x)


def test_empty_ranges_are_refused():
    quantizer = Quantizer("INT8")
    with pytest.raises(ValueError, match=r"range from 1.0 to -1.0 is empty"):
        quantizer.quantize(normal(4), Range(jnp.array([1.0]), jnp.array([-1.0])))
    with pytest.raises(ValueError, match="has no elements"):
        quantizer(jnp.zeros((0, 4)))
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(2,\); .* has 1 scales"):
        quantizer.quantize(normal(4), Range(-jnp.ones(2), jnp.ones(2)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "INT99"}, "bits=99"),
        ({"format": "FP4"}, "does not name a small float"),
        ({"over": "row"}, "over='row' must be one of tensor, channel, group, block"),
        ({"fit": "min"}, "fit='min' must be one of max, percentile, mse"),
        ({"rounding": "up"}, "rounding='up' must be one of"),
        ({"size": 0}, "^size must be a positive"),
        ({"percentile": 50}, "percentile=50 must be above 50"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Quantizer(**{"format": "E4M3"} | settings)


@pytest.mark.parametrize("format", [8, jnp.int8, jnp.float8_e4m3fn, None])
def test_only_formats_are_accepted(format):
    with pytest.raises(TypeError, match="must be a Minifloat, an IntegerFormat or the name"):
        Quantizer(format)


def test_bits_are_those_of_arrays_of_one_shape():
    with pytest.raises(ValueError, match=r"one shape, not \(3, 4\) and \(4,\)"):
        sqnr_bits(jnp.ones((3, 4)), jnp.ones(4))


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"axis=2 is not an axis of an array of shape \(3, 4\)"):
        Quantizer("E4M3", "channel", axis=2)(normal(3, 4))


def test_integers_are_not_quantized():
    with pytest.raises(TypeError, match="x has dtype int32"):
        Quantizer("E4M3")(jnp.arange(4))


def test_formats_are_found_by_name():
    assert format_named("INT4").name == "INT4"
    assert format_named("e3m2").name == "E3M2"


@pytest.mark.parametrize("over", ["group", "block"])
def test_a_group_larger_than_a_row_is_the_row(over):
    """Without filling rows up to that size, which no memory would hold."""
    x = normal(4, 24)
    values = [values_of(Quantizer("INT8", over, size=size), x) for size in (24, 1 << 40)]
    np.testing.assert_array_equal(*values)
