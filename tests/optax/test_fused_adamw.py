"""`in_place(fp8_adamw(..))` is the chain, bit for bit with FP32 parameters; and it is in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import normal

from coat_jax.optax import Storage, fp8_adamw, in_place

FP8 = Storage(min_size=512)
STEPS = 10
# LLVM would join a product and a sum, rounding once, in one of two programs and not in the other.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def parameters(dtype=jnp.float32):
    """Leaves in 8 bits with whole and with short groups, and one that is too small for it."""
    shapes = {"matrix": (8, 256), "short": (5, 1, 200), "bias": (256,)}
    return {name: normal(i, shape, dtype) for i, (name, shape) in enumerate(shapes.items())}


def walk_both(params, cases, *, grad_dtype=jnp.float32, scales=None):
    """Parameters and states of the chains and of the fused steps, after every step.

    All cases are in one program, but chains and fused steps are not: XLA would merge them.
    """
    arguments = [{"learning_rate": 1e-2, "storage": FP8, **case} for case in cases]
    chains = [fp8_adamw(**case) for case in arguments]
    fused = [in_place(tx) for tx in chains]

    @jit
    def chain(grads, walks, scale):
        if scales is not None:
            grads = jax.tree.map(lambda g: scale * g, grads)
        pairs = zip(chains, walks, strict=True)
        stepped = [(old, tx.update(grads, state, old)) for tx, (old, state) in pairs]
        return [(optax.apply_updates(old, updates), state) for old, (updates, state) in stepped]

    @jit
    def step(grads, walks, scale):
        given = {} if scales is None else {"grad_scale": scale}
        pairs = zip(fused, walks, strict=True)
        return [tx.step(old, grads, state, **given) for tx, (old, state) in pairs]

    chained, stepped = ([(params, tx.init(params)) for tx in txs] for txs in (chains, fused))
    for i in range(STEPS):
        grads = jax.tree.map(lambda p, i=i: normal(10 + i, p.shape, grad_dtype), params)
        scale = jnp.float32(1.0 if scales is None else scales[i])
        chained, stepped = chain(grads, chained, scale), step(grads, stepped, scale)
        yield list(zip(chained, stepped, strict=True))


CASES = [
    {
        "learning_rate": optax.cosine_decay_schedule(1e-2, STEPS),
        "weight_decay": 0.5,
        "mask": lambda p: {"matrix": True, "short": False, "bias": True},
        "nesterov": True,
    },
    {
        "b1": 0.8,
        "b2": 0.95,
        "eps": 1e-4,
        "eps_root": 1e-6,
        "weight_decay": optax.linear_schedule(0.5, 0.0, STEPS),
        "mask": {"matrix": False, "short": True, "bias": True},
    },
    {"storage": Storage(first=jnp.float8_e5m2, min_size=512, group_size=64), "weight_decay": 0.0},
]
SCALES = np.random.default_rng(0).uniform(0.1, 1.0, STEPS)


@pytest.mark.parametrize(
    ("cases", "scales"), [(CASES, None), ([{}], SCALES)], ids=["cases", "grad_scale"]
)
def test_it_is_the_chain_bit_for_bit(cases, scales):
    for walks in walk_both(parameters(), cases, scales=scales):
        for (params, state), (fused_params, fused_state) in walks:
            jax.tree.map(np.testing.assert_array_equal, fused_params, params)
            jax.tree.map(np.testing.assert_array_equal, fused_state, state[0])


def test_in_bf16_it_is_the_chain_to_the_roundings_between_links():
    """With BF16 gradients, to FP32's: XLA may fuse their cast with other operations in one of both.

    With BF16 parameters the chain also rounds updates to BF16: a sum is then rounded to a neighbour
    at most. A unit in the last place of BF16 is at most 2^-7 of the number.
    """
    params = parameters() | {"half": normal(5, (8, 256), jnp.bfloat16)}
    for i, walks in enumerate(walk_both(params, [{}], grad_dtype=jnp.bfloat16), start=1):
        (((chained, state), (fused, fused_state)),) = walks
        jax.tree.map(np.testing.assert_array_equal, fused_state, state[0])
        for name in ("matrix", "short", "bias"):
            np.testing.assert_allclose(fused[name], chained[name], rtol=2**-21, atol=2**-26)
        one, other = (np.float32(p["half"]) for p in (fused, chained))
        assert np.max(np.abs(one - other)) <= i * 2.0**-7 * np.max(np.abs(other))
    assert np.any(one != other)


def test_bf16_parameters_are_rounded_once():
    """To nearest unless asked otherwise, from FP32 arithmetic."""
    fused = in_place(fp8_adamw(1e-2, storage=FP8, weight_decay=0.1))
    params = parameters(jnp.bfloat16)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = jax.tree.map(lambda p: normal(7, p.shape), wide)
    step = jax.jit(fused.step)
    new, _ = step(params, grads, fused.init(params))
    wanted, _ = step(wide, grads, fused.init(wide))
    for name in params:
        assert new[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(new[name], wanted[name].astype(jnp.bfloat16))
