"""Laws of the quantizer: scales, ranges, gradients. Its formats have tests of their own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks
from coat_jax.numerics.formats import E4M3, E5M2, format_of
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.numerics.quantizer import FITS, Quantizer, format_named, sqnr_bits

FORMATS = ("INT8", "E4M3", "E2M1", "E0M7", "E8M3", "UE4M4")
SHAPE = (32, 72)  # the last group of 32 in a row is a short one
SIGNED = tuple(name for name in FORMATS if not name.startswith("U"))


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


@pytest.mark.parametrize(
    ("name", "over"),
    [(name, "channel") for name in FORMATS]
    + list(itertools.product(("E2M1",), ("tensor", "group", "block"))),
)
def test_every_value_is_a_code_times_its_scale(name, over):
    x = normal(6, 40)
    quantizer = Quantizer(name, over, size=16)
    values, limits = jax.jit(lambda x: (quantizer(x), quantizer.limit_of(x)))(x)
    values = np.asarray(values, np.float64)
    fmt = quantizer.format
    table = fmt.values[np.isfinite(fmt.values)]
    rows = {
        "tensor": values.reshape(1, -1),
        "channel": values.T,
        "group": np.pad(values, [(0, 0), (0, 8)]).reshape(-1, 16),
        "block": np.pad(values, [(0, 0), (0, 8)]).reshape(-1, 16),
    }[over]
    for row, limit in zip(rows, np.asarray(limits), strict=True):
        scale = limit / fmt.full_scale
        if over == "block":
            scale = 2.0 ** np.ceil(np.log2(scale))
        codes = row / scale
        nearest = table[np.abs(codes[:, None] - table).argmin(-1)]
        np.testing.assert_allclose(codes, nearest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_blocks_are_those_of_blocks(dtype):
    def both(x):
        stored = blocks.to_blocks(x, dtype, size=32)
        quantizer = Quantizer(format_of(dtype).name, "block", size=32)
        return quantizer(x), blocks.from_blocks(stored, size=32)

    np.testing.assert_array_equal(*jax.jit(both)(normal(5, 70)))


def test_integers_are_even_steps_on_both_sides_of_zero():
    for bits in range(2, 17):
        fmt = format_named(f"INT{bits}")
        assert fmt == Minifloat(0, bits - 1)
        assert (fmt.bits, fmt.label) == (bits, f"INT{bits}")
        codes = fmt.magnitudes / fmt.tiny
        np.testing.assert_array_equal(codes, np.arange(2 ** (bits - 1)))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "over"),
    [("INT8", "tensor"), ("E4M3", "group"), ("E2M1", "block")] + [(n, "channel") for n in FORMATS],
)
def test_zeros_stay_zero_and_the_search_is_never_worse_than_the_maximum(name, over):
    program = fitted(name, over)
    for values in program(np.zeros(SHAPE, np.float32)).values():
        np.testing.assert_array_equal(values, 0.0)
    x = normal(*SHAPE) ** 3
    bits = {fit: BITS_RIGHT(x, values) for fit, values in program(x).items()}
    if over != "block":  # whose scales are powers of two, which the search may miss
        assert bits["mse"] >= bits["max"]
        assert bits["mse"] >= bits["percentile"] - 0.02  # its grid may miss the best by so much


@pytest.mark.costly
@pytest.mark.parametrize("name", SIGNED)
def test_the_result_scales_with_the_input(name):
    x, program = normal(*SHAPE), fitted(name, "channel")
    want = program(x)
    for factor in (2.0**-100, 2.0**100):
        for fit, values in program(x * factor).items():
            np.testing.assert_array_equal(values, np.asarray(want[fit]) * factor)


def test_channels_do_not_see_each_other():
    x = normal(8, 16)
    quantizer = Quantizer("E2M1", "channel", axis=0)
    program = jax.jit(quantizer)
    whole = np.asarray(program(x))
    for row in range(8):
        np.testing.assert_allclose(program(x[row : row + 1])[0], whole[row], rtol=1e-6)
    across = jax.jit(Quantizer("E2M1", "channel", axis=1))(x.T)
    np.testing.assert_allclose(across, whole.T, rtol=1e-6)


def test_the_search_finds_what_a_fine_grid_finds():
    x = normal(64, 64) ** 3
    quantizer, amax = Quantizer("INT4"), np.max(np.abs(x))

    @jax.jit
    def bits(shares):
        ranges = (amax * shares)[:, None]
        quantized = jax.vmap(lambda limit: quantizer.quantize(x, limit))(ranges)
        return jax.vmap(lambda values: sqnr_bits(x, values))(quantized)

    fine = np.max(bits(np.linspace(0.02, 1, 300, dtype=np.float32)))
    assert bits_of(x, Quantizer("INT4", fit="mse")) > fine - 0.005


def test_a_percentile_is_numpys():
    x = normal(4, 100)
    channels = Quantizer("INT8", "channel", "percentile", axis=0, percentile=90)
    limits = jax.jit(channels.limit_of)(x)
    np.testing.assert_allclose(limits, np.quantile(np.abs(x), 0.9, axis=1), rtol=1e-6)
    groups = Quantizer("INT8", "group", "percentile", size=16, percentile=75)
    short = jax.jit(groups.limit_of)(x[:1, :20])  # its padding does not count
    np.testing.assert_allclose(short[1], np.quantile(np.abs(x[0, 16:20]), 0.75), rtol=1e-6)


@pytest.mark.parametrize("name", ["INT8", "E2M1"])
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


def test_saturated_elements_pass_their_gradient_to_a_learnt_limit():
    quantizer, limit = Quantizer("INT4"), jnp.array([1.0])
    x, weights = jnp.array([0.0, 0.5, 3.0, -4.0]), jnp.array([1.0, 1.0, 2.0, 5.0])

    def loss(x, limit):
        values = quantizer.quantize(x, limit)
        return jnp.sum(weights * values), values

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (of_x, of_limit), values = gradients(x, limit)
    np.testing.assert_array_equal(of_x, [1, 1, 0, 0])
    # LSQ: a saturated element moves with the limit; 0.5 moves with its rounding error.
    error = float(values[1]) - 0.5
    assert float(of_limit[0]) == pytest.approx(2 - 5 + error, abs=1e-6)


def test_stochastic_rounding_is_right_on_average():
    x = np.broadcast_to(normal(1, 50), (512, 50))
    noise = np.broadcast_to((np.arange(512, dtype=np.float32)[:, None] + 0.5) / 512, x.shape)
    values = np.asarray(jax.jit(Quantizer("E2M1"))(x, noise))
    np.testing.assert_allclose(values.mean(0), x[0], atol=2e-3)


def test_bits_that_are_right_and_dtypes():
    x = normal(1000)
    assert float(sqnr_bits(x, x * (1 + 2.0**-8))) == pytest.approx(8, abs=1e-3)
    assert sqnr_bits(x, x) == jnp.inf
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert jax.eval_shape(Quantizer("e4m3"), x.astype(dtype)).dtype == dtype


@pytest.mark.parametrize("fit", FITS)
def test_limits_that_are_not_finite_are_refused(fit):
    x = normal(4, 4)
    for x[1, 1] in (np.nan, np.inf) if fit != "mse" else (np.inf,):
        with pytest.raises(ValueError, match="limit is not finite: the array has a NaN or an inf"):
            Quantizer("E4M3", fit=fit).limit_of(x)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "INT99"}, "must have from 2 to 16 bits"),
        ({"format": "FP4"}, "does not name a small float"),
        ({"format": jnp.float8_e4m3fn}, "format=float8_e4m3fn must be a Minifloat"),
        ({"over": "row"}, "over='row' must be 'tensor' or 'channel' or 'group' or 'block'"),
        ({"fit": "min"}, "fit='min' must be 'max' or 'percentile' or 'mse'"),
        ({"percentile": 50}, "percentile=50 must be a number above 50"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Quantizer(**{"format": "E4M3"} | settings)


def test_arrays_that_do_not_fit_are_refused():
    x, e4m3 = normal(4), Quantizer("E4M3")
    one = jnp.array([1.0])
    for call, said in (
        (lambda: e4m3.quantize(x, -one), r"limit of -1.0 is negative"),
        (lambda: e4m3(jnp.zeros((0, 4))), "has no elements"),
        (lambda: e4m3.quantize(x, jnp.ones(2)), r"\(2,\).* has 1 scales"),
        (lambda: sqnr_bits(jnp.ones((3, 4)), x), r"one shape, not \(3, 4\) and \(4,\)"),
        (lambda: Quantizer("E4M3", "channel", axis=2)(normal(3, 4)), r"axis=2 .*shape \(3, 4\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            call()
