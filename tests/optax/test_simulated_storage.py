"""Laws of moments in formats that no hardware has.

What is stored of a moment is its share of the largest of a group, so the bias of a format does not
matter. E4M3 and E5M2 with another bias must therefore give what the FP8 dtypes give, step by step.
"""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.numerics import expansion, noise
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.minifloat import minifloat
from coat_jax.storage import Storage

PARAMS = {"w": jax.device_put(np.float32(np.random.default_rng(0).normal(size=(8, 160))))}
TWINS = {E4M3: "E4M3:bias=6", E5M2: "E5M2:bias=17"}


def trained(tx, steps=6):
    """Parameters after some steps."""
    rng = np.random.default_rng(1)
    update, params, state = jax.jit(tx.update), PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        gradients = {"w": jnp.asarray(rng.normal(size=(8, 160)), jnp.float32)}
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"]), state


@pytest.mark.costly
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(("first", "second"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_adam_steps_as_in_the_fp8_dtypes(first, second, stochastic):
    settings = {"min_size": 0, "stochastic": stochastic}
    real = Storage(first=first, second=second, **settings)
    twin = Storage(first=TWINS[first], second=TWINS[second], **settings)
    assert twin.simulated
    assert not real.simulated
    one, _ = trained(coat.optax.fp8_adamw(1e-2, storage=real))
    other, _ = trained(coat.optax.fp8_adamw(1e-2, storage=twin))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # powers are rounded


def test_muon_steps_as_in_the_fp8_dtypes():
    one, other = (
        trained(coat.optax.scale_by_fp8_muon(storage=Storage(first=first, min_size=0)), 3)[0]
        for first in (E4M3, TWINS[E4M3])
    )
    np.testing.assert_array_equal(one, other)


def test_more_mantissa_bits_come_nearer_to_exact_moments():
    exact, _ = trained(optax.adamw(1e-2))
    errors = []
    for first, second in (("E4M1", "UE4M2"), ("E4M3", "UE4M4"), ("E4M7", "UE5M7")):
        storage = Storage(first=first, second=second, min_size=0)
        errors.append(
            float(np.abs(trained(coat.optax.fp8_adamw(1e-2, storage=storage))[0] - exact).mean())
        )
    assert errors[0] > 2 * errors[1] > 8 * errors[2]


def test_codes_are_values_of_the_format():
    storage = Storage(first="E2M5", second="UE4M4", min_size=0)
    _, state = trained(coat.optax.scale_by_fp8_adam(storage=storage), 2)
    for moment, name in ((state.mu, "E2M5"), (state.nu, "UE4M4")):
        codes = moment.codes["w"]
        assert codes.dtype == jnp.bfloat16
        assert set(np.asarray(codes, np.float64).ravel()) <= set(minifloat(name).values)


@pytest.mark.parametrize("name", ["E2M5", "UE4M4", "E3M4:no_subnormals", "E6M1"])
def test_stored_values_are_right_on_average(name):
    fmt = minifloat(name)
    x = np.float32(np.exp(np.random.default_rng(0).normal(size=(1, 128))))
    x = np.broadcast_to(x, (4096, 128))

    @jax.jit
    def stored(x):
        dither = noise.uniform(noise.leaf_key(0, 1, 0), x.shape, run=128)
        return expansion.decode(expansion.encode(x, fmt, noise=dither), dtype=fmt)

    decoded = np.asarray(stored(x))
    error = 6 * decoded.std(0) / 64 + 2e-3 * x[0]
    assert (np.abs(decoded.mean(0) - x[0]) <= error).all()


def test_a_format_may_be_a_name_of_a_dtype_too():
    assert Storage(first="e4m3", second="E5M2") == Storage(first=E4M3, second=E5M2)
    assert Storage(first="int8", second="uint8") == Storage()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"first": "UE4M4"}, "'UE4M4' has no sign, and first moments have both"),
        ({"first": "E4M8"}, "up to 7 mantissa bits"),
        ({"second": "UE8M0"}, "that have a zero"),
        ({"other": "E3M4"}, "other='E3M4' cannot be simulated: only first and second can"),
    ],
)
def test_formats_that_cannot_hold_moments_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Storage(**settings)


@pytest.mark.parametrize("field", ["first", "second"])
@pytest.mark.parametrize("name", ["INT8", "INT4", "E9M2", "E3"])
def test_an_unknown_format_is_answered_with_those_that_are_simulated(field, name):
    said = rf"{field}='{name}' is not .*; or, to simulate another one, a name like 'E3M4', with up "
    said += r"to 8 exponent and 7 mantissa bits \(symmetric integers of b bits are E0M\(b-1\): INT8"
    with pytest.raises(ValueError, match=said):
        Storage(**{field: name})


@pytest.mark.parametrize("bits", range(2, 9))
def test_an_integer_of_b_bits_is_named_by_its_magnitude(bits):
    """As the errors say; the largest code of a symmetric integer is 2^(b - 1) - 1."""
    fmt = minifloat(f"E0M{bits - 1}")
    largest = 2 ** (bits - 1) - 1
    codes = fmt.magnitudes / fmt.tiny
    np.testing.assert_array_equal(codes, np.arange(largest + 1))
    assert Storage(first=fmt.name).first == coat.Precision(forward=fmt.name).forward == fmt


def test_other_moments_are_not_simulated():
    with pytest.raises(ValueError, match=r"other='INT8' is not .* \(more range\)\.$"):
        Storage(other="INT8")


def test_the_kernel_is_for_8_bits_only():
    tx = coat.optax.fused_fp8_adamw(1e-2, storage=Storage(first="E2M5"), implementation="triton")
    without_triton = ImportError, r"needs the packages triton"
    error, said = (ValueError, "simulated formats") if find_spec("jax_triton") else without_triton
    with pytest.raises(error, match=said):
        tx.step(PARAMS, PARAMS, tx.init(PARAMS))
