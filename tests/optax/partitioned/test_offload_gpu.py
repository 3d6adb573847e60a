"""State in host memory on a GPU: the same numbers in less memory of the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.optax import fp8_adamw, in_host_memory, in_place
from coat_jax.optax.partitioned import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

SHAPE = (2048, 1024)
LEAVES = 6


def random(seed):
    keys = jax.random.split(jax.random.key(seed), LEAVES)
    return {str(i): jax.random.normal(key, SHAPE, jnp.bfloat16) for i, key in enumerate(keys)}


def stepped(optimizer):
    """Parameters and state after three steps, which donate both."""
    params, gradients = random(0), random(1)
    state = optimizer.init(params)
    step = jax.jit(optimizer.step, donate_argnums=(0, 2))
    for _ in range(3):
        params, state = step(params, gradients, state)
    return params, state


@pytest.mark.parametrize("how", ["stochastic", "24_bits"])
def test_the_numbers_are_the_same_bit_for_bit(how, monkeypatch):
    """The kernels of both programs are the same, and see the same arrays."""
    monkeypatch.setattr(offload, "PART", 1)
    optimizer = in_place(fp8_adamw(1e-2, weight_decay=0.1), round_params=how)
    there, here = stepped(in_host_memory(optimizer)), stepped(optimizer)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_state_stays_on_the_host_and_off_the_device():
    optimizer = in_place(fp8_adamw(1e-2))
    device = jax.local_devices()[0]

    def held(optimizer):
        before = device.memory_stats()["bytes_in_use"]
        params, state = jax.block_until_ready(stepped(optimizer))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.mu.codes)}
        after = device.memory_stats()["bytes_in_use"]
        del params
        return kinds, after - before

    kinds, there = held(in_host_memory(optimizer))
    assert kinds == {"pinned_host"}
    kinds, here = held(optimizer)
    assert kinds == {"device"}
    codes = 2 * LEAVES * SHAPE[0] * SHAPE[1]
    assert here - there == pytest.approx(codes, rel=0.1)
