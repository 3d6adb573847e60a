"""Updates of BF16 parameters, rounded stochastically: right on average, however small.

BF16's values lie 2^-7 (just above 1) to 2^-8 (just under 2) of themselves apart. An update of
1/1000 of that distance is always lost by optax.apply_updates, and here takes effect in one step
of a thousand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import normal

from coat_jax.optax import (
    Storage,
    apply_updates,
    fp8_adamw,
    fused_fp8_adamw,
    stochastic_round_updates,
)

SHAPE = (64, 256)
ULP = 2.0**-7  # of BF16 numbers between 1 and 2


def bf16(seed):
    return normal(seed, SHAPE, jnp.bfloat16)


def test_the_mean_over_many_elements_is_the_exact_sum():
    """A result is one of two neighbours, with a variance of p (1 - p) ULP^2.

    Updates in BF16 are added in FP32, too.
    """
    sizes = [float(jnp.bfloat16(size * ULP)) for size in (1e-3, 0.3, -0.3, 0.5, 2.7)]
    params = [jnp.full(SHAPE, 1.5, jnp.bfloat16) for _ in sizes]
    updates = [jnp.full(SHAPE, size, jnp.bfloat16) for size in sizes]
    new = jax.jit(apply_updates)(params, updates, step=1)
    for size, rounded in zip(sizes, map(np.float64, new), strict=True):
        up = size / ULP % 1
        error = ULP * np.sqrt(up * (1 - up) / rounded.size)
        assert abs(rounded.mean() - 1.5 - size) < 4 * error
        below = 1.5 + np.floor(size / ULP) * ULP
        assert set(np.unique(rounded)) == {below, below + ULP}


def test_sums_that_bf16_represents_are_exact_and_nan_and_infinity_stay():
    params = bf16(0)
    np.testing.assert_array_equal(apply_updates(params, jnp.zeros(SHAPE), step=1), params)
    doubled = apply_updates(params, jnp.float32(params), step=1)
    np.testing.assert_array_equal(doubled, 2 * params)
    hostile = np.float32([1.0, np.inf, -np.inf, np.nan])
    new = apply_updates(jnp.asarray(hostile, jnp.bfloat16), jnp.full(4, 1e-3), step=1)
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


def test_in_a_chain_optax_apply_updates_rounds_stochastically():
    """Other dtypes are left to optax."""
    params = {"w": bf16(0), "half": bf16(1).astype(jnp.float16), "wide": jnp.float32(bf16(2))}
    updates = jax.tree.map(lambda p: (1e-3 * jnp.float32(p)).astype(p.dtype), params)
    updates["w"] = 1e-3 * jnp.float32(bf16(3))
    tx = optax.chain(optax.identity(), stochastic_round_updates(seed=5))
    state = tx.init(params)
    for step in (1, 2):
        rounded, state = tx.update(updates, state, params)
        new, nearest = (optax.apply_updates(params, u) for u in (rounded, updates))
        wanted = apply_updates(params, updates, step=step, seed=5)
        jax.tree.map(np.testing.assert_array_equal, new, wanted)
        assert rounded["w"].dtype == jnp.float32
        assert new["w"].dtype == wanted["w"].dtype == jnp.bfloat16
        for name in ("half", "wide"):
            assert rounded[name] is updates[name]
            np.testing.assert_array_equal(new[name], nearest[name])
    assert int(state[1].count) == 2
    with pytest.raises(ValueError, match="params"):
        tx.update(updates, state)


def test_the_chain_and_the_fused_step_round_alike():
    """Bit for bit, unless XLA contracts a product and a sum in one program and not in the other.

    Sums then differ in FP32's last place, 2^-16 of BF16's: about as many elements, of 17,000
    here, round to the other neighbour.
    """
    arguments = {"learning_rate": 1e-3, "weight_decay": 0.1, "storage": Storage(seed=3)}
    tx = optax.chain(fp8_adamw(**arguments), stochastic_round_updates(seed=3))
    fused = fused_fp8_adamw(**arguments, round_params=True)
    params = {"w": bf16(0), "small": bf16(1)[:1]}
    chained, state = tx.init(params), fused.init(params)
    update, step = jax.jit(tx.update), jax.jit(fused.step)
    for i in range(2):
        grads = jax.tree.map(lambda p, i=i: jnp.float32(bf16(5 + i)[: len(p)]), params)
        updates, chained = update(grads, chained, params)
        theirs = optax.apply_updates(params, updates)
        params, state = step(params, grads, state)
        jax.tree.map(np.testing.assert_array_equal, state, chained[0][0])
        for one, other in zip(params.values(), theirs.values(), strict=True):
            np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=2**-7)
            assert np.sum(np.float32(one) != np.float32(other)) <= 4


def test_a_step_that_is_no_whole_number_is_refused():
    params = {"w": jnp.ones(8, jnp.bfloat16)}
    for step in (None, "3", True, 1.5, np.ones(3, np.int32)):
        with pytest.raises(TypeError, match=r"step=.* must be a whole number"):
            apply_updates(params, params, step=step)
