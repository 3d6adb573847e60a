"""The fused step is the chain, bit for bit with FP32 parameters; and it is in place."""

import functools
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax.optax import Storage, fp8_adamw, fused_fp8_adamw, global_norm_scale

FP8 = Storage(min_size=512)
STEPS = 20
# LLVM would join a product and a sum, rounding once, in one of two programs and not in the other.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def noise(seed, shape, dtype=jnp.float32):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def parameters(dtype=jnp.float32, shape=(8, 256)):
    """A leaf in FP8 and one that is too small for it."""
    return {"matrix": noise(0, shape, dtype), "bias": noise(1, (256,), dtype)}


def walk_both(params, arguments, *, grad_dtype=jnp.float32, scales=None):
    """Parameters and states of the chain and of the fused step, after every step."""
    tx = fp8_adamw(**arguments)
    fused = fused_fp8_adamw(**arguments)

    @jit
    def chain(grads, state, params, scale):
        if scales is not None:
            grads = jax.tree.map(lambda g: scale * g, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jit
    def step(params, grads, state, scale):
        if scales is None:
            return fused.step(params, grads, state)
        return fused.step(params, grads, state, grad_scale=scale)

    chained, fused_ = (params, tx.init(params)), (params, fused.init(params))
    for i in range(STEPS):
        grads = jax.tree.map(lambda p, i=i: noise(10 + i, p.shape, grad_dtype), params)
        scale = jnp.float32(1.0 if scales is None else scales[i])
        chained = chain(grads, chained[1], chained[0], scale)
        fused_ = step(fused_[0], grads, fused_[1], scale)
        yield chained, fused_


CASES = {
    "defaults": {},
    "schedule": {"learning_rate": optax.cosine_decay_schedule(1e-2, STEPS)},
    "mask": {"weight_decay": 0.5, "mask": {"matrix": True, "bias": False}},
    "callable mask": {"weight_decay": 0.5, "mask": lambda p: {"matrix": False, "bias": True}},
    "prefix mask": {"weight_decay": 0.5, "mask": False},
    "nesterov": {"nesterov": True},
    "numbers": {"b1": 0.8, "b2": 0.95, "eps": 1e-4, "eps_root": 1e-6, "weight_decay": 0.1},
    "no decay": {"weight_decay": 0.0},
    "fp32 moments": {"storage": Storage()},
    "e5m2": {"storage": Storage(first=jnp.float8_e5m2, min_size=512, group_size=64)},
}


@pytest.mark.costly
@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_it_is_the_chain_bit_for_bit(arguments):
    arguments = {"learning_rate": 1e-2, "storage": FP8, **arguments}
    assert_same_walk(walk_both(parameters(), arguments))


def test_it_is_the_chain_bit_for_bit_where_groups_are_short():
    arguments = {"learning_rate": 1e-2, "storage": FP8}
    assert_same_walk(walk_both(parameters(shape=(5, 1, 200)), arguments))


def assert_same_walk(walk):
    for (params, state), (fused_params, fused_state) in walk:
        jax.tree.map(np.testing.assert_array_equal, fused_params, params)
        jax.tree.map(np.testing.assert_array_equal, fused_state, state[0])


def test_grad_scale_scales_the_gradients_bit_for_bit():
    arguments = {"learning_rate": 1e-2, "storage": FP8}
    scales = np.random.default_rng(0).uniform(0.1, 1.0, STEPS)
    assert_same_walk(walk_both(parameters(), arguments, scales=scales))


def test_with_bf16_gradients_it_is_the_chain_to_fp32_s_rounding():
    """XLA may fuse the cast of the gradients with other products and sums in one of the two."""
    arguments = {"learning_rate": 1e-2, "storage": FP8}
    walk = walk_both(parameters(), arguments, grad_dtype=jnp.bfloat16)
    for (params, state), (fused_params, fused_state) in walk:
        jax.tree.map(np.testing.assert_array_equal, fused_state, state[0])
        close = functools.partial(np.testing.assert_allclose, rtol=2**-21, atol=2**-26)
        jax.tree.map(close, fused_params, params)


def test_with_bf16_parameters_they_differ_by_the_roundings_between_links():
    """The chain also rounds updates to BF16: a sum is then rounded to a neighbour at most."""
    arguments = {"learning_rate": 1e-2, "storage": FP8}
    walk = walk_both(parameters(jnp.bfloat16), arguments, grad_dtype=jnp.bfloat16)
    for step, ((params, state), (fused_params, fused_state)) in enumerate(walk, start=1):
        jax.tree.map(np.testing.assert_array_equal, fused_state, state[0])
        for name in params:
            fused, chained = (p[name].astype(jnp.float32) for p in (fused_params, params))
            apart = float(jnp.max(jnp.abs(fused - chained)))
            # A unit in the last place of BF16 is at most 2^-7 of the number.
            assert apart <= step * 2.0**-7 * float(jnp.max(jnp.abs(chained)))
    assert apart > 0


def test_bf16_parameters_are_rounded_once():
    """To nearest unless asked otherwise, from FP32 arithmetic."""
    arguments = {"learning_rate": 1e-2, "storage": FP8, "weight_decay": 0.1}
    fused = fused_fp8_adamw(**arguments)
    params = parameters(jnp.bfloat16)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = jax.tree.map(lambda p: noise(7, p.shape), wide)
    step = jax.jit(fused.step)
    new, _ = step(params, grads, fused.init(params))
    wanted, _ = step(wide, grads, fused.init(wide))
    for name in params:
        assert new[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(new[name], wanted[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_donated_parameters_and_state_are_updated_in_place(dtype):
    params = {"w": noise(0, (256, 512), dtype), "b": noise(1, (256,), dtype)}
    fused = fused_fp8_adamw(1e-2, round_params=True)
    state = fused.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    compiled = jax.jit(fused.step, donate_argnums=(0, 2)).lower(params, grads, state).compile()
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((state, params)))
    for moment in (state.mu, state.nu):
        donated -= moment.amax["b"].nbytes + moment.k16["b"].nbytes  # unused, as "b" is in FP32
    assert compiled.memory_analysis().alias_size_in_bytes >= donated
    new_params, new_state = compiled(params, grads, state)
    jax.block_until_ready((new_params, new_state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state.mu.codes)))


def test_arguments_are_those_of_the_chain():
    chain, fused = (
        {name: p.default for name, p in inspect.signature(f).parameters.items()}
        for f in (fp8_adamw, fused_fp8_adamw)
    )
    assert fused.pop("round_params") is False
    assert fused.pop("correct_params") is False
    assert chain.pop("mu_dtype") is None
    assert fused == chain


def test_global_norm_scale_clips_as_optax_does():
    grads = {"a": noise(0, (8, 128)), "b": noise(1, (100,))}
    norm = float(optax.tree.norm(grads))
    for limit in (0.5 * norm, 2 * norm):
        clip = optax.clip_by_global_norm(limit)
        wanted, _ = clip.update(grads, clip.init(grads))
        scale = global_norm_scale(grads, limit)
        got = jax.tree.map(lambda g, scale=scale: scale * g, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)


def test_global_norm_scale_leaves_zero_gradients_alone():
    assert float(global_norm_scale({"a": jnp.zeros((4, 128))}, 1.0)) == 1.0


@pytest.mark.parametrize("storage", [FP8, Storage()], ids=["fp8", "fp32"])
def test_a_second_step_does_not_compile_again(storage):
    """The state that comes out looks to jit like the one that init made."""
    params = parameters()
    fused = fused_fp8_adamw(1e-3, storage=storage)
    tx = fp8_adamw(1e-3, storage=storage)
    step, update = jax.jit(fused.step), jax.jit(tx.update)
    new, state = step(params, params, fused.init(params))
    step(new, params, state)
    assert step._cache_size() == 1
    updates, state = update(params, tx.init(params), params)
    update(updates, state, params)
    assert update._cache_size() == 1


STEP = r"a whole step by itself, which clips by grad_scale.* use fp8_adamw instead of fused"


def test_a_step_in_place_is_no_transformation_and_says_so():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, fused_fp8_adamw(1e-3), wrt=nnx.Param)
    with pytest.raises(AttributeError, match=rf"no attribute 'update'\. .*{STEP}"):
        optimizer.update(model, nnx.state(model, nnx.Param))
    assert not hasattr(fused_fp8_adamw(1e-3), "apply")


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"all": tx}, {"w": "all"}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_of_optax_says_so_while_its_update_is_traced(wrapper):
    """optax keeps `init`, and looks for `update` when it is called."""
    tx = WRAPPERS[wrapper](fused_fp8_adamw(1e-3))
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(AttributeError, match=STEP):
        jax.eval_shape(tx.update, params, tx.init(params), params)
