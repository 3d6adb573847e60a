"""Trees of numbers for tests of optimizers, and steps with them."""

import jax
import numpy as np
import optax


def normal(seed, shape, dtype=np.float32):
    """Drawn by NumPy: JAX compiles a program for each shape."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def step_of(tx):
    """The step of a transformation as an optimizer that works in place has it."""

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_equal(got, wanted):
    """Bit for bit, in structure and dtypes too."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for pair in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert pair[0].dtype == pair[1].dtype
        is_key = jax.dtypes.issubdtype(pair[0].dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*map(jax.random.key_data if is_key else np.asarray, pair))
