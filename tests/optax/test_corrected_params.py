"""BF16 parameters with corrections train as FP32 parameters that are rounded to 24 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import corrections
from coat_jax.numerics import noise as random
from coat_jax.optax import (
    CorrectedState,
    Storage,
    corrected_params,
    fused_fp8_adamw,
    in_place,
    restore_state,
    save_state,
    state_shardings,
    with_corrections,
)
from coat_jax.optax.corrections import init_corrections, split_params

FP8 = Storage(min_size=512)
RATE = 1e-3


def noise(seed, shape, dtype=jnp.float32):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def parameters():
    """A matrix with moments in 8 bits, a vector with moments in FP32, and one that is FP32."""
    matrix, vector = noise(0, (16, 256), jnp.bfloat16), noise(1, (256,), jnp.bfloat16)
    return {"matrix": matrix, "vector": vector, "scale": noise(2, (64,))}


def gradients(params, seed):
    return {name: noise((seed, i), p.shape) for i, (name, p) in enumerate(params.items())}


def fused(**arguments):
    return fused_fp8_adamw(RATE, weight_decay=0.1, storage=FP8, correct_params=True, **arguments)


def wrapped():
    tx = with_corrections(optax.adamw(RATE, weight_decay=0.1))

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


OPTIMIZERS = {
    "fused": lambda: tuple(fused()),
    "in place": lambda: tuple(in_place(optax.adamw(RATE, weight_decay=0.1), correct_params=True)),
    "wrapped": wrapped,
}


@jax.jit
def rounded(x):
    """FP32 numbers rounded to 24 bits."""
    return corrections.join(*corrections.split(x))


read = jax.jit(corrected_params)  # operation by operation it is many programs


def place(x):
    """The distance of neighbouring 24-bit numbers around x."""
    return np.exp2(np.floor(np.log2(np.abs(x))) - 15)


@pytest.mark.costly
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_is_that_of_fp32_parameters_rounded_to_24_bits(make):
    """Bit for bit but where FP32 itself is rounded otherwise: XLA may fuse p + u into u's sum."""
    init, step = make()
    step = jax.jit(step)
    params = parameters()
    state = init(params)
    for i in range(4):
        before, grads = read(params, state), gradients(params, i)
        wanted, _ = step(before, grads, CorrectedState(state.inner, init(before).corrections))
        params, state = step(params, grads, state)
        after = read(params, state)
        for name in ("matrix", "vector"):
            assert params[name].dtype == jnp.bfloat16
            assert np.any(state.corrections[name])
            apart = np.asarray(after[name]) != np.asarray(rounded(wanted[name]))
            assert apart.mean() <= 0.01
            difference = np.abs(np.float64(after[name]) - np.float64(rounded(wanted[name])))
            assert np.all(difference <= place(np.asarray(after[name], np.float64)))
        np.testing.assert_allclose(after["scale"], wanted["scale"], rtol=1e-6)


def distance_after(steps, **arguments):
    """Places between 24-bit parameters and FP32 ones after the same gradients."""
    optimizer = fused(**arguments)
    step = jax.jit(optimizer.step)
    drawn = np.asarray(noise(0, (32, 256)))
    params = {"w": jax.device_put(np.where(np.abs(drawn) < 0.5, 1, drawn).astype(jnp.bfloat16))}
    wide = {"w": jax.device_put(np.asarray(params["w"], np.float32))}
    state, state_of_wide = optimizer.init(params), optimizer.init(wide)
    for i in range(steps):
        grads = {"w": noise(10 + i, (32, 256))}
        params, state = step(params, grads, state)
        wide, state_of_wide = step(wide, grads, state_of_wide)
    got, wanted = (np.asarray(p["w"], np.float64) for p in (read(params, state), wide))
    assert np.any(np.abs(np.asarray(params["w"], np.float64) - got) > 0)
    return np.sign(wanted) * (got - wanted) / place(wanted)


def test_the_distance_from_fp32_parameters_is_a_sum_of_roundings_without_bias():
    """Each step rounds by up to half a place, either way, 1 / sqrt(12) places in the root mean."""
    steps = 100
    distance = distance_after(steps)
    # A binade further up the place is twice as large: twice for parameters that crossed.
    assert np.abs(distance).max() <= 2 * steps / 2
    assert np.sqrt(np.mean(distance**2)) <= 2 * np.sqrt(steps / 12)
    assert abs(distance.mean()) <= 6 * 2 * np.sqrt(steps / 12 / distance.size)


def test_updates_below_half_a_place_are_kept_on_average_if_rounded_stochastically():
    """0.1 places per step, which rounding to nearest loses."""
    steps, share = 50, 0.1
    ones = {"w": jnp.ones((32, 256), jnp.bfloat16)}
    for round_params, wanted in ((False, 0.0), (True, steps * share)):
        optimizer = fused_fp8_adamw(
            share * 2.0**-15,
            weight_decay=0.0,
            storage=FP8,
            correct_params=True,
            round_params=round_params,
        )
        step = jax.jit(optimizer.step)
        params, state = ones, optimizer.init(ones)
        for _ in range(steps):
            params, state = step(params, {"w": -jnp.ones((32, 256))}, state)
        moved = (np.asarray(corrected_params(params, state)["w"], np.float64) - 1) * 2**15
        spread = np.sqrt(steps * share * (1 - share) / moved.size)
        assert abs(moved.mean() - wanted) <= 6 * spread * (wanted > 0)


def test_updates_far_below_a_place_of_bf16_add_up():
    """2^-12 per step at 1, where BF16 alone moves by 2^-7 or not at all."""
    ones = {"w": jnp.ones((16, 256), jnp.bfloat16)}
    optimizer = fused_fp8_adamw(2.0**-12, weight_decay=0.0, storage=FP8, correct_params=True)
    step = jax.jit(optimizer.step)
    params, state = ones, optimizer.init(ones)
    for _ in range(40):
        params, state = step(params, {"w": -jnp.ones((16, 256))}, state)
    moved = corrected_params(params, state)["w"] - 1
    np.testing.assert_allclose(moved, 40 * 2.0**-12, rtol=0.01)
    np.testing.assert_array_equal(params["w"], (1 + moved).astype(jnp.bfloat16))


def test_a_parameter_that_is_set_to_zero_begins_at_zero():
    optimizer = fused()
    params = parameters()
    params, state = jax.jit(optimizer.step)(params, gradients(params, 0), optimizer.init(params))
    pruned = {**params, "matrix": params["matrix"] * 0}
    assert np.any(np.asarray(state.corrections["matrix"]) < 0)
    assert not np.any(corrected_params(pruned, state)["matrix"])


@pytest.mark.parametrize("kind", ["fused", "in place"])
def test_a_skipped_step_changes_nothing(kind):
    optimizer = fused() if kind == "fused" else in_place(optax.sgd(RATE), correct_params=True)
    step = jax.jit(optimizer.step)
    params = parameters()
    params, state = step(params, gradients(params, 0), optimizer.init(params), skip=False)
    assert np.any(state.corrections["matrix"])
    after = step(params, gradients(params, 1), state, skip=True)
    jax.tree.map(np.testing.assert_array_equal, after, (params, state))


def test_in_place_rounds_stochastically_if_asked():
    optimizer = in_place(optax.sgd(0.1 * 2.0**-15), round_params=True, correct_params=True)
    params = {"w": jnp.ones((32, 256), jnp.bfloat16)}
    params, state = jax.jit(optimizer.step)(
        params, {"w": -jnp.ones((32, 256))}, optimizer.init(params)
    )
    assert np.mean(state.corrections["w"]) == pytest.approx(0.1, rel=0.2)


def test_the_state_takes_a_byte_for_a_parameter_in_bf16_and_next_to_nothing_for_others():
    params = {"w": jnp.zeros((1024, 1024), jnp.bfloat16), "v": jnp.zeros((1024, 1024))}
    without = jax.eval_shape(fused_fp8_adamw(RATE).init, params)
    state = jax.eval_shape(fused_fp8_adamw(RATE, correct_params=True).init, params)
    assert jax.tree.structure(state.inner) == jax.tree.structure(without)
    assert state.corrections["w"].shape == (1024, 1024)
    assert state.corrections["v"].size <= 64
    assert {c.dtype for c in jax.tree.leaves(state.corrections)} == {jnp.dtype(jnp.int8)}


def test_on_a_mesh_corrections_are_sharded_like_their_parameters_and_the_numbers_are_the_same():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"matrix": P("x", "y"), "vector": P("x"), "scale": P("y")}
    alone = parameters()
    params = {n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in alone.items()}
    optimizer = fused()
    shardings = state_shardings(optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    assert jax.tree.map(lambda c: c.sharding.spec, state.corrections) == specs
    grads = gradients(alone, 0)
    step = jax.jit(optimizer.step)
    params, state = step(params, grads, state)
    alone, state_alone = step(alone, grads, optimizer.init(alone))
    for a, b in zip(
        jax.tree.leaves(corrected_params(params, state)),
        jax.tree.leaves(corrected_params(alone, state_alone)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2.0**-15)


def test_a_second_step_does_not_compile_again():
    optimizer = fused()
    step = jax.jit(optimizer.step, donate_argnums=(0, 2))
    params = parameters()
    grads = gradients(params, 0)
    params, state = step(params, grads, optimizer.init(params))
    step(params, grads, state)
    assert step._cache_size() == 1


def test_donated_parameters_and_corrections_are_updated_in_place():
    optimizer = fused()
    params = parameters()
    state = optimizer.init(params)
    grads = gradients(params, 0)
    compiled = jax.jit(optimizer.step, donate_argnums=(0, 2)).lower(params, grads, state).compile()
    compiled(params, grads, state)
    assert all(leaf.is_deleted() for leaf in (*params.values(), state.corrections["matrix"]))


def test_it_maps_over_parameters_as_optax_has_it():
    tx = with_corrections(optax.adam(RATE))
    params = parameters()
    mapped = optax.tree_map_params(tx, lambda leaf: leaf + 1, tx.init(params))
    assert np.all(np.asarray(mapped.corrections["matrix"]) == 1)
    assert np.all(np.asarray(mapped.inner[0].mu["matrix"]) == 1)


def test_it_takes_the_parameters_of_an_nnx_model():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    params = nnx.state(model, nnx.Param)
    optimizer = fused()
    grads = jax.tree.map(jnp.ones_like, params)
    new, state = jax.jit(optimizer.step)(params, grads, optimizer.init(params))
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert np.any(jax.tree.leaves(state.corrections)[1])
    assert {p.dtype for p in jax.tree.leaves(corrected_params(new, state))} == {np.dtype("float32")}


def test_a_state_is_saved_and_restored_and_one_without_corrections_refused(tmp_path):
    optimizer = fused()
    params = parameters()
    params, state = jax.jit(optimizer.step)(params, gradients(params, 0), optimizer.init(params))
    save_state(tmp_path / "state", state)
    restored = restore_state(tmp_path / "state", state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with pytest.raises(ValueError, match="another model or optimizer"):
        restore_state(tmp_path / "state", fused_fp8_adamw(RATE, storage=FP8).init(params))


def test_derivatives_through_a_step_are_those_of_a_cast():
    optimizer = fused_fp8_adamw(0.1, storage=Storage(min_size=10**12), correct_params=True)
    params = {"w": jnp.ones(16, jnp.bfloat16)}
    state = optimizer.init(params)

    def moved(grads):
        return jnp.sum(optimizer.step(params, {"w": grads}, state)[0]["w"].astype(jnp.float32))

    # At the first step the direction is g / (|g| + eps).
    grads = jnp.full(16, 1e-8)
    derivatives = jax.jit(jax.grad(moved))(grads)
    np.testing.assert_allclose(derivatives, -0.1 * 1e-8 / (2e-8) ** 2, rtol=0.02)


def plain():
    return fused_fp8_adamw(RATE, storage=FP8)


REFUSED = [
    (lambda p: fused_fp8_adamw(RATE, correct_params=1), TypeError, "correct_params=1 must be True"),
    (lambda p: in_place(optax.sgd(1.0), correct_params="yes"), TypeError, "correct_params='yes'"),
    (
        lambda p: fused().step(p, p, plain().init(p)),
        TypeError,
        "must be a CorrectedState, but is a",
    ),
    (lambda p: plain().step(p, p, fused().init(p)), TypeError, "step it with correct_params=True"),
    (
        lambda p: in_place(optax.sgd(1.0)).step(p, p, fused().init(p)),
        TypeError,
        "step it with correct_params=True",
    ),
    (
        lambda p: fused().step(p, p, fused().init(jax.tree.map(lambda a: a.astype("float32"), p))),
        ValueError,
        r"params\['matrix'\] is bfloat16\[16, 256\], but its correction in the state is int8",
    ),
    (
        lambda p: fused().step(p, p, fused().init({"matrix": p["matrix"]})),
        ValueError,
        "The parameters have another structure",
    ),
    (
        lambda p: corrected_params(dict(zip("abc", p.values(), strict=True)), fused().init(p)),
        ValueError,
        "The parameters have another structure",
    ),
    (
        lambda p: with_corrections(optax.sgd(1.0)).update(
            {**p, "matrix": jnp.ones((2, 16, 256))}, with_corrections(optax.sgd(1.0)).init(p), p
        ),
        ValueError,
        r"updates\['matrix'\] has shape \(2, 16, 256\)",
    ),
    (
        lambda p: corrected_params(p, plain().init(p)),
        ValueError,
        "The state contains 0 CorrectedStates",
    ),
    (
        lambda p: with_corrections(optax.sgd(1.0)).update(p, fused().init(p)),
        ValueError,
        "needs the parameters",
    ),
    (lambda p: with_corrections(optax.sgd), TypeError, r"with_corrections\(optax.lion\(1e-4\)\)"),
    (lambda p: with_corrections(fused()), TypeError, "with_corrections takes an optax transf"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_states_and_parameters_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(parameters())


def test_corrections_are_rounded_by_the_key_of_parameters_not_by_that_of_moments():
    """The parameters become 1 + 0.3 units in the last of 24 bits."""
    params = {"w": jnp.ones((32, 1024), jnp.bfloat16)}
    state = CorrectedState((), init_corrections(params))
    stepped = {"w": jnp.full((32, 1024), 1 + 0.3 * 2.0**-15)}
    _, state = split_params(stepped, params, state, (), seed=3, step=7)
    key = random.param_key(random.leaf_key(3, 7, random.leaf_ids(params)[0]))
    own = np.asarray(random.bits(key, (32, 1024), run=128) >> 8)
    np.testing.assert_array_equal(state.corrections["w"], own + round(0.3 * 256) >= 256)


def test_the_fast_parameters_of_a_lookahead_are_corrected():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones((16, 256), jnp.bfloat16)})
    tx = with_corrections(optax.lookahead(optax.sgd(2.0**-12), 5, 0.5))
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones((16, 256), jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
    corrected = corrected_params(params, state)
    np.testing.assert_array_equal(corrected.fast["w"], 1 - 4 * 2.0**-12)


def test_the_seed_decides_how_a_step_in_place_rounds_the_last_of_24_bits():
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}

    def corrections_of(seed):
        optimizer = in_place(
            optax.sgd(0.3 * 2.0**-15), round_params=True, correct_params=True, seed=seed
        )
        _, state = optimizer.step(params, {"w": -jnp.ones((64, 128))}, optimizer.init(params))
        return np.asarray(state.corrections["w"])

    one, again, other = (corrections_of(seed) for seed in (1, 1, 2))
    assert set(np.unique(one)) == {0, 1}
    np.testing.assert_array_equal(one, again)
    assert 0.3 < np.mean(one != other) < 0.5  # 2 * 0.3 * 0.7
