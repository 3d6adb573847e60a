"""Statistics of stored moments, on states made by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import coat_jax as coat
from coat_jax import E4M3, telemetry
from coat_jax.errors import UserError
from coat_jax.numerics.expansion import Expanded
from coat_jax.optax.adam_state import ScaleByFP8AdamState
from coat_jax.telemetry.moments import moment_sums, report_moments

TINY = 2.0**-9


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
