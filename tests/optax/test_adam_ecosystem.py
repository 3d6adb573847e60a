"""fp8_adamw inside optax's wrappers: each must find a transformation like any other.

The law is always the same: wrapped, it does exactly what it does alone on what the wrapper hands
on. One leaf, in FP8, is enough to see that.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from coat_jax.optax import Storage, fp8_adamw, fp8_muon, scale_by_fp8_adam

FP8 = Storage(min_size=0)
SHAPE = (4, 256)


def noise(seed, shape=SHAPE):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


@pytest.fixture
def params():
    return {"w": noise(0)}


def path_of(tx, params, grads, *, jitted=True):
    """The updates and states of consecutive steps from the same parameters."""
    update = jax.jit(tx.update) if jitted else tx.update
    state = jax.jit(tx.init)(params)
    updates, states = [], []
    for g in grads:
        step, state = update(g, state, params)
        updates.append(step)
        states.append(state)
    return updates, states


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def assert_close(got, wanted, rtol):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-9), got, wanted)


def test_learning_rate_follows_its_schedule(params):
    grads = [{"w": noise(i)} for i in (1, 2, 3)]
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5, 2: 0.0})
    scaled, _ = path_of(fp8_adamw(schedule, weight_decay=0.0, storage=FP8), params, grads)
    plain, _ = path_of(scale_by_fp8_adam(storage=FP8), params, grads)
    for rate, got, direction in zip((0.5, 0.25, 0.0), scaled, plain, strict=True):
        np.testing.assert_allclose(got["w"], -rate * direction["w"], rtol=1e-6)


def test_clipping_in_a_chain_reaches_the_moments(params):
    grads = [{"w": 100 * noise(i)} for i in (1, 2)]
    norm = [optax.tree.norm(g) for g in grads]
    clipped = [
        jax.tree.map(lambda g, n=n: g / n, grad) for grad, n in zip(grads, norm, strict=True)
    ]
    chained, _ = path_of(
        optax.chain(optax.clip_by_global_norm(1.0), fp8_adamw(1e-2, storage=FP8)), params, grads
    )
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), params, clipped)
    # Clipped in another program, so rounded otherwise by 2^-23; a code may flip by that.
    np.testing.assert_allclose(chained[0]["w"], alone[0]["w"], rtol=1e-5)
    assert np.mean(np.abs(chained[1]["w"] - alone[1]["w"])) < 1e-5


def test_injected_numbers_change_nothing(params):
    grads = [{"w": noise(i)} for i in (1, 2)]
    plain, _ = path_of(fp8_adamw(1e-2, b1=0.8, weight_decay=0.1, storage=FP8), params, grads)
    make = optax.inject_hyperparams(fp8_adamw, static_args=("storage",))
    injected, states = path_of(make(1e-2, b1=0.8, weight_decay=0.1, storage=FP8), params, grads)
    numbers = states[-1].hyperparams
    assert set(numbers) == {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert all(isinstance(number, jax.Array) for number in numbers.values())
    # b2 = 0.999 as an FP32 array is off by 2^-26, which 1 - b2 makes 2e-5.
    assert_close(injected[0], plain[0], rtol=3e-5)
    assert np.mean(np.abs(injected[1]["w"] - plain[1]["w"])) < 1e-5


@pytest.mark.parametrize("make", [fp8_adamw, fp8_muon])
def test_numbers_that_are_injected_in_fp16_leave_zeros_alone(make):
    """In FP16 eps is zero, and so are the numbers that zero gradients are divided by."""
    fixed = {"storage", "ns_steps", "ns_dtype"} & set(inspect.signature(make).parameters)
    tx = optax.inject_hyperparams(make, static_args=fixed)(1e-2, weight_decay=0.0, storage=FP8)
    params = {"w": jnp.ones((16, 32), jnp.float16), "b": jnp.ones(32, jnp.float16)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, zeros)


def test_a_number_that_is_rounded_out_of_its_range_says_where_it_was_rounded():
    """0.999 is 1 in BF16."""
    tx = optax.inject_hyperparams(fp8_adamw, static_args=("storage",))(1e-2, storage=FP8)
    with pytest.raises(ValueError, match=r"b2=1\.0 is outside .* hyperparam_dtype=jnp\.float32"):
        tx.init({"w": jnp.ones((16, 32), jnp.bfloat16)})


def test_injected_learning_rate_can_be_changed_between_steps(params):
    tx = optax.inject_hyperparams(fp8_adamw)(learning_rate=0.5, weight_decay=0.0, storage=FP8)
    update = jax.jit(tx.update)
    state = tx.init(params)
    before, _ = update({"w": noise(1)}, state, params)
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    after, _ = update({"w": noise(1)}, state, params)
    np.testing.assert_array_equal(before["w"], 2 * after["w"])


def test_injected_schedules_follow_the_steps(params):
    tx = optax.inject_hyperparams(fp8_adamw)(
        learning_rate=optax.linear_schedule(1.0, 0.0, 4),
        b1=optax.constant_schedule(0.8),
        storage=FP8,
    )
    _, states = path_of(tx, params, [{"w": noise(i)} for i in (1, 2)])
    rates = [float(state.hyperparams["learning_rate"]) for state in states]
    assert rates == [1.0, 0.75]
    assert float(states[1].hyperparams["b1"]) == pytest.approx(0.8)


def test_masked_leaves_pass_and_need_no_state(params):
    grads = {"w": noise(1)}
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), params, [grads])
    params["steps"] = jnp.arange(3)  # no float: only a mask can leave it out
    grads["steps"] = jnp.ones(3, jnp.int32)
    tx = optax.masked(fp8_adamw(1e-2, storage=FP8), {"w": True, "steps": False})
    updates, states = path_of(tx, params, [grads])
    assert_equal(updates[0], {"w": alone[0]["w"], "steps": grads["steps"]})
    assert len(jax.tree.leaves(states[0].inner_state[0].mu.codes)) == 1


def test_partitions_are_stepped_as_if_alone(params):
    labels = {"a": "fp8", "b": "sgd"}
    tx = optax.partition({"fp8": fp8_adamw(1e-2, storage=FP8), "sgd": optax.sgd(0.5)}, labels)
    grads = [noise(1), noise(2)]
    both, _ = path_of(tx, {"a": params["w"], "b": params["w"]}, [{"a": g, "b": g} for g in grads])
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), {"a": params["w"]}, [{"a": g} for g in grads])
    for got, wanted, grad in zip(both, alone, grads, strict=True):
        np.testing.assert_array_equal(got["a"], wanted["a"])
        np.testing.assert_array_equal(got["b"], -0.5 * grad)


def test_groups_of_a_partition_are_rounded_with_noise_of_their_own(params):
    groups = {"x": fp8_adamw(1e-2, storage=FP8), "y": fp8_adamw(1e-2, storage=FP8)}
    tx = optax.partition(groups, {"a": "x", "b": "y"})
    both = {"a": params["w"], "b": params["w"]}
    _, states = path_of(tx, both, [{"a": noise(1), "b": noise(1)}])
    leaves = [leaf for leaf in jax.tree.leaves(states[0]) if leaf.shape == SHAPE]
    _, of_a, _, of_b = (leaf.astype(jnp.float32) for leaf in leaves)  # mu, nu; mu, nu
    assert jnp.mean(of_a != of_b) > 0.1


def test_accumulated_gradients_step_once(params):
    grads = [{"w": noise(1)}, {"w": noise(2)}]
    tx = optax.MultiSteps(fp8_adamw(1e-2, storage=FP8), every_k_schedule=2)
    updates, states = path_of(tx, params, grads)
    assert not jnp.any(updates[0]["w"])
    assert int(states[0].inner_opt_state[0].count) == 0
    mean = {"w": (grads[0]["w"] + grads[1]["w"]) / 2}
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), params, [mean])
    # Accumulated as a running mean, so rounded otherwise.
    assert_close(updates[1], alone[0], rtol=1e-5)
    assert int(states[1].inner_opt_state[0].count) == 1


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_apply_if_finite_skips_a_step_whole(params, poison):
    good, bad = {"w": noise(1)}, {"w": noise(2).at[1, 2].set(poison)}
    tx = optax.apply_if_finite(fp8_adamw(1e-2, storage=FP8), max_consecutive_errors=5)
    updates, states = path_of(tx, params, [good, bad, good])
    assert not jnp.any(updates[1]["w"])
    assert_equal(states[1].inner_state, states[0].inner_state)
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), params, [good, good])
    assert_equal(updates[2], alone[1])


def test_flattened_it_keeps_the_moments_of_one_long_row():
    params = {"a": noise(0, (3, 50)), "b": noise(1, (200,))}
    grads = {"a": noise(2, (3, 50)), "b": noise(3, (200,))}
    tx = optax.flatten(fp8_adamw(1e-2, storage=FP8))
    updates, states = path_of(tx, params, [grads])
    row, unravel = jax.flatten_util.ravel_pytree(params)
    alone, _ = path_of(fp8_adamw(1e-2, storage=FP8), row, [jax.flatten_util.ravel_pytree(grads)[0]])
    assert_equal(updates[0], unravel(alone[0]))
    assert states[0][0].mu.codes.shape == (350,)
    assert states[0][0].mu.amax.shape == (3,)


def test_tree_map_params_maps_what_follows_a_parameter_and_nothing_else(params):
    tx = fp8_adamw(1e-2, storage=FP8)
    state = tx.init(params)
    marked = optax.tree_map_params(
        tx, lambda leaf, name: name, state, {"w": "follows"}, transform_non_params=lambda _: "no"
    )
    for moment in (marked[0].mu, marked[0].nu):
        assert all(tree == {"w": "follows"} for tree in moment)
    assert marked[0].count == "no"
    assert_equal(optax.tree_map_params(tx, lambda leaf: leaf, state), state)


def test_a_step_is_compiled_once_and_may_be_scanned(params):
    tx = fp8_adamw(1e-2, storage=FP8)
    traces = []

    @jax.jit
    def step(state, grads):
        traces.append(1)
        return tx.update(grads, state, params)[1]

    state = tx.init(params)
    for i in range(3):
        new = step(state, {"w": noise(i)})
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        state = new
    assert len(traces) == 1
    assert int(state[0].count) == 3


def fit(tx, evaluate=lambda state, params: params):
    """A linear regression that is known to reach zero: the loss before and after 300 steps."""
    x, wanted = noise(10, (64, 16)), noise(11, (16, 128))
    start = {"w": jnp.zeros((16, 128))}

    def loss(params):
        return jnp.mean(jnp.square(x @ params["w"] - x @ wanted))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params):
        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), length=300)
        return loss(evaluate(state, params))

    return float(loss(start)), float(jax.jit(run)(start))


def test_schedule_free_converges_as_with_optax_adamw():
    def schedule_free(base):
        return optax.contrib.schedule_free(base, learning_rate=0.05, b1=0.9)

    evaluate = optax.contrib.schedule_free_eval_params
    start, ours = fit(schedule_free(fp8_adamw(0.05, b1=0.0, storage=FP8)), evaluate)
    _, theirs = fit(schedule_free(optax.adamw(0.05, b1=0.0)), evaluate)
    assert ours < 1e-3 * start
    assert ours < 2 * theirs


def test_complex_parameters_are_stepped_as_two_real_ones():
    params, grads = noise(0) + 1j * noise(1), noise(2) + 1j * noise(3)
    tx = optax.contrib.split_real_and_imaginary(fp8_adamw(1e-2, storage=FP8))
    updates, _ = path_of(tx, params, [grads, grads])
    pairs = path_of(
        fp8_adamw(1e-2, storage=FP8), (params.real, params.imag), [(grads.real, grads.imag)] * 2
    )[0]
    for got, (real, imag) in zip(updates, pairs, strict=True):
        assert got.dtype == jnp.complex64
        # The parts have other paths in the tree, and so other noise from the second step on.
        np.testing.assert_allclose(got, real + 1j * imag, rtol=0.2, atol=2e-3)


def test_several_models_are_stepped_at_once_under_vmap():
    """An ensemble: every member as if alone, but rounded with noise of its own."""
    tx = fp8_adamw(1e-2, storage=FP8)
    params, grads = (jnp.broadcast_to(noise(seed), (3, *SHAPE)) for seed in (0, 1))
    states = jax.vmap(tx.init)(params)
    updates, states = jax.jit(jax.vmap(tx.update))(grads, states, params)
    alone, _ = jax.jit(tx.update)(grads[0], tx.init(params[0]), params[0])
    second = jax.vmap(FP8.read)(states[0].nu)
    for i in range(3):
        np.testing.assert_allclose(updates[i], alone, rtol=1e-6)  # exact before it is stored
        assert jnp.any(second[i] != second[i - 1])
        np.testing.assert_allclose(second[i], 0.001 * grads[i] ** 2, rtol=0.3, atol=1e-9)
