"""Members of a vmap that are equal in everything are rounded with random numbers of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.optax import CorrectedState
from coat_jax.optax.corrections import init_corrections, split_params

FP8 = coat.Storage(min_size=0)
SHAPE = (16, 128)
MEMBERS = 3


def state_after(tx):
    return lambda gradient: tx.update(gradient, tx.init(gradient), gradient)[1]


def corrections_after(gradient):
    params = jax.tree.map(lambda g: jnp.ones_like(g, jnp.bfloat16), gradient)
    state = CorrectedState((), init_corrections(params))
    return split_params(gradient, params, state, (), step=1)[1].corrections


def params_after(gradient):
    params = {"w": jnp.ones(SHAPE, jnp.bfloat16)}
    updates = jax.tree.map(lambda g: g * 2**-9, gradient)
    return coat.optax.apply_updates(params, updates, step=1)


ROUNDED = {
    "fp8_adamw": state_after(coat.optax.fp8_adamw(1e-3, storage=FP8)),
    "compress": state_after(coat.optax.compress(optax.lion(1e-3), storage=FP8)),
    "fp8_muon": state_after(coat.optax.scale_by_fp8_muon(ns_steps=1, storage=FP8)),
    "apply_updates": params_after,
    "corrections": corrections_after,
}


@pytest.mark.parametrize("step", ROUNDED.values(), ids=ROUNDED)
def test_equal_members_are_rounded_differently(step):
    gradient = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    members = {"w": jnp.broadcast_to(gradient, (MEMBERS, *SHAPE))}
    leaves = jax.tree.leaves(jax.jit(jax.vmap(step))(members))
    rounded = [leaf for leaf in leaves if leaf.shape == (MEMBERS, *SHAPE) and leaf.itemsize <= 2]
    shares = [np.mean(x[i] != x[j]) for x in rounded for i, j in ((0, 1), (1, 2), (0, 2))]
    assert max(shares) > 0.02
    assert min(share for share in shares if share) > 0.02
