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


def trained(txs, steps=4):
    """Parameters and states after some steps, all in one program."""
    drawn = np.random.default_rng(1).normal(size=(steps, 8, 160)).astype(np.float32)

    def step(walks, gradients):
        stepped = []
        for tx, (params, state) in zip(txs, walks, strict=True):
            updates, after = tx.update({"w": gradients}, state, params)
            stepped.append((optax.apply_updates(params, updates), after))
        return stepped, None

    begin = [(PARAMS, tx.init(PARAMS)) for tx in txs]
    walks, _ = jax.jit(lambda begin: jax.lax.scan(step, begin, drawn))(begin)
    return [(np.asarray(params["w"]), state) for params, state in walks]


@pytest.mark.costly
@pytest.mark.parametrize("stochastic", [False, True])
def test_steps_are_those_in_the_fp8_dtypes(stochastic):
    settings = {"min_size": 0, "stochastic": stochastic}
    txs = []
    for first, second in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        real = Storage(first=first, second=second, **settings)
        twin = Storage(first=TWINS[first], second=TWINS[second], **settings)
        assert twin.simulated
        assert not real.simulated
        txs += [coat.optax.fp8_adamw(1e-2, storage=storage) for storage in (real, twin)]
    txs += [
        coat.optax.scale_by_fp8_muon(ns_steps=1, storage=Storage(first=first, **settings))
        for first in (E4M3, TWINS[E4M3])
    ]
    ends = [params for params, _ in trained(txs)]
    for one, other in zip(ends[::2], ends[1::2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # powers are rounded


def test_codes_are_values_of_the_format_and_more_bits_come_nearer_to_exact_moments():
    formats = (("E4M1", "UE4M2"), (TWINS[E4M3], "UE4M4"), ("E4M7", "UE5M7"))
    txs = [
        coat.optax.fp8_adamw(1e-2, storage=Storage(first=first, second=second, min_size=0))
        for first, second in formats
    ]
    (exact, _), *simulated = trained([optax.adamw(1e-2), *txs])
    for names, (_, (state, *_)) in zip(formats, simulated, strict=True):
        for moment, name in zip((state.mu, state.nu), names, strict=True):
            codes = moment.codes["w"]
            assert codes.dtype == jnp.bfloat16
            assert set(np.asarray(codes, np.float64).ravel()) <= set(minifloat(name).values)
    errors = [float(np.abs(params - exact).mean()) for params, _ in simulated]
    assert errors[0] > 2 * errors[1] > 8 * errors[2]


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


UNKNOWN = "is not .* To simulate another one, first and second also take a name like 'E3M4', with "
UNKNOWN += (
    r"up to 8 exponent and 7 mantissa bits \(symmetric integers of b bits are E0M\(b-1\): INT8"
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"first": "UE4M4"}, "first='UE4M4' cannot be simulated: .* first with a sign"),
        ({"first": "E4M8"}, "up to 7 mantissa bits"),
        ({"second": "UE8M0"}, "that have a zero"),
        ({"other": "E3M4"}, "other='E3M4' cannot be simulated: only first and second can"),
        ({"other": "INT8"}, f"other='INT8' {UNKNOWN}"),
        ({"first": "INT4"}, f"first='INT4' {UNKNOWN}"),
        ({"second": "E9M2"}, f"second='E9M2' {UNKNOWN}"),
    ],
)
def test_formats_that_cannot_hold_moments_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Storage(**settings)


def test_an_integer_of_b_bits_is_named_by_its_magnitude():
    """As the errors say; the largest code of a symmetric integer is 2^(b - 1) - 1."""
    for bits in range(2, 9):
        fmt = minifloat(f"E0M{bits - 1}")
        codes = fmt.magnitudes / fmt.tiny
        np.testing.assert_array_equal(codes, np.arange(2 ** (bits - 1)))
        assert Storage(first=fmt.name).first == coat.Precision(forward=fmt.name).forward == fmt


def test_the_kernel_is_for_8_bits_only():
    adamw = coat.optax.fp8_adamw(1e-2, storage=Storage(first="E2M5"), implementation="triton")
    tx = coat.optax.in_place(adamw)
    without_triton = ImportError, r"needs the packages triton"
    error, said = (ValueError, "simulated formats") if find_spec("jax_triton") else without_triton
    with pytest.raises(error, match=said):
        tx.step(PARAMS, PARAMS, tx.init(PARAMS))
