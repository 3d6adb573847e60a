"""BF16 parameters that are rounded stochastically, and those that train as numbers of 24 bits.

BF16's values lie 2^-7 (just above 1) to 2^-8 (just under 2) of themselves apart. An update of
1/1000 of that distance is always lost to nearest, and here takes effect in one step of a thousand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steps import normal, step_of

from coat_jax.numerics import noise as random
from coat_jax.optax import (
    CorrectedState,
    Storage,
    corrected_params,
    fp8_adamw,
    in_place,
    state_shardings,
    with_rounding,
)
from coat_jax.optax.rounding import round_stepped, zero_corrections
from coat_jax.optax.trees import in_fp32

SHAPE = (64, 256)
ULP = 2.0**-7  # of BF16 numbers between 1 and 2
FP8 = Storage(min_size=512)
RATE = 1e-3


def bf16(seed):
    return normal(seed, SHAPE, jnp.bfloat16)


def apply_updates(params, updates, step=1, seed=0):
    stepped = optax.apply_updates(in_fp32(params), updates)
    return round_stepped(stepped, params, how="stochastic", seed=seed, step=step)[0]


def test_the_mean_over_many_elements_is_the_exact_sum():
    """A result is one of two neighbours, with a variance of p (1 - p) ULP^2.

    Updates in BF16 are added in FP32, too.
    """
    sizes = [float(jnp.bfloat16(size * ULP)) for size in (1e-3, 0.3, -0.3, 0.5, 2.7)]
    params = [jnp.full(SHAPE, 1.5, jnp.bfloat16) for _ in sizes]
    updates = [jnp.full(SHAPE, size, jnp.bfloat16) for size in sizes]
    new = jax.jit(apply_updates)(params, updates)
    for size, rounded in zip(sizes, map(np.float64, new), strict=True):
        up = size / ULP % 1
        error = ULP * np.sqrt(up * (1 - up) / rounded.size)
        assert abs(rounded.mean() - 1.5 - size) < 4 * error
        below = 1.5 + np.floor(size / ULP) * ULP
        assert set(np.unique(rounded)) == {below, below + ULP}


def test_sums_that_bf16_represents_are_exact_and_nan_and_infinity_stay():
    params = bf16(0)
    np.testing.assert_array_equal(apply_updates(params, jnp.zeros(SHAPE)), params)
    np.testing.assert_array_equal(apply_updates(params, jnp.float32(params)), 2 * params)
    hostile = np.float32([1.0, np.inf, -np.inf, np.nan])
    new = apply_updates(jnp.asarray(hostile, jnp.bfloat16), jnp.full(4, 1e-3))
    assert np.isfinite(np.float32(new[0]))
    np.testing.assert_array_equal(np.float32(new[1:]), hostile[1:])


def test_same_step_and_seed_round_alike_and_others_do_not():
    params = {"a": bf16(0), "b": bf16(0)}
    updates = jax.tree.map(lambda p: 1e-3 * jnp.float32(p), params)
    once, again = (apply_updates(params, updates, step=3, seed=1) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert jnp.any(once["a"] != once["b"])  # every leaf draws its own
    for other in ({"step": 4, "seed": 1}, {"step": 3, "seed": 2}):
        assert jnp.any(apply_updates(params, updates, **other)["a"] != once["a"])


@pytest.mark.parametrize("how", ["nearest", "stochastic", "24_bits"])
def test_in_optax_s_loop_parameters_are_rounded_as_in_place(how):
    """Other dtypes are left to optax, even their updates."""
    params = {"w": bf16(0), "half": bf16(1).astype(jnp.float16), "wide": jnp.float32(bf16(2))}
    grads = jax.tree.map(lambda p: (1e-3 * jnp.float32(p)).astype(p.dtype), params)
    tx, optimizer = (
        make(optax.sgd(1.0), round_params=how, seed=5) for make in (with_rounding, in_place)
    )
    state, wanted = tx.init(params), (params, optimizer.init(params))
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params, wanted = (
            optax.apply_updates(params, updates),
            optimizer.step(wanted[0], grads, *wanted[1:]),
        )
        jax.tree.map(np.testing.assert_array_equal, (params, state), wanted)
        assert updates["w"].dtype == jnp.float32
        np.testing.assert_array_equal(updates["wide"], -grads["wide"])
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, state)


def test_the_chain_and_the_fused_step_round_alike():
    """Bit for bit, unless XLA contracts a product and a sum in one program and not in the other.

    Sums then differ in FP32's last place, 2^-16 of BF16's: about as many elements, of 17,000
    here, round to the other neighbour.
    """
    adamw = fp8_adamw(RATE, weight_decay=0.1, storage=Storage(seed=3))
    tx, fused = (
        with_rounding(adamw, "stochastic", seed=3),
        in_place(adamw, round_params="stochastic"),
    )
    params = {"w": bf16(0), "small": bf16(1)[:1]}
    chained, state = tx.init(params), fused.init(params)
    update, step = jax.jit(tx.update), jax.jit(fused.step)
    for i in range(2):
        grads = jax.tree.map(lambda p, i=i: jnp.float32(bf16(5 + i)[: len(p)]), params)
        updates, chained = update(grads, chained, params)
        theirs = optax.apply_updates(params, updates)
        params, state = step(params, grads, state)
        jax.tree.map(np.testing.assert_array_equal, state, chained.inner[0])
        for one, other in zip(params.values(), theirs.values(), strict=True):
            np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=2**-7)
            assert np.sum(np.float32(one) != np.float32(other)) <= 4


def parameters():
    """A matrix with moments in 8 bits, a vector with moments in FP32, and one that is FP32."""
    matrix, vector = normal(0, (16, 256), jnp.bfloat16), normal(1, (256,), jnp.bfloat16)
    return {"matrix": matrix, "vector": vector, "scale": normal(2, (64,))}


def gradients(params, seed):
    return {name: normal((seed, i), p.shape) for i, (name, p) in enumerate(params.items())}


def plain():
    return fp8_adamw(RATE, weight_decay=0.1, storage=FP8)


def fused():
    return in_place(plain(), round_params="24_bits")


def wrapped():
    tx = with_rounding(optax.adamw(RATE, weight_decay=0.1), "24_bits")
    return tx.init, step_of(tx)


OPTIMIZERS = {
    "fused": fused,
    "in place": lambda: in_place(optax.adamw(RATE, weight_decay=0.1), round_params="24_bits"),
    "wrapped": wrapped,
}
read = jax.jit(corrected_params)  # operation by operation it is many programs


def place(x):
    """The distance of neighbouring 24-bit numbers around x."""
    return np.exp2(np.floor(np.log2(np.abs(x))) - 15)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_fp32_parameters_rounded_to_24_bits(name):
    """To one of the two neighbours, right on average; a rounding error is at most 1 / 2 of a place
    as a standard deviation. XLA may fuse p + u into u's sum. A skipped step changes nothing.
    """
    init, step = OPTIMIZERS[name]()
    jitted = jax.jit(step)
    params = parameters()
    state = init(params)
    for i in range(2):
        before, grads = read(params, state), gradients(params, i)
        exact_state = CorrectedState(state.inner, init(before).corrections)
        wanted, _ = jitted(before, grads, exact_state)
        params, state = jitted(params, grads, state)
        after = read(params, state)
        for leaf in ("matrix", "vector"):
            assert params[leaf].dtype == jnp.bfloat16
            assert np.any(state.corrections[leaf])
            got, exact = np.float64(after[leaf]), np.float64(wanted[leaf])
            errors = (got - exact) / place(exact)
            assert np.max(np.abs(errors)) <= 1.01
            assert np.abs(np.mean(errors)) < 4 * 0.5 / np.sqrt(errors.size)
        np.testing.assert_allclose(after["scale"], wanted["scale"], rtol=1e-6)
    if name != "wrapped":
        skipped = jitted(params, gradients(params, 1), state, skip=True)
        jax.tree.map(np.testing.assert_array_equal, skipped, (params, state))


def test_the_state_takes_a_byte_for_a_parameter_in_bf16_and_next_to_nothing_for_others():
    params = {"w": jnp.zeros((1024, 1024), jnp.bfloat16), "v": jnp.zeros((1024, 1024))}
    without, state = (jax.eval_shape(o.init, params) for o in (in_place(plain()), fused()))
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


def sgd():
    return with_rounding(optax.sgd(1.0), "24_bits")


REFUSED = {
    "round_params=True must be 'nearest' or": lambda p: in_place(plain(), round_params=True),
    "round_params='yes'": lambda p: with_rounding(optax.sgd(1.0), "yes"),
    "state.inner.count is missing. The state was made by another": lambda p: fused().step(
        p, p, in_place(plain()).init(p)
    ),
    "state.count is missing.*for other": lambda p: in_place(plain()).step(p, p, fused().init(p)),
    r"state.mu.codes\['matrix'\] is not expected. The state was made by another": (
        lambda p: in_place(optax.sgd(1.0)).step(p, p, in_place(plain()).init(p))
    ),
    "state.inner.count is missing. .*for other": (
        lambda p: sgd().update(p, in_place(optax.sgd(1.0)).init(p), p)
    ),
    r"state.corrections\['matrix'\] is int8.* instead of int8\[16, 256\]": (
        lambda p: fused().step(p, p, fused().init(in_fp32(p)))
    ),
    r"inner.mu.codes\['scale'\] is missing": (
        lambda p: fused().step(p, p, fused().init({"matrix": p["matrix"]}))
    ),
    r"corrections\[0\] is missing": lambda p: corrected_params([*p.values()], fused().init(p)),
    r"gradients\['matrix'\] is \[2, 16, 256\] instead": (
        lambda p: sgd().update({**p, "matrix": jnp.ones((2, 16, 256))}, sgd().init(p), p)
    ),
    "contains 0 CorrectedStates": lambda p: corrected_params(p, in_place(plain()).init(p)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_states_and_parameters_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](parameters())


def test_corrections_are_rounded_by_the_key_of_parameters_not_by_that_of_moments():
    """The parameters become 1 + 0.3 units in the last of 24 bits."""
    params = {"w": jnp.ones((32, 1024), jnp.bfloat16)}
    zeros = zero_corrections(params)
    stepped = {"w": jnp.full((32, 1024), 1 + 0.3 * 2.0**-15)}
    _, rounded = round_stepped(stepped, params, zeros, how="24_bits", seed=3, step=7)
    key = random.param_key(random.leaf_key(3, 7, random.leaf_ids(params)[0]))
    own = np.asarray(random.bits(key, (32, 1024), run=128) >> 8)
    np.testing.assert_array_equal(rounded["w"], own + round(0.3 * 256) >= 256)


def test_the_fast_parameters_of_a_lookahead_are_corrected():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones((16, 256), jnp.bfloat16)})
    tx = with_rounding(optax.lookahead(optax.sgd(2.0**-12), 5, 0.5), "24_bits")
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones((16, 256), jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
    corrected = corrected_params(params, state)
    np.testing.assert_array_equal(corrected.fast["w"], 1 - 4 * 2.0**-12)
