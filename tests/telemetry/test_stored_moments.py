"""Statistics of stored moments, and the error of directions, on states made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import coat_jax as coat
from coat_jax import E4M3, Storage, telemetry
from coat_jax.errors import UserError
from coat_jax.numerics.expansion import Expanded
from coat_jax.optax.adam_state import ScaleByFP8AdamState
from coat_jax.telemetry.moments import (
    Decay,
    Shadow,
    direction_error,
    moment_sums,
    next_shadow,
    read_rows,
    report_moments,
    some_rows,
)

TINY = 2.0**-9
DECAY = Decay(0.9, 0.95, 1e-8)


def stored(codes, exponent_x16):
    """One moment of one parameter of a layer."""
    codes = jnp.asarray(codes, E4M3)
    groups = (*codes.shape[:-1], 1)
    exponent_x16 = jnp.broadcast_to(jnp.asarray(exponent_x16, jnp.uint8), groups)
    return Expanded({"w": codes}, {"w": jnp.ones(groups)}, {"w": exponent_x16})


def test_codes_at_zero_and_at_the_floor_are_counted():
    mu = stored([[0.0, TINY, -TINY, 2 * TINY], [448.0, 1.0, 2.0, 3.0]], [[16], [48]])
    nu = stored([[0.0] * 4, [TINY] * 4], [[8], [8]])
    found = telemetry.moments(ScaleByFP8AdamState(jnp.int32(1), mu, nu))
    assert found == {"w/mu": (1 / 8, 2 / 8, 2.0), "w/nu": (0.5, 0.5, 0.5)}


def test_layers_in_one_array_have_statistics_of_their_own():
    mu = stored([[[0.0] * 4], [[1.0] * 4]], [[[16]], [[32]]])
    state = ScaleByFP8AdamState(jnp.int32(1), mu, mu)
    found = report_moments(jax.device_get(moment_sums(state, ("w",))))
    assert found["w/0/mu"] == (1.0, 0.0, 1.0)
    assert found["w/1/mu"] == (0.0, 0.0, 2.0)


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (coat.optax.fp8_adamw(1e-3), {"mu", "nu"}),
        (optax.chain(optax.clip(1.0), coat.optax.compress(optax.lion(1e-3))), {"mu"}),
        (coat.optax.compress(optax.noisy_sgd(1e-3, key=jax.random.key(0))), set()),
        (coat.optax.compress(optax.sgd(1e-3, momentum=0.9)), {"trace"}),
        (coat.optax.in_place(coat.optax.fp8_adamw(1e-3)), {"mu", "nu"}),
        (optax.adamw(1e-3), set()),
    ],
)
def test_stored_moments_are_found_in_any_state(tx, names):
    """Of a large parameter, which may be all there is; a small one's are in FP32."""
    large, small = jnp.ones((256, 128)), jnp.ones(128)
    found = moment_sums(tx.init({"w": large, "b": small}))
    assert set(found) == {f"w/{name}" for name in names}
    assert set(moment_sums(tx.init(large), ("w",))) == names


def test_moments_of_the_same_name_are_numbered():
    """In the order of the chain; here only the first one is not zero."""
    chain = optax.chain(optax.trace(0.9), optax.scale(0.0), optax.trace(0.99))
    tx, params = coat.optax.compress(chain), {"w": jnp.ones((256, 128))}
    _, state = tx.update(params, tx.init(params), params)
    found = telemetry.moments(state)
    assert {name: of.zero for name, of in found.items()} == {"w/trace": 0.0, "w/trace_1": 1.0}


def test_the_state_of_an_nnx_optimizer_is_its_opt_state():
    model = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    for tx in (coat.optax.fp8_adamw(1e-3), coat.optax.compress(optax.lion(1e-3))):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        assert "kernel/mu" in moment_sums(optimizer.opt_state)
        with pytest.raises(
            UserError, match=r"codes, amax, exponent_x16 as keys.*optimizer\.opt_state"
        ):
            telemetry.moments(nnx.state(optimizer))


def shadow(m, v):
    return Shadow(jnp.asarray(m, jnp.float32), jnp.asarray(v, jnp.float32))


def test_a_second_moment_of_zero_counts_as_far_as_a_direction_can_go():
    exact, lost = shadow([1.0], [1.0]), shadow([1.0], [0.0])
    limit = (1 - 0.9) / np.sqrt((1 - 0.95) * (1 - 0.81 / 0.95))
    error = direction_error(lost, exact, jnp.int32(10_000), DECAY)
    np.testing.assert_allclose(error, limit - 1, rtol=1e-5)
    assert direction_error(lost, exact, jnp.int32(1), DECAY) == 0  # both give the sign
    none = shadow([0.0], [0.0])
    assert direction_error(none, none, jnp.int32(3), DECAY) == 0


def test_fp32_moments_follow_as_adam_does():
    gradients = [jnp.asarray([0.5, -2.0]), jnp.asarray([0.25, 1.0])]
    of_adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    state, followed_so_far = of_adam.init(gradients[0]), shadow([0.0, 0.0], [0.0, 0.0])
    for g in gradients:
        _, state = of_adam.update(g, state)
        followed_so_far = next_shadow(followed_so_far, g, DECAY)
    np.testing.assert_allclose(followed_so_far.m, state.mu, rtol=1e-6)
    np.testing.assert_allclose(followed_so_far.v, state.nu, rtol=1e-6)


def test_one_step_of_the_optimizer_has_the_error_of_its_codes():
    """A few percent: E4M3 rounds within 2^-4, and expansion divides that by k."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((128, 256))}
    tx = coat.optax.scale_by_fp8_adam(b1=0.9, b2=0.95)
    update, state = jax.jit(tx.update), tx.init(params)
    storage = Storage()

    @jax.jit
    def read(state):
        return read_rows(storage, [Expanded(*(t["w"] for t in m)) for m in (state.mu, state.nu)], 8)

    for _ in range(3):
        grads = {"w": jnp.asarray(rng.standard_normal((128, 256)), jnp.float32)}
        before = read(state)
        _, state = update(grads, state)
    exact = next_shadow(before, some_rows(grads["w"], 8), DECAY)
    error = direction_error(read(state), exact, state.count, DECAY)
    assert 0.002 < error < 0.06
    assert direction_error(before, exact, state.count, DECAY) > 0.3


def test_rows_are_those_of_the_middle_matrix():
    x = np.arange(5 * 7 * 3).reshape(5, 7, 3)
    for got, wanted in (
        (some_rows(x, 4), x[2, :4]),
        (some_rows(x[0], 100), x[0]),
        (some_rows(x[0, 0], 2), x[0, 0]),
    ):
        np.testing.assert_array_equal(got, wanted)


def test_the_error_of_a_direction_is_that_of_moments_without_bias():
    """At the first step the moments are a tenth and a thousandth of what they stand for."""
    g = np.float32([[1.0, -2.0, 0.5, 0.25]])
    exact = Shadow(0.1 * g, 0.001 * g**2)
    stored = exact._replace(m=0.09 * g, v=0.00081 * g**2 * np.float32([1, 1, 0, 1]))
    decay = Decay(0.9, 0.999, 0.5)
    found = direction_error(stored, exact, jnp.int32(1), decay)
    wanted = g / (np.abs(g) + 0.5)
    got = 0.9 * g / (0.9 * np.abs(g) * [1, 1, 0, 1] + 0.5)
    got = np.clip(got, -1, 1)  # no gradient moves a parameter further at the first step
    np.testing.assert_allclose(
        found, np.linalg.norm(got - wanted) / np.linalg.norm(wanted), rtol=1e-4
    )
