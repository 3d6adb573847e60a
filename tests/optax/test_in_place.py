"""`in_place` gives any optax transformation the signature, and the laws, of the fused step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.optax import InPlaceState, fused_fp8_adamw, in_place


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = {"w": (128, 128), "b": (128,)}
    return {
        name: jax.device_put(rng.standard_normal(s).astype(dtype)) for name, s in shapes.items()
    }


def assert_equal(got, wanted):
    def numbers(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_array_equal(numbers(a), numbers(b))


TRANSFORMATIONS = {
    "lion": lambda: optax.lion(1e-3),
    "adamw with a schedule": lambda: optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)),
    "compressed lion": lambda: coat.optax.compress(optax.lion(1e-3)),
    "fp8_adamw": lambda: coat.optax.fp8_adamw(1e-3),
    "chain": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, momentum=0.9)),
    "partition": lambda: optax.partition(
        {"large": coat.optax.compress(optax.adam(1e-3)), "small": optax.sgd(1e-3)},
        lambda params: {name: "large" if name == "w" else "small" for name in params},
    ),
    "random keys": lambda: optax.noisy_sgd(1e-3, key=jax.random.key(0)),
    "muon": lambda: optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_it_steps_as_the_transformation_does(make):
    tx, optimizer = make(), in_place(make())
    params, wanted = tree(0), tree(0)
    state, of_tx = optimizer.init(params), tx.init(wanted)
    for i in range(1, 4):
        params, state = optimizer.step(params, tree(i), state, grad_scale=0.5)
        updates, of_tx = tx.update(jax.tree.map(lambda g: g * 0.5, tree(i)), of_tx, wanted)
        wanted = optax.apply_updates(wanted, updates)
    assert_equal(params, wanted)
    assert_equal(state, InPlaceState(jnp.int32(3), of_tx))


@pytest.mark.costly
@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_skipped_step_changes_no_bit(make, dtype):
    optimizer = in_place(make(), round_params=True)
    params, state = optimizer.step(tree(0, dtype), tree(1, dtype), optimizer.init(tree(0, dtype)))
    hostile = jax.tree.map(lambda g: g.at[0].set(jnp.nan), tree(2, dtype))
    skipped = optimizer.step(params, hostile, state, skip=jnp.bool_(True))
    assert_equal(skipped, (params, state))
    taken = optimizer.step(params, tree(2, dtype), state, skip=jnp.bool_(False))
    assert_equal(taken, optimizer.step(params, tree(2, dtype), state))


@pytest.mark.costly
@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_parameters_and_state_are_donated(make):
    optimizer, params = in_place(make()), tree(0)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s, g, skip: optimizer.step(p, g, s, skip=skip), donate_argnums=(0, 1))
    used = step.lower(params, state, tree(1), jnp.bool_(False)).compile().memory_analysis()
    leaves = jax.tree.leaves((params, state))
    # Of XLA's buffers those of arrays without axes may be shared.
    assert used.alias_size_in_bytes >= sum(leaf.nbytes for leaf in leaves if leaf.ndim)


def test_moments_of_bf16_parameters_are_in_fp32():
    state = in_place(optax.adam(1e-3)).init(tree(0, jnp.bfloat16))
    assert state.inner[0].mu["w"].dtype == jnp.float32
    params, _ = in_place(optax.adam(1e-3)).step(tree(0, jnp.bfloat16), tree(1, jnp.bfloat16), state)
    assert params["w"].dtype == jnp.bfloat16


def test_bf16_parameters_are_rounded_as_those_of_the_fused_step_are():
    """A small update moves some of them; rounded to nearest it moves none."""
    params = {"w": jnp.ones((128, 128), jnp.bfloat16)}
    grads = {"w": jnp.ones((128, 128), jnp.bfloat16)}
    moved = {}
    for rounds in (True, False):
        optimizer = in_place(optax.sgd(1e-4), round_params=rounds)
        after, _ = optimizer.step(params, grads, optimizer.init(params))
        moved[rounds] = float(jnp.mean(after["w"] != params["w"]))
    assert moved[False] == 0
    # A step of 1e-4 is 2^-8 / 39, the distance to the next number below 1.
    assert moved[True] == pytest.approx(1e-4 * 2**8, rel=0.2)


def test_it_has_the_signature_of_the_fused_step():
    """Whoever is given either can use it."""
    for optimizer in (in_place(optax.adamw(1e-3)), fused_fp8_adamw(1e-3)):
        state = optimizer.init(tree(0))
        result = optimizer.step(tree(0), tree(1), state, grad_scale=jnp.float32(1), skip=False)
        assert jax.tree.structure(result) == jax.tree.structure((tree(0), state))


def test_extra_arguments_reach_the_transformation():
    optimizer = in_place(
        optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    )
    params, state = tree(0), optimizer.init(tree(0))
    for _ in range(4):
        params, state = optimizer.step(params, tree(1), state, value=1.0)
    assert state.inner[1].scale < 1


def changes(after):
    return optax.GradientTransformation(
        lambda params: {"m": jnp.zeros(3)}, lambda g, state, params: (g, after)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: in_place(optax.lion), TypeError, r"in_place takes .* in_place\(optax.lion\(1e-4"),
        (lambda: in_place(optax.lion(1e-3), round_params=1), TypeError, "round_params=1 must be"),
        (lambda: in_place(optax.lion(1e-3), seed=-1), ValueError, "seed=-1 must be"),
        (
            lambda: in_place(optax.lion(1e-3)).step(tree(0), tree(1), optax.lion(1).init(tree(0))),
            TypeError,
            "must be an InPlaceState",
        ),
        (
            lambda: step_once(changes({"m": jnp.zeros(3, jnp.int32)})),
            ValueError,
            r"changed state\['m'\] from float32\[3\] to int32\[3\]",
        ),
        (lambda: step_once(changes({})), ValueError, "changed the structure of its state"),
        (
            lambda: in_place(optax.sgd(1.0)).init({"w": jnp.arange(3)}),
            TypeError,
            r"\['w'\] has dtype int32; only floats are optimized",
        ),
        (
            lambda: in_place(optax.sgd(1.0)).step(
                tree(0), jax.tree.map(jnp.int32, tree(1)), in_place(optax.sgd(1.0)).init(tree(0))
            ),
            TypeError,
            "has dtype int32",
        ),
        (
            lambda: in_place(fused_fp8_adamw(1e-3)),
            TypeError,
            r"tx instead of in_place\(tx\)",
        ),
    ],
)
def test_states_and_transformations_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_complex_parameters_are_stepped_as_by_the_transformation():
    params, grads = {"w": jnp.ones(4, jnp.complex64)}, {"w": jnp.full(4, 1 + 1j, jnp.complex64)}
    for tx in (optax.adam(1e-2), optax.contrib.split_real_and_imaginary(optax.adam(1e-2))):
        optimizer = in_place(tx)
        got, _ = optimizer.step(params, grads, optimizer.init(params))
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(got["w"], optax.apply_updates(params, updates)["w"], rtol=1e-6)


def test_integers_are_left_to_a_transformation_that_masks_them():
    params = {"w": jnp.ones(4), "table": jnp.arange(4)}
    labels = {"w": "train", "table": "keep"}
    tx = optax.partition({"train": optax.adam(1e-2), "keep": optax.set_to_zero()}, labels)
    optimizer = in_place(tx)
    grads = {"w": jnp.ones(4), "table": jnp.zeros(4, jnp.int32)}
    got, _ = optimizer.step(params, grads, optimizer.init(params))
    np.testing.assert_array_equal(got["table"], params["table"])
    np.testing.assert_allclose(got["w"], 0.99, rtol=1e-6)


def test_gradients_of_integers_are_refused_with_a_remedy():
    """optax cannot add them to parameters either."""
    params = {"w": jnp.ones(4), "table": jnp.arange(4)}
    tx = optax.masked(optax.adam(1e-2), {"w": True, "table": False})
    optimizer = in_place(tx)
    grads = jax.grad(lambda params: jnp.sum(params["w"]), allow_int=True)(params)
    with pytest.raises(TypeError, match="float0"):
        optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    with pytest.raises(TypeError, match=r"\['table'\] has dtype float0, .*jnp.zeros_like"):
        optimizer.step(params, grads, optimizer.init(params))
    grads["table"] = jnp.zeros_like(params["table"])
    got, _ = optimizer.step(params, grads, optimizer.init(params))
    np.testing.assert_array_equal(got["table"], params["table"])


def step_once(tx):
    optimizer = in_place(tx)
    return optimizer.step(tree(0), tree(1), optimizer.init(tree(0)))


def test_gradients_are_not_broadcast():
    """optax would add a vector to each row of a matrix."""
    params = {"w": jnp.ones((4, 128))}
    optimizer = in_place(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"gradients\['w'\] has shape \(128,\)"):
        optimizer.step(params, {"w": jnp.ones(128)}, optimizer.init(params))
