"""Laws of all optimizers of this package alike, whether they return updates or parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_equal, normal, step_of

from coat_jax.optax import (
    Storage,
    compress,
    fp8_adamw,
    fp8_muon,
    global_norm_scale,
    in_host_memory,
    in_place,
    scale_by_fp8_adam,
    scale_by_fp8_muon,
    with_rounding,
)

SHAPE, MEMBERS = (16, 128), 3
SGD, LION = optax.sign_sgd(1e-2), optax.lion(1e-2)


def storage(seed):
    return Storage(min_size=0, seed=seed)


# By the seed. The last one rounds nothing at random.
OPTIMIZERS = {
    "fp8_adamw": lambda seed: fp8_adamw(1e-2, storage=storage(seed)),
    "fp8_muon": lambda seed: fp8_muon(1e-2, ns_steps=1, storage=storage(seed)),
    "compress": lambda seed: compress(LION, storage=storage(seed)),
    "with_rounding": lambda seed: with_rounding(SGD, "stochastic", seed=seed),
    "with_rounding, 24 bits": lambda seed: with_rounding(SGD, "24_bits", seed=seed),
    "fused": lambda seed: in_place(fp8_adamw(1e-2, storage=storage(seed))),
    "in_place": lambda seed: in_place(SGD, round_params="stochastic", seed=seed),
    "in_place, 24 bits": lambda seed: in_place(SGD, round_params="24_bits", seed=seed),
    "in_host_memory": lambda _: in_host_memory(in_place(SGD)),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)
random = pytest.mark.parametrize("name", [*OPTIMIZERS][:-1])


def stepped(name, params, grads, seed=0):
    """Parameters and state after a first step."""
    optimizer = OPTIMIZERS[name](seed)
    step = optimizer.step if hasattr(optimizer, "step") else step_of(optimizer)
    return step(params, grads, optimizer.init(params))


@random
def test_the_seed_decides_how_a_step_rounds(name):
    params, grads = {"w": normal(0, SHAPE, jnp.bfloat16)}, {"w": normal(1, SHAPE)}
    one, other = jax.jit(lambda p, g: [stepped(name, p, g, seed) for seed in (1, 2)])(params, grads)
    shares = [np.mean(a != b) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)]
    assert 0.01 < max(shares) < 0.6


@random
def test_equal_members_of_a_vmap_are_rounded_differently(name):
    params, grads = (
        {"w": jnp.broadcast_to(normal(seed, SHAPE, dtype), (MEMBERS, *SHAPE))}
        for seed, dtype in ((0, jnp.bfloat16), (1, np.float32))
    )
    leaves = jax.tree.leaves(jax.jit(jax.vmap(lambda p, g: stepped(name, p, g)))(params, grads))
    rounded = [leaf for leaf in leaves if leaf.shape == (MEMBERS, *SHAPE) and leaf.itemsize <= 2]
    shares = [np.mean(x[i] != x[j]) for x in rounded for i, j in ((0, 1), (1, 2), (0, 2))]
    assert max(shares) > 0.02
    assert min(share for share in shares if share) > 0.02


STEPS = [name for name, make in OPTIMIZERS.items() if hasattr(make(0), "step")]


@every
def test_python_s_floats_and_for_transformations_numpy_s_fp64_are_arrays_in_fp32(name):
    """Without a warning. As constants of a program they stay what they are."""
    params, grads = {"scale": 1.5, "biases": [0.5, -2.0]}, {"scale": -0.25, "biases": [1.0, 0.5]}
    if name not in STEPS:
        params["w"], grads["w"] = np.float64(normal(0, SHAPE)), np.float64(normal(1, SHAPE))
    arrays = jax.tree.map(jnp.float32, (params, grads))
    found, wanted = jax.jit(lambda: (stepped(name, params, grads)[0], stepped(name, *arrays)[0]))()
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    assert_equal(found, wanted)
    assert global_norm_scale(grads, 1.0) == global_norm_scale(arrays[1], 1.0)


@pytest.mark.parametrize("name", ["fp8_adamw", "fp8_muon", "fused", "compress"])
def test_where_jax_refuses_to_promote_a_step_is_the_program_that_it_ever_is(name):
    params = {"w": normal(0, (128, 256)), "v": normal(0, (300,)), "x": normal(0, (4, 128))}
    params["half"] = params["w"].astype(jnp.bfloat16)
    program = jax.jit(lambda params: stepped(name, params, jax.tree.map(jnp.sin, params)))
    wanted = program.lower(params).as_text()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert program.lower(params).as_text() == wanted


@pytest.mark.parametrize("name", STEPS)
def test_donated_parameters_and_state_are_updated_in_place(name):
    optimizer = OPTIMIZERS[name](0)
    params = {"w": normal(0, SHAPE), "half": normal(0, SHAPE, jnp.bfloat16)}
    state = optimizer.init(params)
    program = jax.jit(optimizer.step, donate_argnums=(0, 2)).lower(params, params, state).compile()
    leaves = jax.tree.leaves((params, state))
    # Of XLA's buffers those of arrays without axes may be shared.
    size = sum(leaf.nbytes for leaf in leaves if leaf.ndim)
    used = program.memory_analysis()
    assert used.alias_size_in_bytes + used.host_alias_size_in_bytes >= size


DTYPES = ("float32", "bfloat16", "float16")
ALIKE = {
    "fp8_adamw": (fp8_adamw(1e-2), optax.adamw(1e-2)),
    "scale_by_fp8_adam": (scale_by_fp8_adam(storage=storage(0)), optax.scale_by_adam()),
    "fp8_muon": (fp8_muon(1e-2), optax.contrib.muon(1e-2)),
    "scale_by_fp8_muon": (scale_by_fp8_muon(), optax.contrib.muon(1e-2)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_updates_have_the_dtypes_that_they_have_in_optax(name):
    """Weight decay promotes what it adds up; without it the direction has that dtype already."""
    pairs = {f"{p} {g}": (p, g) for p in DTYPES for g in DTYPES}
    params, grads = (
        {name: jnp.ones((32, 32), pair[i]) for name, pair in pairs.items()} for i in range(2)
    )
    ours, theirs = (
        jax.eval_shape(lambda tx=tx: tx.update(grads, tx.init(params), params)[0])
        for tx in ALIKE[name]
    )
    assert ours == theirs


TRANSFORMATIONS = ("fp8_adamw", "compress", "with_rounding, 24 bits")


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_tree_map_params_maps_what_follows_a_parameter_and_nothing_else(name):
    """Codes, and what groups have."""
    params, tx = {"w": normal(0, SHAPE, jnp.bfloat16)}, OPTIMIZERS[name](0)
    state = tx.init(params)
    marked = optax.tree_map_params(
        tx, lambda leaf, name: name, state, {"w": "follows"}, transform_non_params=lambda _: "no"
    )
    found = jax.tree.leaves_with_path(marked)
    assert sum(mark == "follows" for _, mark in found) >= 1
    for path, mark in found:
        assert mark == ("follows" if "['w']" in jax.tree_util.keystr(path) else "no"), path
    assert_equal(optax.tree_map_params(tx, lambda leaf: leaf, state), state)
