"""`in_place` gives any optax transformation the signature, and the laws, of the fused step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_equal, normal

import coat_jax as coat
from coat_jax.optax import InPlaceState, fp8_adamw, in_place


def tree(seed):
    rng = np.random.default_rng(seed)
    return {"w": normal(rng, (128, 128)), "b": normal(rng, (128,))}


TRANSFORMATIONS = {
    "adamw with a schedule": lambda: optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)),
    "compressed lion": lambda: coat.optax.compress(optax.lion(1e-3)),
    "partition": lambda: optax.partition(
        {"large": coat.optax.compress(optax.adam(1e-3)), "small": optax.sgd(1e-3)},
        lambda params: {name: "large" if name == "w" else "small" for name in params},
    ),
    "random keys": lambda: optax.noisy_sgd(1e-3, key=jax.random.key(0)),
}


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_it_steps_as_the_transformation_does_and_a_skipped_step_changes_no_bit(make):
    tx, optimizer = make(), in_place(make())
    params, wanted = tree(0), tree(0)
    state, of_tx = optimizer.init(params), tx.init(wanted)
    hostile = jax.tree.map(lambda g: g.at[0].set(jnp.nan), tree(9))
    for i in range(1, 3):
        params, state = optimizer.step(
            params, tree(i), state, grad_scale=0.5, skip=jnp.bool_(False)
        )
        updates, of_tx = tx.update(jax.tree.map(lambda g: g * 0.5, tree(i)), of_tx, wanted)
        wanted = optax.apply_updates(wanted, updates)
        skipped = optimizer.step(params, hostile, state, skip=jnp.bool_(True))
        assert_equal(skipped, (params, state))
    assert_equal(params, wanted)
    assert_equal(state, InPlaceState(jnp.int32(2), of_tx))


def test_bf16_parameters_have_moments_in_fp32_and_are_rounded_as_those_of_the_fused_step():
    """A small update moves some of them; rounded to nearest it moves none."""
    ones = {"w": jnp.ones((128, 128), jnp.bfloat16)}
    moved = {}
    for how in ("stochastic", "nearest"):
        optimizer = in_place(optax.sgd(1e-4, momentum=0.9), round_params=how)
        after, state = optimizer.step(ones, ones, optimizer.init(ones))
        assert after["w"].dtype == jnp.bfloat16
        assert state.inner[0].trace["w"].dtype == jnp.float32
        moved[how] = float(jnp.mean(after["w"] != ones["w"]))
    assert moved["nearest"] == 0
    # A step of 1e-4 is 2^-8 / 39, the distance to the next number below 1.
    assert moved["stochastic"] == pytest.approx(1e-4 * 2**8, rel=0.2)


def test_extra_arguments_reach_the_transformation():
    optimizer = in_place(
        optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    )
    params, state = tree(0), optimizer.init(tree(0))
    for _ in range(4):
        params, state = optimizer.step(params, tree(1), state, value=1.0)
    assert state.inner[1].scale < 1


def test_complex_parameters_are_stepped_as_by_the_transformation():
    params, grads = {"w": jnp.ones(4, jnp.complex64)}, {"w": jnp.full(4, 1 + 1j, jnp.complex64)}
    for tx in (optax.adam(1e-2), optax.contrib.split_real_and_imaginary(optax.adam(1e-2))):
        optimizer = in_place(tx)
        got, _ = optimizer.step(params, grads, optimizer.init(params))
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(got["w"], optax.apply_updates(params, updates)["w"], rtol=1e-6)


def test_integers_are_left_to_a_transformation_that_masks_them():
    """JAX's own gradients of them are refused with a remedy; optax cannot add them either."""
    params = {"w": jnp.ones(4), "table": jnp.arange(4)}
    optimizer = in_place(optax.masked(optax.adam(1e-2), {"w": True, "table": False}))
    state = optimizer.init(params)
    grads = jax.grad(lambda params: jnp.sum(params["w"]), allow_int=True)(params)
    with pytest.raises(TypeError, match=r"\['table'\] has dtype .* float0, .*jnp.zeros_like"):
        optimizer.step(params, grads, state)
    grads["table"] = jnp.zeros_like(params["table"])
    got, _ = optimizer.step(params, grads, state)
    np.testing.assert_array_equal(got["table"], params["table"])
    np.testing.assert_allclose(got["w"], 0.99, rtol=1e-6)


def step_once(tx, grads=None):
    optimizer = in_place(tx)
    grads = tree(1) if grads is None else grads
    return optimizer.step(tree(0), grads, optimizer.init(tree(0)))


def changes(after):
    return optax.GradientTransformation(
        lambda params: {"m": jnp.zeros(3)}, lambda g, state, params: (g, after)
    )


SGD = optax.sgd(1.0)
REFUSED = {
    "function.* has no attribute 'init'": lambda: in_place(optax.lion),
    "has no attribute 'update'": lambda: step_once(in_place(SGD)),
    "seed=-1 must be": lambda: in_place(SGD, seed=-1),
    "state.count is missing. The state was made by another": lambda: in_place(SGD).step(
        tree(0), tree(1), SGD.init(tree(0))
    ),
    r"state\['m'\] is int32\[3\] instead of float32\[3\]. .* changed its own state": (
        lambda: step_once(changes({"m": jnp.zeros(3, jnp.int32)}))
    ),
    r"state\['m'\] is missing. .* changed its own state": lambda: step_once(changes({})),
    r"\['w'\] has dtype int32. Only floats are": lambda: in_place(SGD).init({"w": jnp.arange(3)}),
    "has dtype int32": lambda: step_once(SGD, jax.tree.map(jnp.int32, tree(1))),
    # optax would add a vector to each row of a matrix.
    r"gradients\['w'\] is \[128\] instead": lambda: step_once(
        SGD, dict.fromkeys("wb", jnp.ones(128))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_states_and_transformations_that_do_not_fit_are_refused(message):
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        REFUSED[message]()


def test_a_chain_with_fp8_adamw_is_logged_as_not_fused(caplog):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), fp8_adamw(1e-3))
    for tx in (fp8_adamw(1e-3), coat.optax.fp8_muon(1e-3), clipped):
        assert caplog.text == ""
        in_place(tx).init({"w": jnp.ones((4, 4))})
    assert "use in_place(fp8_adamw(..)), and clip by the step's grad_scale" in caplog.text
